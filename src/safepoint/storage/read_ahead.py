"""Reads an object store with several requests at once, because a single request mostly waits for its response."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from safepoint.storage.store import Sink, Store

_NUM_THREADS = 8
_BUFFER_BYTES = 2 << 20
_NUM_BUFFERS = 4
_T = TypeVar("_T")
_S = TypeVar("_S")


class ByteRange(NamedTuple):
    """A range of an object.

    Args:
        store: the store.
        key: the object.
        start: the first byte.
        length: the number of bytes.
    """

    store: Store
    key: str
    start: int
    length: int


def stream_ahead(ranges: Iterable[ByteRange], sink: Sink) -> None:
    """Pass ranges of objects to `sink`, in order, while later ranges are being read.

    Raises:
        StorageError: an object cannot be read, or ends before the range does.
    """
    under_way: deque[tuple[Future[memoryview], bytearray]] = deque()
    threads = ThreadPoolExecutor(_NUM_BUFFERS, thread_name_prefix="safepoint-read")

    def pass_on() -> bytearray:
        future, buffer = under_way.popleft()
        sink(future.result())
        return buffer

    try:
        for part in _cut(ranges):
            buffer = pass_on() if len(under_way) == _NUM_BUFFERS else bytearray(_BUFFER_BYTES)
            under_way.append((threads.submit(_read, part, buffer), buffer))
        while under_way:
            pass_on()
    finally:
        threads.shutdown(cancel_futures=True)


def map_reads(function: Callable[[_S], _T], items: Iterable[_S]) -> list[_T]:
    """Call `function`, which reads from a store, for several items at once; return the results in the order of the
    items."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-read") as threads:
        return list(threads.map(function, items))  # if a call fails, `map` cancels the calls that have not begun


def _cut(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    for store, key, start, length in ranges:
        for begin in range(start, start + length, _BUFFER_BYTES):
            yield ByteRange(store, key, begin, min(_BUFFER_BYTES, start + length - begin))


def _read(part: ByteRange, buffer: bytearray) -> memoryview:
    view = memoryview(buffer)[: part.length]
    done = 0

    def take(block: memoryview) -> None:
        nonlocal done
        view[done : done + len(block)] = block
        done += len(block)

    part.store.stream(part.key, take, start=part.start, length=part.length)
    return view
