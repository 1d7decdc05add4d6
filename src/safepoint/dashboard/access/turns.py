"""Limits how many slow requests run at a time, in all and for each session, so that no session blocks the others.

If a session holds all the turns that it may have, its next request waits until one of these turns ends. The turns of
the other sessions stay free.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from weakref import WeakValueDictionary


class Turns:
    """Lets a limited number of requests do something at a time.

    Args:
        most: the number for all sessions together.
        most_each: the number for each session.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._most_each = most_each
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """The turns of each session; a session without requests has no entry."""

    @contextlib.asynccontextmanager
    async def take(self, session: str) -> AsyncGenerator[None]:
        """Wait for a turn of a session, and hold it for the block."""
        own = self._own.get(session)
        if own is None:
            self._own[session] = own = asyncio.Semaphore(self._most_each)
        async with own, self._all:
            yield
