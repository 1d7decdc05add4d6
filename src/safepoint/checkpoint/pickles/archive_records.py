"""Checks the directory of a zip archive before anything in the archive is read.

`torch.save` stores the records of its archives without compression. In an archive that an attacker has written,
records can be compressed (4 MB become 4 GB), overlap, or have the same name, so that two readers read different data.
`check_records` refuses such an archive.
"""

import io
import zipfile
from typing import BinaryIO

from safepoint.storage.browsing import RawReader

_MAX_DIRECTORY_BYTES = 32 << 20
"""The limit of the size of an archive's directory. A directory of this size lists about 400,000 records."""
_END_BYTES, _LOCATOR_BYTES, _LARGE_END_BYTES = 22, 20, 56
_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_ENCRYPTED, _PATCHED, _STRONGLY_ENCRYPTED = 0x1, 0x20, 0x40
_BAD_FLAGS = _ENCRYPTED | _PATCHED | _STRONGLY_ENCRYPTED


class ArchiveError(ValueError):
    """An archive is damaged, or has a directory that `torch.save` does not write."""


class ArchiveReader(RawReader):
    """A file object over an archive. `most_bytes` limits how many bytes one call of `read` may request.

    `zipfile` reads the directory with one call, and then each record with another.
    """

    most_bytes = _MAX_DIRECTORY_BYTES

    def read(self, n: int = -1, /) -> bytes:
        """See `io.RawIOBase`.

        Raises:
            ArchiveError: more bytes are requested than `most_bytes`.
        """
        if n > self.most_bytes:
            raise ArchiveError(f"it has a record of more than {self.most_bytes} bytes")
        return super().read(n) or b""


def check_records(file: BinaryIO) -> dict[str, int]:
    """Check the directory of an archive. The archive begins at the position of `file`, and reaches to the end of
    `file`.

    The position does not change.

    Returns:
        The size of each record, by its name in lower case without the folder that contains all records.

    Raises:
        ArchiveError: the archive is damaged, or two zip readers could find different directories in it. Also if a
            record is compressed or encrypted, if two records have the same name, if the records are in several
            folders, or if the records together have more bytes than the file.
        OSError: the file cannot be read.
    """
    place = file.tell()
    try:
        file.seek(0, io.SEEK_END)
        # The result of `seek` is not used: DCP's file objects return the position in another file.
        size_bytes = file.tell() - place

        def read_range(start: int, count: int) -> bytes:
            file.seek(place + start)
            return file.read(count)

        reader = ArchiveReader(size_bytes, read_range)
        with zipfile.ZipFile(reader) as archive:
            check_directory(reader, archive, size_bytes)
            return {one.filename.lower().partition("/")[2]: one.file_size for one in archive.infolist()}
    except (ArchiveError, MemoryError):
        raise
    except Exception as error:  # `zipfile` raises several kinds of exceptions for hostile content
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ArchiveError(f"its directory is damaged ({error})") from error
    finally:
        file.seek(place)


def check_directory(file: ArchiveReader, archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Like `check_records`, for an archive that is open already.

    Args:
        file: the file that contains the archive; the position in the file is changed.
        archive: the opened archive.
        size_bytes: the size of the file.

    Raises:
        ArchiveError: see `check_records`.
    """
    _check_place(file, archive, size_bytes)
    records = archive.infolist()
    names = {record.filename.lower() for record in records}  # in lower case, because torch's reader ignores the case
    if len(names) != len(records):
        raise ArchiveError("two of its records have the same name")
    if len({name.partition("/")[0] for name in names}) > 1:  # torch reads the first folder, and others the last one
        raise ArchiveError("its records are in several folders")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ArchiveError("a record in it is compressed")
        if record.flag_bits & _BAD_FLAGS:
            raise ArchiveError("a record in it is encrypted")
    if sum(record.file_size for record in records) > size_bytes:
        raise ArchiveError("its records have more bytes than the file")


def _check_place(file: ArchiveReader, archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Refuse an archive that states a wrong position of its directory, or that continues after its end.

    `zipfile` corrects a wrong position of the directory, but torch does not, so the two could read different
    directories.
    """
    at = size_bytes - _END_BYTES
    file.seek(at)
    end = file.read(_END_BYTES)
    stated = int.from_bytes(end[16:20], "little")
    if end[:4] != _END or end[20:] != b"\0\0":
        raise ArchiveError("it has bytes after its directory")
    file.seek(max(0, at - _LOCATOR_BYTES))
    locator = file.read(_LOCATOR_BYTES)
    if locator[:4] == _LOCATOR:
        at -= _LOCATOR_BYTES + _LARGE_END_BYTES
        if int.from_bytes(locator[8:16], "little") != at:
            raise ArchiveError("its directory is not where its end says")
        file.seek(at)
        stated = int.from_bytes(file.read(_LARGE_END_BYTES)[48:56], "little")
    if stated != archive.start_dir:
        raise ArchiveError("its directory is not where its end says")
