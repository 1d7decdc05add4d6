"""Reports changes to open pages as server-sent events. An event has only the keys of what has changed.

The key of a job is its place and name. After an event, a page requests again what it shows. Each place is read once
at the start, and later only while a page is open.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterable

from safepoint.dashboard.reading.places import ListedJob, PlaceReader, Places
from safepoint.errors import SafepointError
from safepoint.foundation import clock

_LOOK_EVERY_S = 0.5
_LOOK_AT_CLUSTER_EVERY_S = 3.0
_ALIVE_EVERY_S = 15.0
_STREAM_LASTS_S = 600.0
"""After this time, a stream ends, and the page requests another stream. The request is checked like any other, so a
session that has ended receives nothing more."""
_MOST_PENDING = 1000


class Live:
    """Distributes changes to all open pages.

    Args:
        places: where the jobs are.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._subscribers: set[asyncio.Queue[str]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_watched = threading.Event()
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads that look for changes. Each reads its place once, and then waits until a page is open."""
        self._loop = loop
        for reader in self._places.readers.values():
            thread = threading.Thread(
                target=self._look, args=(reader,), name=f"safepoint-look-{reader.key}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads, and all streams."""
        self._is_closed.set()
        self._is_watched.set()
        for queue in list(self._subscribers):
            queue.put_nowait("")

    def report(self, keys: Iterable[str]) -> None:
        """Report changes; may be called on any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._distribute, list(keys))

    async def stream(self) -> AsyncIterator[bytes]:
        """The events for one page, until the page is closed, but for at most ten minutes."""
        until_s = clock.monotonic_s() + _STREAM_LASTS_S
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=_MOST_PENDING)
        self._subscribers.add(queue)
        self._is_watched.set()
        try:
            yield b"retry: 1000\nevent: hello\ndata: {}\n\n"
            while not self._is_closed.is_set() and clock.monotonic_s() < until_s:
                try:
                    keys = [await asyncio.wait_for(queue.get(), _ALIVE_EVERY_S)]
                except TimeoutError:
                    yield b": alive\n\n"
                    continue
                while not queue.empty():
                    keys.append(queue.get_nowait())
                changed = json.dumps(sorted({key for key in keys if key}))
                yield f"event: changed\ndata: {changed}\n\n".encode()
        finally:
            self._subscribers.discard(queue)
            if not self._subscribers and not self._is_closed.is_set():
                self._is_watched.clear()

    def _distribute(self, keys: list[str]) -> None:
        for queue in self._subscribers:
            for key in keys:
                if not queue.full():  # a page that reads too slowly misses this change
                    queue.put_nowait(key)

    def _look(self, reader: PlaceReader) -> None:
        before: dict[str, object] = {}
        seen: object = None
        is_first = True
        with contextlib.suppress(SafepointError):
            reader.read()  # so that the first page need not wait for it
        while not self._is_closed.is_set():
            if not self._is_watched.wait(_ALIVE_EVERY_S):
                is_first = True
                continue
            if self._is_closed.is_set():
                return
            try:
                found = reader.read(waits=True)
            except SafepointError:
                found = None
            if found is not None and (
                found.jobs is not seen or is_first
            ):  # `found.jobs` stays the same object while nothing changes
                now = {one.key: _mark(one) for one in found.jobs.values()} | {f"{reader.key}/": found.failure}
                changed = [key for key in now.keys() | before.keys() if now.get(key) != before.get(key)]
                if changed and not is_first:
                    self.report(changed)
                before, seen, is_first = now, found.jobs, False
            self._is_closed.wait(_LOOK_EVERY_S if reader.is_local else _LOOK_AT_CLUSTER_EVERY_S)


def _mark(one: ListedJob) -> object:
    return one.job, one.mark
