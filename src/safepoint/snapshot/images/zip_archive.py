"""Zip archives inside files in the making: where their records are, and where checksums belong."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
_WIDE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive without compression, whose checksums are filled in when the file is written.

    Args:
        begin: its first byte in the file.
        directory: where its central directory begins, in the file.
        num_entries: of the directory.
    """

    begin: int
    directory: int
    num_entries: int


class Record(NamedTuple):
    """One record of an archive; all places are those in the file.

    Args:
        data: where its data begins.
        size: of the data, in bytes.
        end: of its descriptor, which stands behind the data.
        checksums: where its CRC-32 belongs, in 4 bytes each.
    """

    data: int
    size: int
    end: int
    checksums: tuple[int, int]


def records_of(archive: Archive, view: Callable[[int, int], memoryview]) -> Iterator[Record]:
    """The records of an archive whose headers and directory are there, in the directory's order.

    Args:
        archive: where it is.
        view: gives the part of the file at (start, length).
    """
    entry = archive.directory
    for _ in range(archive.num_entries):
        central = _CENTRAL_HEADER.unpack(view(entry, _CENTRAL_HEADER.size))
        name_bytes, extra_bytes, comment_bytes = central[10:13]
        extra = entry + _CENTRAL_HEADER.size + name_bytes
        size, start = _wide(central[9], central[16], view(extra, extra_bytes))
        start += archive.begin
        header = _LOCAL_HEADER.unpack(view(start, _LOCAL_HEADER.size))
        data = start + _LOCAL_HEADER.size + header[9] + header[10]
        end = data + size + (24 if size >= _WIDE else 16)
        yield Record(data, size, end, (data + size + 4, entry + 16))  # behind the descriptor's signature
        entry = extra + extra_bytes + comment_bytes


def _wide(size: int, start: int, extra: memoryview) -> tuple[int, int]:
    """Sizes and offsets of 4 GiB and more stand in the entry's extra field."""
    if size < _WIDE and start < _WIDE:
        return size, start
    values = list(struct.unpack(f"<{(len(extra) - 4) // 8}Q", extra[4:]))
    if size >= _WIDE:
        size = values.pop(0)
        values.pop(0)
    if start >= _WIDE:
        start = values.pop(0)
    return size, start
