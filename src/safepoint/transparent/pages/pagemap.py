"""Reads CRIU's `pagemap-*.img`: at which addresses the pages of a `pages-N.img` belong.

Promises: a pagemap that this module accepts has ascending addresses that do not overlap, and states the exact number
of pages in its pages file. Anything else is refused, before CRIU sees it.

The records of a file (see `protobuf`) are a `pagemap_head`, then a `pagemap_entry` for each range of addresses
(`images/pagemap.proto` of CRIU 4.2).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from safepoint.errors import ImageError
from safepoint.transparent.pages.layout import MOST_PAGES, PAGE_BYTES
from safepoint.transparent.pages.protobuf import fields_of, records_in

MAGIC = struct.pack("<II", 0x54564319, 0x56084025)
"""The magic number of all CRIU images, then the magic number of pagemaps."""
MOST_BYTES = 64 << 20
"""The largest pagemap that is read: about 3 million ranges of addresses."""
PARENT, LAZY, PRESENT = 1, 2, 4
"""The flags of an entry: the pages are in another image; they may be sent later; they are in the pages file."""
_MOST_RECORD_BYTES = 64
_MOST_ADDRESS = 1 << 57
_PAGES_ID, _ADDRESS, _OLD_NUM_PAGES, _OLD_PARENT, _FLAGS, _NUM_PAGES = 1, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRange:
    """Consecutive pages of a process.

    Args:
        address: where the first page belongs, in bytes; a multiple of 4096.
        num_pages: how many pages follow each other.
    """

    address: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pagemap:
    """A pagemap that was checked.

    Args:
        pages_id: the N of the `pages-N.img` that holds the pages.
        ranges: the ranges of addresses, ascending, in the order of their pages.
    """

    pages_id: int
    ranges: tuple[AddressRange, ...]

    @property
    def num_pages(self) -> int:
        """The number of pages in the pages file."""
        return sum(one.num_pages for one in self.ranges)


def read_pagemap(data: bytes, name: str) -> Pagemap:
    """Read and check a pagemap.

    Args:
        data: the whole file.
        name: the name of the file, for messages.

    Raises:
        ImageError: the pagemap is malformed, or not all of its pages are in its pages file.
    """
    try:
        records = _records(data)
        return Pagemap(pages_id=_pages_id(next(records, b"")), ranges=tuple(_ranges(records)))
    except ValueError as error:
        raise ImageError(f"{name} is not a pagemap that can be restored: {error}; it was not used") from error


def _pages_id(head: bytes) -> int:
    fields = _numbers(head)
    if _PAGES_ID not in fields:
        raise ValueError("it does not name its pages file")
    return fields[_PAGES_ID]


def _ranges(records: Iterator[bytes]) -> Iterator[AddressRange]:
    end = num_pages = 0
    for record in records:
        fields = _numbers(record)
        one = AddressRange(
            address=fields.get(_ADDRESS, -1), num_pages=fields.get(_NUM_PAGES, 0) or fields.get(_OLD_NUM_PAGES, 0)
        )
        flags = fields.get(_FLAGS, PARENT if fields.get(_OLD_PARENT) else PRESENT)
        if flags & PARENT or not flags & PRESENT or flags > PARENT | LAZY | PRESENT:
            raise ValueError(f"the pages at {one.address:#x} are not in its pages file (flags {flags})")
        if one.address < end or one.address % PAGE_BYTES or not one.num_pages:
            raise ValueError(f"its ranges do not ascend, or are not whole pages, at {one.address:#x}")
        end, num_pages = one.address + one.num_pages * PAGE_BYTES, num_pages + one.num_pages
        if end > _MOST_ADDRESS or num_pages > MOST_PAGES:
            raise ValueError(f"it has addresses or page counts that no process has, at {one.address:#x}")
        yield one


def _records(data: bytes) -> Iterator[bytes]:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("it has another magic number")
    return records_in(data, most_bytes=_MOST_RECORD_BYTES)


def _numbers(record: bytes) -> dict[int, int]:
    """The fields of a record. In both kinds of records, each field is a number, and occurs at most once."""
    found: dict[int, int] = {}
    for number, (value, *others) in fields_of(record).items():
        if not isinstance(value, int):
            raise ValueError(f"field {number} is not a number")  # noqa: TRY004  the data is invalid, not the call
        if others:
            raise ValueError(f"field {number} occurs twice")
        found[number] = value
    return found
