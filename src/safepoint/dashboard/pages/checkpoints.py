"""The checkpoints of a job, or of any folder or bucket; they can be verified and deleted."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from safepoint.checkpoint.tools.documents import list_document, verify_document
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.removal import remove
from safepoint.dashboard.pages.context import actor_of, context_of, in_thread, visitor_of
from safepoint.dashboard.pages.job import place_and_name
from safepoint.dashboard.reading.checkpoint_view import (
    Check,
    CheckpointRow,
    checks_in,
    inventory_of_job,
    open_any,
    rows_of,
)
from safepoint.dashboard.reading.room_view import known_locations
from safepoint.dashboard.rendering import Refusal, respond
from safepoint.dashboard.work import Outcome
from safepoint.errors import ConflictError, SafepointError, UsageError
from safepoint.foundation.units import plural
from safepoint.jobs.model.records import JobRecord
from safepoint.storage.location import parse_location

_LONGEST = 2000


async def of_job(request: Request) -> Response:
    """Those of a job; as JSON, what `safepoint checkpoints list --json` prints."""
    reader, name = place_and_name(request)

    def read() -> tuple[str, list[CheckpointRow]]:
        inventory = _of_job(request)()
        one = reader.job(name)
        checks = {**checks_in(reader.events(one)), **_checks_here(request, base)}
        is_missing = inventory.folder is not None and not inventory.folder.is_dir()
        if is_missing and not request.state.wants_json:  # the job has saved nothing yet
            return str(inventory.store.location), []
        return str(inventory.store.location), rows_of(inventory, settings=one.job.settings, checks=checks)

    base = f"/jobs/{quote(reader.key)}/{quote(name)}"
    await in_thread(lambda: reader.job(name))
    try:
        location, rows = await in_thread(read)
    except SafepointError as error:
        if request.state.wants_json:
            raise
        # A part of another page shows the reason, too; htmx would drop an answer with the status of an error.
        status = 200 if "hx-request" in request.headers else 502
        values: dict[str, Any] = {"rows": [], "base": base, "title": name, "job": base, "is_form": False}
        return respond(
            request, "checkpoints.html", [], status=status, location="", failure=_sentence(error), **values
        )
    job = (await in_thread(lambda: reader.job(name))).job
    can_resume = isinstance(job, JobRecord) and job.can_resume and parse_location(location).is_folder
    return _page(request, rows, location=location, base=base, title=name, job=base, can_resume=can_resume)


async def of_location(request: Request) -> Response:
    """Those of the location in the query; without one, a form to type it."""
    location = request.query_params.get("location", "").strip()[:_LONGEST]
    if not location:
        return respond(
            request, "checkpoints.html", [], rows=[], location="", base="", title="", job="", failure="", is_form=True
        )

    def read() -> list[CheckpointRow]:
        # Only an operator may use the files and the keys of the dashboard's user for any location.
        if not is_operator and location not in known_locations(places):
            raise UsageError(
                "a viewer may only see the locations of jobs; nothing was read", hint="ask for a link of an operator"
            )
        inventory, name = open_any(location)
        checks = _checks_here(request, _back_of(location))
        return [row for row in rows_of(inventory, checks=checks) if name in {None, row.item.name}]

    is_operator, places = visitor_of(request).is_operator, context_of(request).places
    try:
        rows = await in_thread(read)
    except SafepointError as error:
        if request.state.wants_json:
            raise
        values: dict[str, Any] = {"rows": [], "base": "", "title": "", "job": "", "is_form": True}
        return respond(
            request, "checkpoints.html", [], status=400, location=location, failure=_sentence(error), **values
        )
    return _page(request, rows, location=location, base="", title="", job="")


def _sentence(error: SafepointError) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def _page(
    request: Request,
    rows: list[CheckpointRow],
    *,
    location: str,
    base: str,
    title: str,
    job: str,
    can_resume: bool = False,
) -> Response:
    return respond(
        request,
        "checkpoints.html",
        [list_document(row.item, row.item.faults, deep=False) for row in rows],
        rows=rows,
        location=location,
        base=base,
        title=title,
        job=job,
        failure="",
        is_form=not job,
        has_policies=bool(job),
        can_resume=can_resume,
        commands=_commands(location, rows),
    )


def _commands(location: str, rows: list[CheckpointRow]) -> list[tuple[str, str]]:
    """What else can be done with the checkpoints, each with its command."""
    found = [
        ("read all files, and compare their digests", f"safepoint checkpoints verify --deep {shlex.quote(location)}")
    ]
    newest = next((row.item for row in rows if row.item.is_complete), None)
    if newest is not None:
        where = shlex.quote(newest.where)
        found += [
            ("the model, as from_pretrained reads it", f"safepoint checkpoints export {where} model"),
            ("a copy that is verified", f"safepoint checkpoints copy {where} s3://bucket/copy"),
        ]
    return found


async def verify(request: Request) -> Response:
    """Read all files of a checkpoint and compare their digests, as `safepoint checkpoints verify --deep` does."""
    return await _begin(request, "verify", _verify)


async def delete(request: Request) -> Response:
    """Delete a checkpoint."""
    form: Mapping[str, str] = request.state.form
    if form.get("sure") != "on":
        raise Refusal(400, "the deletion was not confirmed; nothing was done", hint="go back, and tick the box")
    return await _begin(request, "delete", _delete)


async def _begin(request: Request, verb: str, do: Callable[[Inventory, str], Outcome]) -> Response:
    form: Mapping[str, str] = request.state.form
    checkpoint = form.get("checkpoint", "")[:_LONGEST]
    if "place" in request.path_params:
        reader, name = place_and_name(request)
        opened = _of_job(request)
        back = f"/jobs/{quote(reader.key)}/{quote(name)}"
    else:
        location = form.get("location", "")[:_LONGEST]
        opened, back = (lambda: open_any(location)[0]), _back_of(location)
    # Raises an error before the action begins if there is no such checkpoint.
    await in_thread(lambda: opened().item(checkpoint))
    work = context_of(request).works.begin(
        f"{verb} {checkpoint}", lambda: do(opened(), checkpoint), back=back, by=actor_of(request)
    )
    return RedirectResponse(f"/actions/{work.number}", status_code=303)


def _back_of(location: str) -> str:
    return f"/checkpoints?location={quote(location, safe='')}"


def _checks_here(request: Request, back: str) -> dict[str, Check]:
    """The last check that this dashboard has made of each checkpoint of a page, by its name."""
    found: dict[str, Check] = {}
    for work in context_of(request).works.done(back):
        verb, _, checkpoint = work.title.partition(" ")
        if verb == "verify" and work.outcome is not None and work.ended is not None:
            found.pop(checkpoint, None)
            if work.outcome.document.get("valid") is True:
                found[checkpoint] = Check(time=work.ended, how="here")
    return found


def _of_job(request: Request) -> Callable[[], Inventory]:
    """A function that opens the checkpoints of the job in the path."""
    reader, name = place_and_name(request)

    def opened() -> Inventory:
        job = reader.job(name).job
        return inventory_of_job(job, reader.call(lambda jobs: jobs.output_of(job)))

    return opened


def _verify(inventory: Inventory, name: str) -> Outcome:
    item = inventory.item(name)
    faults = inventory.verify(item)
    document = verify_document(item, faults)
    if faults:
        facts = tuple((fault.file, fault.reason) for fault in faults[:50])
        sentence = f"{item.where} is damaged: {plural(len(faults), 'fault')}. A resume uses an older checkpoint."
        return Outcome(sentence=sentence, document=document, facts=facts, is_warning=True)
    return Outcome(
        sentence=f"{item.where} is complete: all {plural(item.num_files, 'file')} were read and match their digests.",
        document=document,
    )


def _delete(inventory: Inventory, name: str) -> Outcome:
    item = inventory.item(name)
    # As `safepoint checkpoints prune` does, keep the newest valid checkpoint, damaged ones, and those of others.
    complete = [one for one in inventory.items() if one.is_complete and one.name != "final"]
    if not item.is_complete or not complete or complete[0].name == name:
        raise ConflictError(
            f"{item.where} is the newest complete checkpoint, or is not complete; nothing was deleted",
            hint="`safepoint checkpoints repair --drop-damaged` removes damaged ones",
        )
    found = remove(inventory, [item])
    if found.failed or found.kept:
        reason = found.failed[0][1] if found.failed else "a process reads it, or a later release wrote it"
        return Outcome(sentence=f"{item.where} was not deleted: {reason}.", is_warning=True)
    return Outcome(sentence=f"{item.where} is deleted.", document={"deleted": [item.where]})


routes = [
    Route("/checkpoints", of_location),
    Route("/checkpoints/verify", verify, methods=["POST"]),
    Route("/checkpoints/delete", delete, methods=["POST"]),
    Route("/jobs/{place}/{name}/checkpoints", of_job),
    Route("/jobs/{place}/{name}/checkpoints/verify", verify, methods=["POST"]),
    Route("/jobs/{place}/{name}/checkpoints/delete", delete, methods=["POST"]),
]
