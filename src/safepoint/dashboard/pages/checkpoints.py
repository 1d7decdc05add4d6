"""The checkpoints of a job, or of any folder or bucket."""

import shlex
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from safepoint.checkpoint.tools.documents import list_document
from safepoint.dashboard.pages.checkpoint_actions import (
    LONGEST,
    back_of,
    back_of_job,
    checks_here,
    last_read_in_pod,
)
from safepoint.dashboard.pages.context import context_of, in_thread, visitor_of
from safepoint.dashboard.pages.job import place_and_name
from safepoint.dashboard.reading.checkpoint_view import (
    CheckpointRow,
    OnlyInPodsError,
    checks_in,
    inventory_of_job,
    open_any,
    rows_in,
    rows_of,
)
from safepoint.dashboard.reading.places import PlaceReader
from safepoint.dashboard.reading.room_view import known_locations
from safepoint.dashboard.rendering import respond, sentence_of_error
from safepoint.errors import SafepointError, UsageError
from safepoint.jobs.model.records import JobRecord
from safepoint.storage.location import parse_location


async def of_job(request: Request) -> Response:
    """The checkpoints of a job; as JSON, what `safepoint checkpoints list --json` prints."""
    reader, name = place_and_name(request)
    base = back_of_job(reader.key, name)

    def read() -> tuple[str, list[CheckpointRow]]:
        one, inventory = reader.job(name), inventory_of_job(reader, name)
        checks = {**checks_in(reader.events(one)), **checks_here(request, base)}
        is_missing = inventory.folder is not None and not inventory.folder.is_dir()
        if is_missing and not request.state.wants_json:  # the job has saved nothing yet
            return str(inventory.store.location), []
        local = one.progress.output_dir if isinstance(one.job, JobRecord) and one.progress is not None else ""
        return str(inventory.store.location), rows_of(
            inventory, settings=one.job.settings, checks=checks, local=local
        )

    job = (await in_thread(request, lambda: reader.job(name))).job
    try:
        location, rows = await in_thread(request, read)
    except OnlyInPodsError as error:
        return await _as_a_pod_read_them(request, reader, name, error)
    except SafepointError as error:
        if request.state.wants_json:
            raise
        # The page of the job loads this page as a part, with htmx. Htmx drops an answer with the status of an error.
        status = 200 if "hx-request" in request.headers else 502
        return await _page(request, [], job=name, base=base, failure=sentence_of_error(error), status=status)
    can_resume = isinstance(job, JobRecord) and job.can_resume and parse_location(location).is_folder
    return await _page(request, rows, location=location, job=name, base=base, can_resume=can_resume)


async def _as_a_pod_read_them(request: Request, reader: PlaceReader, name: str, error: OnlyInPodsError) -> Response:
    """The checkpoints of a job that only a pod can read, as the last pod has read them.

    If no pod has read them yet, the page has only a button that starts a pod, and a request for JSON gets an error.
    """
    base = back_of_job(reader.key, name)
    read = last_read_in_pod(request, base)
    if read is None and request.state.wants_json:
        raise error
    listed: list[dict[str, Any]] = []
    if read is not None and read.outcome is not None:
        listed = read.outcome.document["checkpoints"]
    return await _page(
        request,
        rows_in(listed),
        location=f"job:{name}",
        job=name,
        base=base,
        failure=sentence_of_error(error) if read is None else "",
        on=reader.option,
        read="never" if read is None else read.ended,
    )


async def of_location(request: Request) -> Response:
    """The checkpoints of the location in the query. If the query has no location, a form to enter a location."""
    location = request.query_params.get("location", "").strip()[:LONGEST]
    if not location:
        return await _page(request, [])

    def read() -> list[CheckpointRow]:
        # Only an operator may use the files and the keys of the dashboard's user for any location.
        if not is_operator and location not in known_locations(places):
            raise UsageError(
                "a viewer may only see the locations of jobs; nothing was read",
                hint="ask an operator for a link for operators",
            )
        inventory, name = open_any(location)
        checks = checks_here(request, back_of(location))
        return [row for row in rows_of(inventory, checks=checks) if name in {None, row.item.name}]

    is_operator, places = visitor_of(request).is_operator, context_of(request).places
    try:
        rows = await in_thread(request, read)
    except SafepointError as error:
        if request.state.wants_json:
            raise
        return await _page(request, [], location=location, failure=sentence_of_error(error), status=400)
    return await _page(request, rows, location=location)


async def _page(
    request: Request,
    rows: Sequence[CheckpointRow],
    *,
    location: str = "",
    job: str = "",
    base: str = "",
    failure: str = "",
    status: int = 200,
    can_resume: bool = False,
    on: str = "",
    read: str | None = None,
) -> Response:
    """The page.

    Args:
        request: the request.
        rows: the checkpoints.
        location: where they are.
        job: the name of the job; empty for a location without a job.
        base: the page of the job.
        failure: why the checkpoints cannot be read; empty if they were read.
        status: the HTTP status.
        can_resume: whether the job can be resumed from an older checkpoint.
        on: what a command needs to name the cluster: a space and an option; empty for this machine.
        read: the time at which a pod has last read the checkpoints, in RFC 3339, UTC, or `never`. None if no pod is
            needed to read them.
    """
    values: dict[str, Any] = {"location": location, "base": base, "failure": failure, "can_resume": can_resume}
    return await respond(
        request,
        "checkpoints.html",
        [list_document(row.item, row.item.faults, deep=False) for row in rows],
        status=status,
        rows=rows,
        title=job,
        job=base,
        is_form=not job,
        has_policies=bool(job) and read is None,
        read=read,
        commands=_commands(location, rows, on),
        **values,
    )


def _commands(location: str, rows: Sequence[CheckpointRow], on: str) -> list[tuple[str, str]]:
    """What else can be done with the checkpoints, each with its command."""
    verify = f"safepoint checkpoints verify --deep{on} {shlex.quote(location)}"
    found = [("read all files, and compare their digests", verify)]
    newest = next((row.item for row in rows if row.item.counts), None)
    if newest is not None:
        where = shlex.quote(newest.where)
        target = "pvc://claim/model" if on else "model"
        found += [
            ("the model, as from_pretrained reads it", f"safepoint checkpoints export{on} {where} {target}"),
            ("a copy that is verified", f"safepoint checkpoints copy{on} {where} s3://bucket/copy"),
        ]
    return found


routes = [
    Route("/checkpoints", of_location),
    Route("/jobs/{place}/{name}/checkpoints", of_job),
]
