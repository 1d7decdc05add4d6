"""How much is stored below locations in object stores. A thread lists the locations, because a listing is slow.

Promises: a location is listed only if a page asks for it. A listing ends after a minute or 100,000 objects. If it
took t seconds, the location is listed again after 100·t seconds at the earliest, and never within half a minute. A
location that cannot be listed delays no page.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.storage.store import Store, StoredObject

_log = logging.getLogger("safepoint")
_FRESH_S = 30.0
_BUSY_SHARE = 100
_LIST_WITHIN_S = 60.0
_MOST_OBJECTS = 100_000
_MOST_KEPT = 64
"""How many locations stay in memory with their usage: the locations that were listed last."""
_DAY_S, _HOUR_S = 86_400.0, 3600.0
OpenStore = Callable[[], Store]
"""Opens the store of a location; called on the thread that lists it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What is stored below a location.

    Args:
        stored_bytes: the size of all objects.
        growth_bytes_s: an upper limit of the growth, in bytes per second: the size of the objects of the last day,
            divided by the age of the oldest of these objects, but at least by an hour. The real growth may be lower,
            because deleted objects are not known. 0 if `is_part`.
        is_part: whether there are more objects than were counted.
        failure: why the location could not be listed; empty if it was listed.
    """

    stored_bytes: int = 0
    growth_bytes_s: float = 0.0
    is_part: bool = False
    failure: str = ""


class BucketUsage:
    """Lists locations of object stores, one after the other.

    Args:
        changed: called when a location was listed, on the thread that lists.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, Usage]] = {}
        """Location → the time from which it may be listed again, on the monotonic clock, and its usage."""
        self._pending: dict[str, OpenStore] = {}
        """The locations that the thread lists next. The first location is being listed."""
        self._work: Work[None] | None = None

    def look(self, wanted: Mapping[str, OpenStore], *, wait_s: float = 0.0) -> dict[str, Usage]:
        """The known usage of locations. Locations without a recent usage are then listed on a thread.

        Args:
            wanted: location → a function that opens its store.
            wait_s: if the usage of a location is not known yet, how long to wait for the listing, in seconds.
        """
        with self._lock:
            now_s, was_idle = clock.monotonic_s(), not self._pending
            for location, open_store in wanted.items():
                if location not in self._found or self._found[location][0] < now_s:
                    self._pending.setdefault(location, open_store)
            if self._pending and was_idle:
                self._work = Work(self._list)
            work, is_missing = self._work, any(one not in self._found for one in wanted)
        if work is not None and is_missing:
            work.is_done(wait_s)
        with self._lock:
            return {location: found for location, (_, found) in self._found.items() if location in wanted}

    def _list(self) -> None:
        """List the pending locations, one after the other."""
        while True:
            with self._lock:
                location, open_store = next(iter(self._pending.items()))
            begun_s = clock.monotonic_s()
            found = _usage_of(open_store)
            ended_s = clock.monotonic_s()
            with self._lock:
                again_s = ended_s + max(_FRESH_S, _BUSY_SHARE * (ended_s - begun_s))
                self._found.pop(location, None)
                self._found[location] = (again_s, found)
                if len(self._found) > _MOST_KEPT:
                    del self._found[next(iter(self._found))]
                del self._pending[location]
                is_done = not self._pending
            self._changed()
            if is_done:
                return


def _usage_of(open_store: OpenStore) -> Usage:
    from safepoint.storage.object_store import ObjectStore  # not at the top: the import takes 50 ms

    try:
        store = open_store()
        if not isinstance(store, ObjectStore):
            return Usage(failure=f"{store.location} is not in an object store")
        return usage_in(store.unsorted(deadline_s=clock.monotonic_s() + _LIST_WITHIN_S), now_s=clock.wall_s())
    except (SafepointError, ValueError) as error:
        return Usage(failure=str(error))
    except Exception as error:  # noqa: BLE001  the other locations must still be listed
        _log.warning("the size of a location cannot be read: %s: %s", type(error).__name__, error)
        return Usage(failure=f"{type(error).__name__}: {error}")


def usage_in(objects: Iterable[StoredObject], *, now_s: float) -> Usage:
    """The sum of the objects, and their growth in the last day.

    Args:
        objects: the objects.
        now_s: the current time, in seconds since 1970.
    """
    until_s = clock.monotonic_s() + _LIST_WITHIN_S
    stored_bytes, new_bytes, first_s = 0, 0, math.inf
    for count, item in enumerate(objects):
        if count >= _MOST_OBJECTS or clock.monotonic_s() > until_s:
            return Usage(stored_bytes=stored_bytes, is_part=True)
        stored_bytes += item.size_bytes
        if item.modified_s > now_s - _DAY_S:
            new_bytes += item.size_bytes
            first_s = min(first_s, item.modified_s)
    # If the job began a moment ago, the size of its first save must not be divided by a few seconds.
    span_s = min(_DAY_S, max(_HOUR_S, now_s - first_s))
    return Usage(stored_bytes=stored_bytes, growth_bytes_s=new_bytes / span_s)
