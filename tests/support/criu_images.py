"""Writes what CRIU writes, and images of it: pagemaps, streams of pages, and a whole dump."""

import random
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest, Machine
from safepoint.transparent.images.store_dump import Dump, store_dumps
from safepoint.transparent.pages.pagemap import MAGIC, PRESENT

MACHINE = Machine(architecture="x86_64", kernel="6.18", criu="4.2.1")


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


def dump(folder: Path, processes: Mapping[int, bytes], *, first_address: int = 1 << 20) -> Path:
    """A folder as CRIU leaves it: for each process number its pages, and files whose content does not matter.

    The pages of a process begin at `first_address`, with a gap after every 16 pages.
    """
    folder.mkdir()
    for pages_id, (pid, pages) in enumerate(processes.items(), start=1):
        num_pages = len(pages) // 4096
        ranges = [
            (first_address + index * 32 * 4096, min(16, num_pages - index * 16))
            for index in range(-(-num_pages // 16))
        ]
        (folder / f"pages-{pages_id}.img").write_bytes(pages)
        (folder / f"pagemap-{pid}.img").write_bytes(pagemap(pages_id, ranges))
        (folder / f"core-{pid}.img").write_bytes(b"core of " + message([(1, pid)]))
        (folder / f"ids-{pid}.img").write_bytes(b"ids of %d" % pid)
    for name in ("inventory.img", "pstree.img", "tmpfs-dev-72.tar.gz.img", "stats-dump", "dump.log"):
        (folder / name).write_bytes(name.encode())
    return folder


def add_image(location: ImageLocation, folder: Path, processes: Mapping[int, bytes]) -> ImageManifest:
    """Dump the processes to `folder`, and commit an image of them, which continues the newest chain."""
    dumped = Dump(folder=dump(folder, processes), root_pid=min(processes), program="python")
    with location.writing() as image:
        manifest = store_dumps(image, [dumped], MACHINE, parent=location.parent())
        image.commit(manifest)
    return manifest


def random_pages(seed: int, num_pages: int) -> bytes:
    """Pages that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(num_pages * 4096)


def same_files(dumped: Path, restored: Path) -> None:
    """Check that the files for CRIU are those that CRIU has written."""
    expected = {path.name: path.read_bytes() for path in dumped.glob("*.img")}
    assert {path.name: path.read_bytes() for path in restored.iterdir()} == expected
