"""From an image back to the folders that CRIU restores from, and the verification of an image.

Promises: every file that `materialise` writes is byte for byte what CRIU had written; otherwise there is an
`ImageError`, and the caller must not start CRIU. All checks of docs/process-images.md are made here.
"""

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path

from safepoint.checkpoint.format.digest import FileDigester, digest_bytes, digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.errors import ImageError, StorageError
from safepoint.foundation.files import free_bytes
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.foundation.units import format_bytes
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest, is_criu_name, part_name
from safepoint.transparent.images.store_dump import check_tables, open_tables, tables_of
from safepoint.transparent.pages.layout import PAGE_BYTES, THIS_IMAGE
from safepoint.transparent.pages.pagemap import MOST_BYTES, read_pagemap
from safepoint.transparent.pages.reader import check_pages, restore_pages
from safepoint.transparent.pages.regions import RegionFile
from safepoint.transparent.pages.table import PageFileId, PageTable
from safepoint.transparent.pages.writer import regions_name

Progress = Callable[[int], None]
_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20
_MOST_OPEN = 256
"""If a chain has more page files, their regions are opened when they are read: a process may have few descriptors."""
_MODE = 0o600


def verify(location: ImageLocation, name: str, *, deep: bool, progress: Progress | None = None) -> ImageManifest:
    """Check an image and the images that it needs.

    Args:
        location: where it is.
        name: the image.
        deep: also read every file and every page, and compare their digests; otherwise manifests, names and sizes.
        progress: called with the number of bytes of pages read since the last call.

    Raises:
        ImageError: the first fault that was found.
    """
    with _opened(location, name, is_read=lambda _: deep) as image:
        if deep:
            for table, files in image.page_files():
                check_pages(table, files, progress=progress)
        return image.manifest


def raw_bytes(manifest: ImageManifest) -> int:
    """The space that the files of `materialise` take, in bytes. Pages of zeros take none."""
    pages = sum(one.num_pages - one.num_zero for one in manifest.page_files)
    return pages * PAGE_BYTES + sum(entry.size_bytes for entry in manifest.files if is_criu_name(_base(entry.path)))


def materialise(
    location: ImageLocation, name: str, target: Path, *, progress: Progress | None = None
) -> ImageManifest:
    """Write what CRIU had written, one folder for each part, and check all of it.

    Args:
        location: where the image is.
        name: the image.
        target: an empty folder; `part-K` are created in it.
        progress: called with the number of bytes of pages written since the last call.

    Raises:
        ImageError: a fault in the image or in one that it needs. The files in `target` must not be used.
        StorageError: `target` has too little space.
        OSError: files cannot be read or written.
    """
    # The digests of regions are compared when these are read, and those of CRIU's files when they are copied.
    with _opened(location, name, is_read=lambda path: path.endswith(".table")) as image:
        needed = raw_bytes(image.manifest) + _SPARE_BYTES
        if free_bytes(target) < needed:
            raise StorageError(
                f"{target} has {format_bytes(free_bytes(target))} free, and the pages of {name} need "
                f"{format_bytes(needed)}; nothing was restored",
                hint="name a folder with more space",
            )
        for number in range(len(image.manifest.parts)):
            no_links.make_folder(target / part_name(number), 0o700)
        source = location.path(name)
        for entry in image.manifest.files:
            if is_criu_name(_base(entry.path)):
                _copy(source / entry.path, target / entry.path, entry)
        for (part, file), (table, files) in zip(image.tables, image.page_files(), strict=True):
            path = target / part_name(part) / f"pages-{file}.img"
            descriptor = no_links.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
            try:
                restore_pages(table, files, descriptor, progress=progress)
            finally:
                os.close(descriptor)
        return image.manifest


class _OpenImage:
    """An image whose tables and region files are open and checked."""

    def __init__(self, location: ImageLocation, manifest: ImageManifest) -> None:
        self.manifest = manifest
        self._location = location
        self._chain = location.chain(manifest)
        self.tables = tables_of(location, manifest)
        self._of_chain: dict[PageFileId, PageTable] = {}
        self._files: dict[PageFileId, RegionFile] = {}
        for distance, one in enumerate(self._chain):
            for (part, file), table in open_tables(location, one) if distance else self.tables.items():
                self._of_chain[PageFileId(THIS_IMAGE + distance, part, file)] = table.without_pages()

    def open(self, stack: contextlib.ExitStack) -> None:
        check_tables(self._chain, self.tables)
        is_kept_open = len(self._of_chain) <= _MOST_OPEN
        for key, table in self._of_chain.items():
            folder = self._location.path(self._chain[key.image - THIS_IMAGE].name) / part_name(key.part)
            self._files[key] = RegionFile(folder / regions_name(key.file), table, is_kept_open=is_kept_open)
            stack.callback(self._files[key].close)

    def page_files(self) -> list[tuple[PageTable, dict[PageFileId, RegionFile]]]:
        return [(table, self._files) for table in self.tables.values()]

    def check_pagemaps(self) -> None:
        """Each pagemap has the pages of one table, and each table has one pagemap."""
        for number, part in enumerate(self.manifest.parts):
            pages_of = {one.file: one.num_pages for one in part.page_files}
            folder = part_name(number)
            for entry in self.manifest.files:
                name = _base(entry.path)
                if entry.path != f"{folder}/{name}" or not name.startswith("pagemap-"):
                    continue
                with open_regular(self._location.path(self.manifest.name) / entry.path) as file:
                    data = file.read(MOST_BYTES + 1)
                if digest_bytes(data) != entry.digest:
                    raise _altered(entry.path)
                pagemap = read_pagemap(data, entry.path)
                if pages_of.pop(pagemap.pages_id, 0) != pagemap.num_pages:
                    raise ImageError(f"{entry.path} and the table of its pages differ; the image was not used")
            if any(pages_of.values()):
                raise ImageError(f"pages-{min(pages_of)} of {folder} has no pagemap; the image was not used")


@contextlib.contextmanager
def _opened(location: ImageLocation, name: str, *, is_read: Callable[[str], bool]) -> Generator[_OpenImage]:
    """Open an image after all checks that need no pages. `is_read` chooses the files whose digests are compared."""
    manifest = location.read(name)
    for one in location.chain(manifest):
        faults = location.faults(one)
        if faults:
            raise ImageError(f"{location.path(one.name)} is damaged: {faults[0]}; it was not used")
    try:
        _check_digests(location, manifest, is_read)
        with contextlib.ExitStack() as stack:
            image = _OpenImage(location, manifest)
            image.open(stack)
            image.check_pagemaps()
            yield image
    except OSError as error:
        if error.filename is not None and str(error.filename).startswith(str(location.folder)):
            raise ImageError(f"{error.filename} cannot be read: {error.strerror}; it was not used") from error
        raise


def _check_digests(location: ImageLocation, manifest: ImageManifest, is_read: Callable[[str], bool]) -> None:
    for entry in manifest.files:
        if not is_read(entry.path):
            continue
        path = location.path(manifest.name) / entry.path
        found = digest_file(path, expected_bytes=entry.size_bytes, expected_parts=entry.parts)
        if found.digest != entry.digest:
            raise _altered(path)


def _altered(path: object) -> ImageError:
    return ImageError(f"{path} was altered after it was written: its digest does not match; it was not used")


def _copy(source: Path, target: Path, entry: FileEntry) -> None:
    """Copy a file, and compare what was copied with its digest: another program may have changed the file."""
    digester = FileDigester()
    descriptor = no_links.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "wb") as copy, open_regular(source) as file:
        while piece := file.read(min(_CHUNK_BYTES, entry.size_bytes + 1 - copy.tell())):
            copy.write(piece)
            digester.update(memoryview(piece))
    if FileEntry.of(entry.path, digester.result()) != entry:
        raise _altered(source)


def _base(path: str) -> str:
    return path.rpartition("/")[2]
