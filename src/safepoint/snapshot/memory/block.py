"""Blocks of shared memory without a name: the system frees them when the last process that holds them has ended.

A block is a memfd. The rank that allocates the block sends the descriptor to the keeper (the process that writes
snapshots to disk) over a Unix socket. Both processes map the block.
"""

import ctypes
import os
import sys
from collections.abc import Callable

PAGE_BYTES = 4096
CONTROL_NUMBER = 0
"""The number of the block with the watermarks.

A watermark states how many bytes of another block have been copied.
"""
NUM_MARKS = PAGE_BYTES // 8
SMALL_BYTES = 1 << 20
"""Smaller files share one block, and each of them is written in one call. A larger file has a block of its own."""
_POPULATE_STEP_BYTES = 32 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_PROT_READ_WRITE, _MAP_SHARED = 3, 1
_MAP_FAILED = ctypes.c_void_p(-1).value


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


# The functions of the C library are called through ctypes, which lets other threads run during a call. The mmap
# module does not.
_LIBC = _library()


def are_available() -> bool:
    """Whether this system supports blocks."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")


class Block:
    """One mapped block. It is unmapped by `close`, or when the last reference to it is gone.

    Args:
        number: identifies the block among the blocks of its rank.
        descriptor: the file descriptor of the memory. The block closes this descriptor.
        capacity_bytes: how much is mapped, a multiple of the page size.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, number: int, descriptor: int, capacity_bytes: int) -> None:
        self.number = number
        self.descriptor = descriptor
        self.capacity_bytes = capacity_bytes
        address = _LIBC.mmap(None, capacity_bytes, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
        if address in {None, _MAP_FAILED}:
            os.close(descriptor)
            raise OSError(ctypes.get_errno(), f"{capacity_bytes} bytes of shared memory cannot be mapped")
        self.address: int = address
        self._length_bytes = -1  # the length is not known, because another process may have changed it
        self.pinned_bytes = 0
        """How many bytes from the start are locked in memory (pinned), so that a device may write to them."""
        self._unpin: Callable[[], None] | None = None

    @classmethod
    def allocate(cls, number: int, size_bytes: int) -> "Block":
        """A new block of at least `size_bytes`, whose pages are not allocated yet.

        Raises:
            OSError: the memory cannot be allocated.
        """
        capacity = _whole_pages(max(size_bytes, 1))
        descriptor = os.memfd_create(f"safepoint-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, capacity)
        except OSError:
            os.close(descriptor)
            raise
        block = cls(number, descriptor, capacity)
        block._length_bytes = capacity
        # This call is only advice, because many systems have no huge pages for shared memory.
        _LIBC.madvise(block.address, capacity, _MADV_HUGEPAGE)
        return block

    def populate(self, may_go_on: Callable[[int], bool] = lambda _: True) -> bool:
        """Allocate every page, so that the first copy into the block is as fast as a later one.

        Args:
            may_go_on: called before each piece with the number of bytes that are left; False ends this call.

        Returns:
            Whether all pages were allocated. Always False on systems older than Linux 5.14.
        """
        done = 0
        while done < self.capacity_bytes:
            if not may_go_on(self.capacity_bytes - done):
                return False
            step = min(_POPULATE_STEP_BYTES, self.capacity_bytes - done)
            if _LIBC.madvise(self.address + done, step, _MADV_POPULATE_WRITE) != 0:
                return False
            done += step
        return True

    def fit(self, size_bytes: int) -> None:
        """Set the length of the memory to `size_bytes`; pages beyond it return to the system."""
        if size_bytes > self.capacity_bytes:
            raise ValueError(f"{size_bytes} bytes do not fit into a block of {self.capacity_bytes}")
        if size_bytes == self._length_bytes:
            return
        # When a shortened block grows again, its end gets new pages. If the block stayed pinned, a device would
        # still write to the old pages.
        if self.pinned_bytes < _whole_pages(size_bytes):
            self.unpin()
        os.ftruncate(self.descriptor, size_bytes)
        self._length_bytes = size_bytes
        self.pinned_bytes = min(self.pinned_bytes, self.length_bytes)

    @property
    def length_bytes(self) -> int:
        """The length of the memory, rounded up to whole pages. The addresses beyond it have no memory."""
        return _whole_pages(self._length_bytes)

    def note_pinned(self, unpin: Callable[[], None]) -> None:
        """Record that all pages of the block (`length_bytes`) are locked for a device.

        Args:
            unpin: unlocks the pages; called before the pages or their addresses are released.
        """
        self.pinned_bytes, self._unpin = self.length_bytes, unpin

    def unpin(self) -> None:
        """Unlock the pages; no device may be copying to them."""
        unpin, self._unpin, self.pinned_bytes = self._unpin, None, 0
        if unpin is not None:
            unpin()

    def view(self, start: int, length: int) -> memoryview:
        """`length` bytes from `start`, without a copy; valid until `close`."""
        if not 0 <= start <= start + length <= self.capacity_bytes:
            raise ValueError(
                f"{length} bytes at offset {start} are not within the {self.capacity_bytes} bytes of the block"
            )
        return memoryview((ctypes.c_char * length).from_address(self.address + start)).cast("B")

    def write(self, start: int, data: bytes) -> None:
        """Copy `data` to `start`."""
        if not 0 <= start <= start + len(data) <= self.capacity_bytes:
            raise ValueError(
                f"{len(data)} bytes at offset {start} are not within the {self.capacity_bytes} bytes of the block"
            )
        ctypes.memmove(self.address + start, data, len(data))

    def close(self) -> None:
        """Unmap the block; its views must not be used any more."""
        if self.address:
            self.unpin()
            _LIBC.munmap(self.address, self.capacity_bytes)
            os.close(self.descriptor)
            self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
