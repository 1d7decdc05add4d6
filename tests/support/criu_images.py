"""Writes what CRIU writes: pagemaps, and streams of pages."""

import struct
from collections.abc import Iterable

from safepoint.transparent.pages.pagemap import MAGIC, PRESENT


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(fields: Iterable[tuple[int, int]]) -> bytes:
    """A record of a CRIU image whose fields are numbers."""
    body = b"".join(varint(number << 3) + varint(value) for number, value in fields)
    return struct.pack("<I", len(body)) + body


def pagemap(pages_id: int, ranges: Iterable[tuple[int, int]], *, flags: int = PRESENT) -> bytes:
    """A pagemap as CRIU 4.2 writes it; `ranges` are addresses and numbers of pages."""
    entries = (message([(1, address), (2, 0), (4, flags), (5, num)]) for address, num in ranges)
    return MAGIC + message([(1, pages_id)]) + b"".join(entries)
