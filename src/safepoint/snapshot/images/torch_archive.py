"""The archive that `torch.save` writes.

Its layout is computed from the sizes of its content; checksums are added later. The format is torch's: a zip archive
without compression, with one record for the pickle and one for each storage. The data of each record begin at a
multiple of 64 bytes, and the checksums follow the data. Here the pickle comes after the storages, so that its length
does not change the position of a storage. Readers find each record through the archive's directory.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PICKLE_BEGIN, PICKLE_END = b"\x80\x02", b"."
_ALIGNMENT = 64
_FLAGS = 0x0808  # names in UTF-8, checksums after the data
_WIDE = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<IIII"), struct.Struct("<IIQQ")
_END = struct.Struct("<IHHHHIIH")
_WIDE_END = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive without compression, whose checksums are filled in when the file is written.

    Args:
        begin: where the archive begins in the file.
        directory: where the central directory of the archive begins in the file.
        num_entries: the number of entries in the central directory.
    """

    begin: int
    directory: int
    num_entries: int


class StorageRecords:
    """The records of all storages, which come first in the archive.

    Args:
        prefix: the name of the archive's top folder.
        sizes: the sizes of the storages, in bytes.
    """

    def __init__(self, prefix: str, sizes: Sequence[int]) -> None:
        self.prefix = prefix
        records: list[_Record] = []
        self.end = 0
        for number, size in enumerate(sizes):
            records.append(_Record(f"{prefix}/data/{number}", size, self.end))
            self.end = records[-1].end
        self.places = [record.data for record in records]
        """Where the data of each storage begins."""
        self.literals = tuple(literal for record in records for literal in record.literals)
        """(offset, content) of the bytes around the data: the header and the descriptor of each record."""
        self.central = b"".join(record.central for record in records)


class Layout(NamedTuple):
    """A whole archive.

    Args:
        size_bytes: the size of the file.
        literals: (offset, content) of the bytes after the records of the storages.
        archive: see `Archive`.
    """

    size_bytes: int
    literals: tuple[tuple[int, bytes], ...]
    archive: Archive


def lay_out(storages: StorageRecords, pickled: bytes) -> Layout:
    """Lay out a whole archive: the records of the storages, then the pickle and the small records.

    Args:
        storages: the records of the storages.
        pickled: the pickle, which refers to the storages.
    """
    offset = storages.end
    small: list[tuple[_Record, bytes]] = []
    for name, content in (
        ("data.pkl", pickled),
        ("byteorder", b"little"),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("version", b"3\n"),
    ):
        record = _Record(f"{storages.prefix}/{name}", len(content), offset)
        small.append((record, content))
        offset = record.end
    directory = storages.central + b"".join(record.central for record, _ in small)
    count = len(storages.places) + len(small)
    tail = directory + _end_of(count, len(directory), offset)
    literals = [literal for record, _ in small for literal in record.literals]
    literals += [(record.data, content) for record, content in small]
    return Layout(
        offset + len(tail), (*literals, (offset, tail)), Archive(begin=0, directory=offset, num_entries=count)
    )


class _Record:
    """One record of an archive, at `start`: header, data, descriptor."""

    def __init__(self, name: str, size: int, start: int) -> None:
        text = name.encode()
        is_wide = size >= _WIDE
        extra = struct.pack("<HHQQ", 1, 16, size, size) if is_wide else b""
        header_bytes = _LOCAL.size + len(text) + len(extra)
        padding = -(start + header_bytes) % _ALIGNMENT
        if 0 < padding < 4:
            padding += _ALIGNMENT
        if padding:
            extra += struct.pack("<2sH", b"FB", padding - 4) + bytes(padding - 4)
        short = _WIDE if is_wide else size
        version = 45 if is_wide else 0
        header = _LOCAL.pack(0x04034B50, version, _FLAGS, 0, 0, 0, 0, short, short, len(text), len(extra))
        self.size = size
        self.data = start + len(header) + len(text) + len(extra)
        width = _WIDE_DESCRIPTOR if is_wide else _DESCRIPTOR
        descriptor = width.pack(0x08074B50, 0, size, size)
        self.end = self.data + size + len(descriptor)
        self.literals = ((start, header + text + extra), (self.data + size, descriptor))
        self.central = _central(text, size, start)


def _central(name: bytes, size: int, start: int) -> bytes:
    wide: list[int] = []
    if size >= _WIDE:
        wide += [size, size]
    if start >= _WIDE:
        wide.append(start)
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    short = min(size, _WIDE)
    version = 45 if wide else 0
    lengths = (len(name), len(extra), 0)
    head = _CENTRAL.pack(
        0x02014B50, version, version, _FLAGS, 0, 0, 0, 0, short, short, *lengths, 0, 0, 0, min(start, _WIDE)
    )
    return head + name + extra


def _end_of(count: int, size: int, offset: int) -> bytes:
    wide = b""
    if offset >= _WIDE or count >= 0xFFFF:
        wide = _WIDE_END.pack(0x06064B50, 44, 45, 45, 0, 0, count, count, size, offset)
        wide += _LOCATOR.pack(0x07064B50, 0, offset + size, 1)
    short_count = min(count, 0xFFFF)
    return wide + _END.pack(0x06054B50, 0, 0, short_count, short_count, size, min(offset, _WIDE), 0)


# ---- finding the records of a written archive, to fill in their checksums ------------------------------------------


class Record(NamedTuple):
    """One record of an archive. All offsets are from the beginning of the file.

    Args:
        data: where its data begins.
        size: the size of the data, in bytes.
        end: where the record ends: after the descriptor that follows the data.
        checksums: the two offsets at which its CRC-32 is stored, 4 bytes each.
    """

    data: int
    size: int
    end: int
    checksums: tuple[int, int]


def records_of(archive: Archive, view: Callable[[int, int], memoryview]) -> Iterator[Record]:
    """The records of an archive whose headers and directory are already written, in the directory's order.

    Args:
        archive: where the archive is in the file.
        view: returns the part of the file at (start, length).
    """
    entry = archive.directory
    for _ in range(archive.num_entries):
        central = _CENTRAL.unpack(view(entry, _CENTRAL.size))
        name_bytes, extra_bytes, comment_bytes = central[10:13]
        extra = entry + _CENTRAL.size + name_bytes
        size, start = _wide(central[9], central[16], view(extra, extra_bytes))
        start += archive.begin
        header = _LOCAL.unpack(view(start, _LOCAL.size))
        data = start + _LOCAL.size + header[9] + header[10]
        end = data + size + (24 if size >= _WIDE else 16)
        # The checksum in the descriptor follows its signature of 4 bytes.
        yield Record(data, size, end, (data + size + 4, entry + 16))
        entry = extra + extra_bytes + comment_bytes


def _wide(size: int, start: int, extra: memoryview) -> tuple[int, int]:
    """The size and the offset of a record. A value of 4 GiB or more is read from the record's extra field."""
    if size < _WIDE and start < _WIDE:
        return size, start
    values = list(struct.unpack(f"<{(len(extra) - 4) // 8}Q", extra[4:]))
    if size >= _WIDE:
        size = values.pop(0)
        values.pop(0)
    if start >= _WIDE:
        start = values.pop(0)
    return size, start
