"""Reads a listing of obstore within limits, because the server may be hostile.

obstore requests the pages by itself, and shows neither the pages nor their markers. So a server could send names or
empty pages without end, or the same page again and again. A listing of S3 has the same limits of names, memory and
time.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.s3.requests import MOST_LISTED, MOST_LISTED_BYTES
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S
from safepoint.storage.store import StoredObject

_LIST_WITHIN_S = 1800.0
_CHUNK_WITHIN_S = DEFAULT_WITHIN_S
"""How long a listing may continue without new names. A store may send a few empty pages."""
_BYTES_OF_ITEM = 512
"""The memory that an object takes, with obstore's own, and without its texts."""
_T = TypeVar("_T")


class Listing:
    """One listing.

    Args:
        what: the request, for messages.
        make: makes the object from its name and from obstore's description of it.
        until_s: when to give up, by the monotonic clock. If None, or more than half an hour from now, the listing may
            take half an hour.
    """

    def __init__(self, what: str, make: Callable[[str, Any], StoredObject], *, until_s: float | None) -> None:
        self._what = what
        self._make = make
        end_s = clock.monotonic_s() + _LIST_WITHIN_S
        self._until_s = end_s if until_s is None else min(until_s, end_s)

    async def read(self, chunks: AsyncIterator[Any]) -> list[StoredObject]:
        """All objects of the listing.

        Raises:
            StorageError: there are too many names, or the server sends the same names again.
            TransientError: the listing took too long.
        """
        found: dict[str, StoredObject] = {}
        num_bytes = 0
        while (chunk := await self._next(chunks)) is not None:
            num_before = len(found)
            for item in chunk:
                name: str = item["path"]
                found[name] = made = self._make(name, item)
                num_bytes += sys.getsizeof(name) + sys.getsizeof(made.version) + _BYTES_OF_ITEM
            if len(found) > MOST_LISTED or num_bytes > MOST_LISTED_BYTES:
                raise StorageError(
                    f"{self._what}: there are too many names to list, more than {len(found)}",
                    hint="use a location that only this run writes to",
                )
            # Every name was listed before, so the server has sent the same page again.
            if chunk and len(found) == num_before:
                raise StorageError(
                    f"{self._what}: the server sends the same names again and again",
                    hint="check that the endpoint is the store itself, and not a proxy",
                )
        return list(found.values())

    async def _next(self, chunks: AsyncIterator[Any]) -> list[Any] | None:
        """The next objects; None at the end. If it takes too long, obstore's requests are cancelled."""
        left_s = self._until_s - clock.monotonic_s()
        try:
            return await asyncio.wait_for(anext(chunks, None), min(left_s, _CHUNK_WITHIN_S))
        except TimeoutError as error:
            raise TransientError(f"{self._what}: the listing took too long") from error


def run_in_thread(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine on a new thread, because the caller's thread may have an event loop of its own.

    If the wait is interrupted, the coroutine is cancelled.
    """
    result: Future[_T] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> _T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work()

    def run() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, name="safepoint-list", daemon=True).start()
    try:
        return result.result()
    finally:
        if not result.done() and running:
            loop, task = running[0]
            loop.call_soon_threadsafe(task.cancel)
