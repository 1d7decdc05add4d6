"""Shared memory without a name: its bounds, its way to another process, and that nothing of it stays."""

import gc
import os
import socket
from pathlib import Path

import pytest

from safepoint.foundation.channels.channel import Channel
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from tests.support.memory import shared_files


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(block_number: int) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"safepoint-{block_number} " in line]


def test_its_size_is_whole_pages() -> None:
    """At least one."""
    for size, capacity in ((0, 4096), (1, 4096), (4096, 4096), (4097, 8192)):
        block = Block.allocate(1, size)
        assert block.capacity_bytes == capacity == os.fstat(block.descriptor).st_size
        block.close()


def test_views_and_writes_stay_within() -> None:
    """What is beyond is refused, also from before the beginning."""
    block = Block.allocate(1, PAGE_BYTES)
    block.write(PAGE_BYTES - 3, b"abc")
    assert bytes(block.view(PAGE_BYTES - 3, 3)) == b"abc"
    assert bytes(block.view(PAGE_BYTES, 0)) == b""
    block.view(0, 2)[:] = b"xy"
    assert os.pread(block.descriptor, 2, 0) == b"xy"
    for start, length in ((-1, 2), (0, PAGE_BYTES + 1), (PAGE_BYTES, 1), (5, -2)):
        with pytest.raises(ValueError, match="are not within the 4096 bytes"):
            block.view(start, length)
    for start in (-1, PAGE_BYTES - 2):
        with pytest.raises(ValueError, match="are not within"):
            block.write(start, b"abc")
    block.close()


def test_it_is_as_long_as_its_file() -> None:
    """Shorter and longer again, with zeros behind the end; never longer than its capacity."""
    block = Block.allocate(1, 3 * PAGE_BYTES)
    block.write(0, b"x" * 3 * PAGE_BYTES)
    for size in (PAGE_BYTES + 10, 10, 3 * PAGE_BYTES):
        block.fit(size)
        assert os.fstat(block.descriptor).st_size == size
    assert bytes(block.view(0, 3 * PAGE_BYTES)) == b"x" * 10 + bytes(3 * PAGE_BYTES - 10)
    with pytest.raises(ValueError, match="do not fit"):
        block.fit(3 * PAGE_BYTES + 1)
    block.close()


def test_populating_asks_before_each_piece() -> None:
    """And faults everything in when it may."""
    size = 80 << 20
    block = Block.allocate(1, size)
    asked: list[int] = []

    def may_go_on(left: int) -> bool:
        asked.append(left)
        return len(asked) < 2

    assert not block.populate(may_go_on)
    assert asked == [size, size - (32 << 20)]
    assert os.fstat(block.descriptor).st_blocks * 512 == 32 << 20
    block.close()
    block = Block.allocate(1, 1 << 20)
    assert block.populate()
    assert os.fstat(block.descriptor).st_blocks * 512 == 1 << 20
    block.close()


def test_another_process_sees_the_same_memory() -> None:
    """Passed over a socket; it stays when the first one has closed its own."""
    ours, theirs = socket.socketpair()
    block = Block.allocate(7, 2 * PAGE_BYTES)
    block.write(0, b"from here")
    child = os.fork()
    if child == 0:
        body, [descriptor] = Channel(theirs).receive()
        other = Block(7, descriptor, int(body))
        is_same = bytes(other.view(0, 9)) == b"from here"
        other.write(PAGE_BYTES, b"from there")
        Channel(theirs).send(b"same" if is_same else b"")
        Channel(theirs).receive()
        Channel(theirs).send(b"same" if bytes(other.view(PAGE_BYTES, 10)) == b"from there" else b"")
        os._exit(0)
    theirs.close()
    channel = Channel(ours)
    channel.send(str(block.capacity_bytes).encode(), [block.descriptor])
    assert channel.receive() == (b"same", [])
    assert bytes(block.view(PAGE_BYTES, 10)) == b"from there"
    block.close()
    channel.send(b"")
    assert channel.receive() == (b"same", [])
    channel.close()
    os.waitpid(child, 0)


def test_nothing_stays() -> None:
    """Neither mapping nor descriptor, after `close`, and without a reference to it."""
    gc.collect()  # of earlier tests' descriptors none is closed later
    before = descriptors()
    block = Block.allocate(71, PAGE_BYTES)
    assert len(mapped(71)) == 1
    block.close()
    block.close()
    assert not mapped(71)
    blocks = [Block.allocate(72, PAGE_BYTES) for _ in range(3)]
    assert len(mapped(72)) == 3
    del blocks
    gc.collect()
    assert not mapped(72)
    with pytest.raises(OSError, match="cannot be mapped"):
        Block(1, os.open("/dev/null", os.O_RDONLY), PAGE_BYTES)
    assert descriptors() == before


def test_it_has_no_name_that_others_could_find() -> None:
    """Nothing appears in /dev/shm."""
    before = shared_files()
    block = Block.allocate(1, PAGE_BYTES)
    assert shared_files() <= before
    block.close()


def test_what_the_system_refuses_is_an_error() -> None:
    """Nothing is left open."""
    before = descriptors()
    with pytest.raises(OSError, match=r"."):
        Block.allocate(1, 1 << 62)
    assert descriptors() == before
