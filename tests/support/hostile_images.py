"""Changes process images as a stranger would who can write to their folder: all digests are right afterwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest
from safepoint.transparent.pages.layout import RUN, TableHeader

Run = tuple[int, int, int, int, int]
"""Number of pages, image, part, file, and the first stored page."""


def seal_again(location: ImageLocation, manifest: ImageManifest, **changes: Any) -> ImageManifest:
    """Write the manifest of an image whose files were changed, with other values in it."""
    folder = location.path(manifest.name)
    files = tuple(FileEntry.of(entry.path, digest_file(folder / entry.path)) for entry in manifest.files)
    changed = replace(manifest, files=files, **changes)
    (folder / manifest.file_name).write_bytes(changed.to_bytes())
    return changed


def forge_table(path: Path, runs: Sequence[Run], *, copies: int = 1, **header: Any) -> None:
    """Give a table other runs.

    Args:
        path: the table.
        runs: the new runs.
        copies: how often the digests of its pages are repeated.
        header: other numbers for its header.
    """
    whole = path.read_bytes()
    old = TableHeader.from_bytes(whole, path.name)
    packed = b"".join(
        value.to_bytes(size, "little") for run in runs for value, size in zip(run, (4, 4, 4, 4, 8), strict=True)
    )
    begin = TableHeader.SIZE_BYTES + old.num_runs * RUN.itemsize
    end = len(whole) - 16 - old.num_pages * 16
    body = replace(old, num_runs=len(runs), **header).to_bytes() + packed + whole[begin:end] + whole[end:-16] * copies
    path.write_bytes(body + xxhash.xxh3_128_digest(body))
