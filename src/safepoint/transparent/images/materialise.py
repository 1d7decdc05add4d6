"""Verifies an image, and writes the folders from which CRIU restores its processes.

Promises: every file that `materialise` writes is byte for byte what CRIU had written. If this is not possible,
`materialise` raises `ImageError`, and the caller must not start CRIU. docs/process-images.md lists all checks.
"""

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.digest import FileDigester, digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.errors import ImageError, StorageError
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.units import format_bytes
from safepoint.foundation.volumes.needed import free_bytes
from safepoint.transparent.images.location import ImageLocation, Progress
from safepoint.transparent.images.manifest import ImageManifest, is_criu_name
from safepoint.transparent.images.names import part_name
from safepoint.transparent.images.store_dump import check_tables, is_table, open_tables, tables_of
from safepoint.transparent.pages.layout import PAGE_BYTES, THIS_IMAGE
from safepoint.transparent.pages.pagemap import MOST_BYTES, read_pagemap
from safepoint.transparent.pages.reader import check_pages, restore_pages
from safepoint.transparent.pages.regions import RegionFile
from safepoint.transparent.pages.table import PageFileId, PageTable
from safepoint.transparent.pages.writer import regions_name
from safepoint.transparent.protection.files import FileProtection, ProtectedFile

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20
_MOST_OPEN = 256
"""If a chain has more page files than this, each file of regions is open only while it is read, because the number of
descriptors of a process is limited."""
_MODE = 0o600


def verify(location: ImageLocation, name: str, *, deep: bool, progress: Progress | None = None) -> ImageManifest:
    """Check an image and the images that it needs.

    Args:
        location: where it is.
        name: the image.
        deep: read every file and every page, and compare their digests. If False, only manifests, names, sizes,
            tables and pagemaps are checked.
        progress: called with the number of bytes of pages read since the last call.

    Raises:
        ImageError: the first fault that was found.
    """
    with _opened(location, name, has_pages=deep, is_read=lambda _: deep) as image:
        if deep:
            for table, files in image.page_files():
                check_pages(table, files, progress=progress)
        return image.manifest


def raw_bytes(manifest: ImageManifest) -> int:
    """The space that the files of `materialise` take, in bytes. Pages of zeros take none."""
    pages = sum(one.num_pages - one.num_zero for one in manifest.page_files)
    return pages * PAGE_BYTES + sum(entry.size_bytes for entry in manifest.files if is_criu_name(_base(entry.path)))


def image_document(manifest: ImageManifest, location: ImageLocation) -> dict[str, Any]:
    """The facts of an image that programs read, as JSON values."""
    return {
        "name": manifest.name,
        "path": location.where(manifest.name),
        "created": manifest.created,
        "program": manifest.parts[0].program,
        "num_processes": sum(part.num_processes for part in manifest.parts),
        "size_bytes": manifest.size_bytes,
        "memory_bytes": raw_bytes(manifest),
        "num_pages": manifest.num_pages,
        "num_stored": manifest.num_stored,
        "needs": [source.name for source in manifest.sources],
    }


def materialise(
    location: ImageLocation, name: str, target: Path, *, progress: Progress | None = None
) -> ImageManifest:
    """Write the files that CRIU had written, one folder for each part, and check all of them.

    Args:
        location: where the image is.
        name: the image.
        target: an empty folder; `part-K` are created in it.
        progress: called with the number of bytes of pages written since the last call.

    Raises:
        ImageError: the image, or an image that it needs, has a fault. The files in `target` must not be used.
        StorageError: `target` has too little space.
        OSError: files cannot be read or written.
    """
    # The digests of regions are compared while the regions are read, and the digests of CRIU's files while the files
    # are copied.
    with _opened(location, name, has_pages=True, is_read=is_table, target=target) as image:
        needed = raw_bytes(image.manifest) + _SPARE_BYTES
        if free_bytes(target) < needed:
            raise StorageError(
                f"{target} has {format_bytes(free_bytes(target))} free, and the pages of {name} need "
                f"{format_bytes(needed)}; nothing was restored",
                hint="name a folder with more space",
            )
        for number in range(len(image.manifest.parts)):
            no_links.make_folder(target / part_name(number), 0o700)
        for entry in image.manifest.files:
            if is_criu_name(_base(entry.path)):
                with image.file(entry.path) as source:
                    _copy(source, target / entry.path, entry)
        for (part, file), (table, files) in zip(image.tables, image.page_files(), strict=True):
            path = target / part_name(part) / f"pages-{file}.img"
            descriptor = no_links.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
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
        check_tables(self._chain, self.tables)

    def open(self, stack: contextlib.ExitStack) -> None:
        """Open the files of regions to which the tables refer."""
        needed = {key for table in self.tables.values() for key in table.page_files()} & self._of_chain.keys()
        paths = {key: f"{part_name(key.part)}/{regions_name(key.file)}" for key in needed}
        for distance, one in enumerate(self._chain):
            self._location.fetch(
                one, {paths[key] for key in needed if key.image == THIS_IMAGE + distance}.__contains__
            )
        is_kept_open = len(needed) <= _MOST_OPEN
        for key in sorted(needed):
            one = self._chain[key.image - THIS_IMAGE]
            path = self._location.path(one.name) / paths[key]
            protection = _protection(self._location, one, paths[key])
            self._files[key] = RegionFile(path, self._of_chain[key], protection, is_kept_open=is_kept_open)
            stack.callback(self._files[key].close)

    def file(self, path: str) -> ProtectedFile:
        """Open a file of the image itself."""
        whole = self._location.path(self.manifest.name) / path
        return ProtectedFile(whole, _protection(self._location, self.manifest, path))

    def page_files(self) -> list[tuple[PageTable, dict[PageFileId, RegionFile]]]:
        return [(table, self._files) for table in self.tables.values()]

    def check_pagemaps(self) -> None:
        """Raise ImageError unless each pagemap has the pages of one table, and each table has one pagemap."""
        for number, part in enumerate(self.manifest.parts):
            pages_of = {one.file: one.num_pages for one in part.page_files}
            folder = part_name(number)
            for entry in self.manifest.files:
                name = _base(entry.path)
                if entry.path != f"{folder}/{name}" or not _is_pagemap(name):
                    continue
                with self.file(entry.path) as file:
                    data = file.read(0, min(file.size_bytes, MOST_BYTES + 1))
                    if len(data) == file.size_bytes:
                        digester = FileDigester()
                        digester.update(memoryview(data))
                        _check_content(file, digester, entry)
                pagemap = read_pagemap(data, entry.path)
                if pages_of.pop(pagemap.pages_id, 0) != pagemap.num_pages:
                    raise ImageError(f"{entry.path} and the table of its pages differ; the image was not used")
            missing = [file for file, num_pages in pages_of.items() if num_pages]
            if missing:
                raise ImageError(f"pages-{min(missing)} of {folder} has no pagemap; the image was not used")


@contextlib.contextmanager
def _opened(
    location: ImageLocation,
    name: str,
    *,
    has_pages: bool,
    is_read: Callable[[str], bool],
    target: Path | None = None,
) -> Generator[_OpenImage]:
    """Check an image as far as possible without its pages, and open it.

    Args:
        location: where it is.
        name: the image.
        has_pages: whether its pages are going to be read.
        is_read: chooses the files whose digests are compared.
        target: the folder to which the caller writes. It may be below the folder of the images, and an OSError about
            a file in it is no fault of the image.
    """
    manifest = location.read(name)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(location.leased([name, *(source.name for source in manifest.sources)]))
            for one in location.chain(manifest):
                faults = location.faults(one)
                if faults:
                    raise ImageError(f"{location.where(one.name)} is damaged: {faults[0]}; it was not used")
            _check_digests(location, manifest, is_read)
            image = _OpenImage(location, manifest)
            if has_pages:
                image.open(stack)
            location.fetch(manifest, lambda path: is_criu_name(_base(path)) if has_pages else _is_pagemap(path))
            image.check_pagemaps()
            yield image
    except OSError as error:
        path = None if error.filename is None else Path(os.fsdecode(error.filename))
        is_written = path is not None and target is not None and path.is_relative_to(target)
        if path is not None and path.is_relative_to(location.folder) and not is_written:
            raise ImageError(f"{error.filename} cannot be read: {error.strerror}; it was not used") from error
        raise


def _check_digests(location: ImageLocation, manifest: ImageManifest, is_read: Callable[[str], bool]) -> None:
    location.fetch(manifest, is_read)
    for entry in manifest.files:
        if not is_read(entry.path):
            continue
        path = location.path(manifest.name) / entry.path
        found = digest_file(path, expected_bytes=entry.size_bytes, expected_parts=entry.parts)
        if found.digest != entry.digest:
            raise _altered(path)


def _protection(location: ImageLocation, manifest: ImageManifest, path: str) -> FileProtection | None:
    protection = location.protection_of(manifest)
    return None if protection is None else protection.of_file(path)


def _copy(source: ProtectedFile, target: Path, entry: FileEntry) -> None:
    """Copy the content of a file, and check the copied bytes, because another program may have changed the file."""
    if source.stored_bytes != entry.size_bytes:
        raise _altered(entry.path)
    digester = FileDigester()
    descriptor = no_links.create_file(target, _MODE)
    with os.fdopen(descriptor, "wb") as copy:
        for offset in range(0, source.size_bytes, _CHUNK_BYTES):
            piece = source.read(offset, min(_CHUNK_BYTES, source.size_bytes - offset))
            copy.write(piece)
            digester.update(memoryview(piece))
    _check_content(source, digester, entry)


def _check_content(file: ProtectedFile, digester: FileDigester, entry: FileEntry) -> None:
    """Compare the content of a file with its entry, unless a key authenticated the content while it was read."""
    if file.is_authenticated:
        return
    digester.update(memoryview(file.tags()))
    if FileEntry.of(entry.path, digester.result()) != entry:
        raise _altered(entry.path)


def _altered(path: object) -> ImageError:
    return ImageError(f"{path} was altered after it was written: its digest does not match; it was not used")


def _is_pagemap(path: str) -> bool:
    return _base(path).startswith("pagemap-")


def _base(path: str) -> str:
    return path.rpartition("/")[2]
