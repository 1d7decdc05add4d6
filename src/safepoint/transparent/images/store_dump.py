"""Makes an image of the folders that CRIU has written. Pages are stored by content, all other files unchanged."""

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safepoint.checkpoint.format.digest import FileDigest
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.errors import ImageError
from safepoint.foundation import clock
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import copy_at_most, open_regular
from safepoint.transparent.images.location import ImageLocation, NewImage, source_of
from safepoint.transparent.images.manifest import (
    MOST_FILE_BYTES,
    ImageManifest,
    Machine,
    PageFileFacts,
    Part,
    is_criu_name,
)
from safepoint.transparent.images.names import part_name
from safepoint.transparent.pages.layout import THIS_IMAGE
from safepoint.transparent.pages.older import OlderPages
from safepoint.transparent.pages.pagemap import MOST_BYTES, read_pagemap
from safepoint.transparent.pages.table import PageFileId, PageTable
from safepoint.transparent.pages.writer import PageStream, regions_name, table_name, write_pages
from safepoint.transparent.protection.files import FileProtection, ProtectedWriter

_PAGES = re.compile(r"pages-(0|[1-9][0-9]{0,4})\.img")
_PAGEMAP = re.compile(r"pagemap-.*\.img")
_IDS = re.compile(r"ids-[0-9]+\.img")
"""CRIU writes one such file for each process. (It writes a `core-N.img` for each thread.)"""
_log = logging.getLogger("safepoint")
_MODE = 0o600
_MOST_COPIED_BYTES = MOST_FILE_BYTES - (1 << 20)
"""Less than `MOST_FILE_BYTES`, so that the stored file has room for its tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One process tree that CRIU has dumped.

    Args:
        folder: what CRIU has written.
        root_pid: the number of the root process, as the processes see it.
        program: the name of the root process.
        is_in_session_of_other: see `Part`.
    """

    folder: Path
    root_pid: int
    program: str
    is_in_session_of_other: bool = False


def store_dumps(
    image: NewImage,
    dumps: Sequence[Dump],
    machine: Machine,
    *,
    parent: Sequence[ImageManifest] = (),
    progress: Callable[[int], None] | None = None,
) -> ImageManifest:
    """Write the files of an image. The caller commits it.

    Args:
        image: where the files are written.
        dumps: the process trees.
        machine: where they were frozen.
        parent: the chain that the image continues, see `ImageLocation.parent`; empty for a complete image.
        progress: called with the number of bytes of pages read since the last call.

    Raises:
        ImageError: the files that CRIU has written are not consistent.
        OSError: the files cannot be read or written.
    """
    parent, older = _continued(image.location, parent)
    seed = parent[0].seed if parent else secrets.randbits(64)
    protection = image.location.new_protection()
    parts: list[Part] = []
    entries: list[FileEntry] = []
    for number, dump in enumerate(dumps):
        page_files: list[PageFileFacts] = []
        folder = part_name(number)
        target = image.folder / folder

        def protect(name: str, folder: str = folder) -> FileProtection | None:
            return None if protection is None else protection.of_file(f"{folder}/{name}")

        no_links.make_folder(target, 0o700)
        pages_of = _read_pagemaps(dump.folder)
        names = sorted(os.listdir(dump.folder))
        for name in names:
            match = _PAGES.fullmatch(name)
            if match:
                file = int(match[1])
                with open_regular(dump.folder / name) as source:
                    written = write_pages(
                        cast("PageStream", source),
                        target,
                        part=number,
                        file=file,
                        seed=seed,
                        older=older,
                        protect=protect,
                        progress=progress,
                    )
                if pages_of.pop(file, None) != written.num_pages:
                    raise ImageError(f"CRIU's {name} and its pagemap differ; the image was not kept")
                page_files.append(
                    PageFileFacts(
                        file=file,
                        num_pages=written.num_pages,
                        num_zero=written.num_zero,
                        num_equal=written.num_equal,
                        num_stored=written.num_stored,
                    )
                )
                entries.append(FileEntry.of(f"{folder}/{table_name(file)}", written.table))
                entries.append(FileEntry.of(f"{folder}/{regions_name(file)}", written.regions))
            elif is_criu_name(name):
                digest = _copy(dump.folder / name, target / name, protect(name))
                entries.append(FileEntry.of(f"{folder}/{name}", digest))
        missing = [file for file, num_pages in pages_of.items() if num_pages]
        if missing:
            raise ImageError(f"CRIU's pages-{min(missing)}.img is missing; the image was not kept")
        parts.append(
            Part(
                root_pid=dump.root_pid,
                program=dump.program,
                num_processes=sum(_IDS.fullmatch(name) is not None for name in names),
                is_in_session_of_other=dump.is_in_session_of_other,
                page_files=tuple(sorted(page_files, key=lambda one: one.file)),
            )
        )
    manifest = ImageManifest(
        number=image.number,
        created=clock.utc_now(),
        seed=seed,
        sources=tuple(source_of(one) for one in parent),
        machine=machine,
        parts=tuple(parts),
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
    )
    return manifest.signed(protection)


def _continued(
    location: ImageLocation, parent: Sequence[ImageManifest]
) -> tuple[Sequence[ImageManifest], OlderPages | None]:
    """The chain that a new image can continue, and the pages to which the new image may refer; empty and None if
    `parent` is empty or damaged.

    The tables of the newest image in the chain are checked as for a restore, because the new image copies their
    references. If a reference were wrong, the new image could not be restored, and its processes would be lost.
    """
    if not parent:
        return (), None
    try:
        tables = tables_of(location, parent[0])
        check_tables(parent, tables)
    except (ImageError, OSError) as error:
        _log.warning(
            "the new image refers to no pages of %s, because that image is damaged: %s", parent[0].name, error
        )
        return (), None
    return parent, OlderPages(tables)


def check_tables(chain: Sequence[ImageManifest], tables: Mapping[tuple[int, int], PageTable]) -> None:
    """Check that each page of an image is stored in the image or in an image that it names.

    Args:
        chain: the image and the images that it names, newest first.
        tables: the tables of the image, see `tables_of`.

    Raises:
        ImageError: a table refers to pages that do not exist, or has other numbers of pages than the manifest.
    """
    num_stored = {
        PageFileId(THIS_IMAGE + distance, number, facts.file): facts.num_stored
        for distance, one in enumerate(chain)
        for number, part in enumerate(one.parts)
        for facts in part.page_files
    }
    for number, part in enumerate(chain[0].parts):
        for facts in part.page_files:
            table = tables[number, facts.file]
            if table.check_runs(num_stored) != (facts.num_zero, facts.num_stored, facts.num_equal):
                raise ImageError(f"{table.name} has other pages than {chain[0].name} states; it was not used")


def _read_pagemaps(folder: Path) -> dict[int, int]:
    """The number of pages in each pages file, as the pagemaps state it."""
    found: dict[int, int] = {}
    for path in sorted(folder.iterdir()):
        if _PAGEMAP.fullmatch(path.name):
            with open_regular(path) as file:
                pagemap = read_pagemap(file.read(MOST_BYTES + 1), path.name)
            if pagemap.pages_id in found:
                raise ImageError(f"two pagemaps of CRIU name pages-{pagemap.pages_id}.img; the image was not kept")
            found[pagemap.pages_id] = pagemap.num_pages
    return found


def _copy(source: Path, target: Path, protection: FileProtection | None) -> FileDigest:
    descriptor = no_links.create_file(target, _MODE)
    with os.fdopen(descriptor, "wb") as copy, open_regular(source) as file:
        writer = ProtectedWriter(copy, protection)
        is_too_large = os.fstat(file.fileno()).st_size > _MOST_COPIED_BYTES
        # The file may have grown since its size was read.
        if is_too_large or copy_at_most(file, writer.write, _MOST_COPIED_BYTES) > _MOST_COPIED_BYTES:
            raise ImageError(f"CRIU's {source.name} has more than {_MOST_COPIED_BYTES} bytes; the image was not kept")
        return writer.end()


def is_table(path: str) -> bool:
    """Whether a file of an image is the table of a page file."""
    return path.endswith(".table")


def tables_of(location: ImageLocation, manifest: ImageManifest) -> dict[tuple[int, int], PageTable]:
    """The tables of all page files of an image, by the numbers of part and page file; see `open_tables`."""
    return dict(open_tables(location, manifest))


def open_tables(location: ImageLocation, manifest: ImageManifest) -> Iterator[tuple[tuple[int, int], PageTable]]:
    """Open the tables of all page files of an image one by one, each with the numbers of part and page file.

    Raises:
        ImageError: a table is damaged, or is not the table that the manifest describes.
        OSError: a table cannot be read.
    """
    protection = location.protection_of(manifest)
    location.fetch(manifest, is_table)
    for number, part in enumerate(manifest.parts):
        for facts in part.page_files:
            name = f"{part_name(number)}/{table_name(facts.file)}"
            path = location.path(manifest.name) / name
            table = PageTable.open(path, None if protection is None else protection.of_file(name))
            header = table.header
            stated = (facts.file, manifest.seed, facts.num_pages, facts.num_stored)
            if (header.file, header.seed, header.num_pages, header.num_stored) != stated:
                raise ImageError(
                    f"{location.where(manifest.name)}/{name} is not the table that its manifest describes; it was "
                    "not used"
                )
            yield (number, facts.file), table
