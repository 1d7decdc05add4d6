"""The web application: all routes, in the order in which they are tried, and the checks around them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from safepoint.dashboard.access.guard import Guard
from safepoint.dashboard.access.sessions import Sessions
from safepoint.dashboard.access.turns import Turns
from safepoint.dashboard.live import Live
from safepoint.dashboard.pages import actions, checkpoint_actions, checkpoints, entry, job, jobs, overviews
from safepoint.dashboard.pages.context import Context, context_of
from safepoint.dashboard.reading.bucket_usage import BucketUsage
from safepoint.dashboard.reading.places import OpenJobs, Places
from safepoint.dashboard.rendering import Refusal, fail, refuse
from safepoint.dashboard.settings import DashboardSettings
from safepoint.dashboard.work import Works
from safepoint.errors import SafepointError

_STATIC = Path(__file__).parent / "static"
_LEAST_COMPRESSED_BYTES = 1024
_MOST_THREADS = 32
_OUTPUTS, _READS = (8, 2), (24, 6)
"""The limits of outputs that are read at a time, and of reads that run at a time. The first number is for all
sessions together, the second for each session. The threads that are not used for reads make the pages."""


async def _live(request: Request) -> Response:
    return StreamingResponse(context_of(request).live.stream(), media_type="text/event-stream")


def all_routes() -> list[BaseRoute]:
    """All routes. `/jobs/{place}/{name}/{action}` is last, because `{action}` matches any word."""
    return [
        *entry.routes,
        *jobs.routes,
        *job.routes,
        *checkpoints.routes,
        *checkpoint_actions.routes,
        *overviews.routes,
        Route("/live", _live),
        Mount(
            "/static", StaticFiles(directory=_STATIC, packages=[("safepoint.presentation", "static")]), name="static"
        ),
        *actions.routes,
    ]


def make_application(
    settings: DashboardSettings,
    openers: Mapping[str, OpenJobs],
    sessions: Sessions,
    *,
    link_used: Callable[[str], None] = lambda role: None,
    started: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application for Starlette's server.

    Args:
        settings: the options of the dashboard.
        openers: the name of each place in `--on` → a function that opens the jobs of this place.
        sessions: the links and cookies.
        link_used: called with the role of each link that was used.
        started: called just before the server answers requests. From then on, SIGINT and SIGTERM end the server in an
            orderly way.
    """
    places = Places(openers)
    live = Live(places)
    cookie = f"safepoint_{settings.port}"  # cookies do not distinguish ports
    context = Context(
        settings=settings,
        places=places,
        works=Works(lambda key: live.report([key])),
        live=live,
        usage=BucketUsage(lambda: live.report(["storage"])),
        sessions=sessions,
        cookie=cookie,
        link_used=link_used,
        outputs=Turns(*_OUTPUTS),
        reads=Turns(*_READS),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        # A few requests that wait for a cluster must not delay all others.
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="safepoint-page"))
        live.start(loop)
        started()
        try:
            yield
        finally:
            live.close()
            places.close()

    application = Starlette(
        routes=all_routes(),
        lifespan=lifespan,
        middleware=[
            Middleware(GZipMiddleware, minimum_size=_LEAST_COMPRESSED_BYTES, compresslevel=5),
            Middleware(Guard, settings=settings, sessions=sessions, cookie=cookie),
        ],
        exception_handlers={
            SafepointError: _failed,
            Refusal: _refused,
            HTTPException: _not_found,
        },
    )
    application.state.context = context
    return application


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, SafepointError)
    return fail(error, request.scope["state"])


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refuse(error, request.scope["state"])


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    meaning: dict[int, Any] = {404: "there is no such page", 405: "this address does not accept this method"}
    refusal = Refusal(error.status_code, meaning.get(error.status_code, error.detail), hint="see the list of jobs")
    return refuse(refusal, request.scope["state"])
