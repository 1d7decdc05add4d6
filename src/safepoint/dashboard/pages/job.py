"""A job: what it does, its curves, timeline, events and output."""

import collections
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from safepoint.answers.job_documents import (
    event_document,
    event_rows,
    log_document,
    safe_step,
    status_document,
)
from safepoint.dashboard.pages.context import context_of, in_thread, visitor_of
from safepoint.dashboard.reading.job_view import MOST_RANKS, metric_columns, read_job
from safepoint.dashboard.reading.places import PlaceReader
from safepoint.dashboard.reading.room_view import without_room
from safepoint.dashboard.rendering import Refusal, json_response, respond, sentence_of_error
from safepoint.errors import NotFoundError
from safepoint.foundation import clock
from safepoint.foundation.units import format_bytes, format_duration
from safepoint.jobs.model.job_place import LogLine
from safepoint.presentation.drawings import MOST_CURVES
from safepoint.presentation.tones import TONES

_NUM_EVENTS = 30
_MOST_EVENTS = 2000
_NUM_LINES = 200
_MOST_LINES = 2000
_LONGEST_LINE = 4000
_TAIL_BYTES = 256 << 10
_SEARCH_BYTES = 64 << 20
"""A search reads only this much at the end of the output of each process."""
_SEARCH_S = 15.0
"""A search ends after this time, even if it has not read everything."""
_MOST_LETTERS = 256 << 10
"""The limit of characters in all lines of a page together."""


def place_and_name(request: Request) -> tuple[PlaceReader, str]:
    """The place and the name of the job in the path of a request."""
    return context_of(request).places.reader(request.path_params["place"]), request.path_params["name"]


async def job(request: Request) -> Response:
    """A job; as JSON, what `safepoint status --json` prints."""
    context, (reader, name) = context_of(request), place_and_name(request)
    view = await in_thread(request, lambda: read_job(reader, name))
    one = view.listed
    problems = await in_thread(
        request, lambda: without_room(context.places, context.usage, sizes=context.settings.bucket_sizes)
    )
    problem = problems.get(one.key)
    document = status_document(one.job, view.progress, view.output, view.attempts, view.details)
    return await respond(
        request,
        "job.html",
        document,
        view=view,
        job=one.job,
        progress=view.progress,
        attention=one.attention if problem is None else one.attention.with_problem(problem),
        reader=reader,
        tone=TONES[one.job.state],
        safe_step=safe_step(one.job, view.progress),
        events=event_rows(view.events[-_NUM_EVENTS:]),
        num_events=len(view.events),
        most_ranks=MOST_RANKS,
        most_curves=MOST_CURVES,
        works=context.works.running(f"/jobs/{reader.key}/{name}"),
    )


async def metrics(request: Request) -> Response:
    """The metrics over the steps, as columns of numbers; always JSON."""
    reader, name = place_and_name(request)
    points = await in_thread(request, lambda: reader.points(reader.job(name)))
    return await json_response({"job": name, **metric_columns(points)})


async def events(request: Request) -> Response:
    """The events; as JSON, what `safepoint events --json` prints."""
    reader, name = place_and_name(request)

    found = await in_thread(request, lambda: reader.events(reader.job(name)))
    if request.state.wants_json:
        return await json_response([event_document(event) for event in found])
    shown = event_rows(found[-_MOST_EVENTS:])
    return await respond(request, "events.html", [], reader=reader, name=name, events=shown, num_events=len(found))


async def logs(request: Request) -> Response:
    """The end of the output; as JSON, documents as `safepoint logs --json` prints them."""
    reader, name = place_and_name(request)
    rank, node = _number(request, "rank"), _number(request, "node")
    query = request.query_params.get("q", "")[:200]
    most = _MOST_LINES if request.query_params.get("all") else _NUM_LINES
    one = await in_thread(request, lambda: reader.job(name))
    why, is_cut = "", False
    try:
        async with context_of(request).outputs.take(visitor_of(request).session):
            lines, is_cut = await in_thread(request, lambda: _tail(reader, name, rank, node, query, most))
    except NotFoundError as error:
        if request.state.wants_json or rank is not None or node is not None:
            raise
        lines, why = [], sentence_of_error(error)  # a job on a cluster has no output while it has no pods
    if request.state.wants_json:
        return await json_response([log_document(line) for line in lines])
    # A pod does not separate the lines of its ranks.
    what, number = ("rank", rank) if reader.is_local else ("node", node)
    num_choices = one.job.num_nodes * ((one.job.ranks_per_node or 1) if reader.is_local else 1)
    return await respond(
        request,
        "logs.html",
        [],
        reader=reader,
        name=name,
        lines=lines,
        what=what,
        number=number,
        query=query,
        choices=range(min(num_choices, MOST_RANKS)),
        is_cut=is_cut,
        why=why,
        limits=(format_bytes(_SEARCH_BYTES), format_duration(_SEARCH_S)),
    )


def _number(request: Request, what: str) -> int | None:
    """The number of a rank or a node in the query; None if there is none.

    Raises:
        Refusal: the text is not a number; nothing was read.
    """
    text = request.query_params.get(what, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise Refusal(400, f"the {what} is not a number; nothing was read", hint=f"use a {what} such as 0")
    return int(text) if text else None


def _tail(
    reader: PlaceReader, name: str, rank: int | None, node: int | None, query: str, most: int
) -> tuple[list[LogLine], bool]:
    """The last lines that contain the query, and whether there may be more lines. Upper and lower case are equal."""
    wanted = query.lower()
    until_s = clock.monotonic_s() + _SEARCH_S
    # Open a separate connection: an output may be long, and the thread that makes all other requests to this place
    # must not wait until the output is read.
    with reader.open_jobs("dashboard") as jobs:
        found = jobs.logs(name, rank=rank, node=node, last_bytes=_SEARCH_BYTES if query else _TAIL_BYTES)
        kept, num_letters, is_cut = collections.deque[LogLine](), 0, False
        for line in found:
            if clock.monotonic_s() > until_s:
                is_cut = True
                break
            if wanted not in line.text.lower():
                continue
            # Whole lines are not kept: on a cluster they may have 1 MiB.
            kept.append(replace(line, text=line.text[:_LONGEST_LINE]))
            num_letters += len(kept[-1].text)
            while len(kept) > most or num_letters > _MOST_LETTERS:
                num_letters -= len(kept.popleft().text)
                is_cut = True
        return list(kept), is_cut or len(kept) == most


routes = [
    Route("/jobs/{place}/{name}", job),
    Route("/jobs/{place}/{name}/metrics", metrics),
    Route("/jobs/{place}/{name}/events", events),
    Route("/jobs/{place}/{name}/logs", logs),
]
