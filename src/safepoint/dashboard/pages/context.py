"""What every page uses: the places, the actions, and who is signed in."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from starlette.requests import Request

from safepoint.dashboard.access.sessions import Sessions, Visitor
from safepoint.dashboard.access.turns import Turns
from safepoint.dashboard.live import Live
from safepoint.dashboard.reading.bucket_usage import BucketUsage
from safepoint.dashboard.reading.places import Places
from safepoint.dashboard.settings import DashboardSettings
from safepoint.dashboard.work import Works
from safepoint.errors import StorageError, WaitTimeoutError

_LONGEST_PATH = 300
_READ_WITHIN_S = 40.0
"""The limit of the time for which a request waits for a task, in seconds. If a place does not answer, the error of
`PlaceReader` is raised earlier."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parts of a dashboard.

    Args:
        settings: its options.
        places: where the jobs are.
        works: the actions.
        live: reports changes to open pages.
        usage: lists what is stored in object stores.
        sessions: the links and cookies.
        cookie: the name of the cookie.
        link_used: called with the role of a link that was used.
        outputs: limits how many outputs of jobs are read at a time. A read may take long, and other pages need
            threads.
        reads: limits how many reads for pages run at a time.
    """

    settings: DashboardSettings
    places: Places
    works: Works
    live: Live
    usage: BucketUsage
    sessions: Sessions
    cookie: str
    link_used: Callable[[str], None]
    outputs: Turns
    reads: Turns


def context_of(request: Request) -> Context:
    """The parts of the dashboard that answers this request."""
    return cast("Context", request.app.state.context)


def visitor_of(request: Request) -> Visitor:
    """Who sent the request; the guard has checked it."""
    return cast("Visitor", request.state.visitor)


def actor_of(request: Request) -> str:
    """Who requested an action, for the events of a job."""
    name = visitor_of(request).name
    return f"{name} (dashboard)" if name else "dashboard"


async def in_thread(request: Request, task: Callable[[], _T]) -> _T:
    """Run a task on a thread, because it reads files or waits for a server. Other requests are answered meanwhile.

    A task may hang, for example in a folder whose server does not answer. Until it ends, it counts towards the
    limit of its session, so that the tasks of one session do not take all threads; see `Turns`.

    Raises:
        StorageError: a file cannot be read.
        WaitTimeoutError: the task is not done in time; its thread goes on.
    """

    async def read() -> _T:
        async with context_of(request).reads.take(visitor_of(request).session):
            return await asyncio.to_thread(task)

    reading = asyncio.ensure_future(read())
    # Without this call, asyncio logs the error of a read that ends later.
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({reading}, timeout=_READ_WITHIN_S)
    if not reading.done():
        raise WaitTimeoutError(
            f"this page was not read within {_READ_WITHIN_S:g} s; a folder may be large, or a server may not answer",
            hint="load the page again later, or use the `safepoint` command that prints the same facts",
        )
    try:
        return reading.result()
    except OSError as error:
        where = str(error.filename or "a file")[:_LONGEST_PATH]
        raise StorageError(f"{where} cannot be read: {error.strerror or error}", hint="check the path") from error
