"""What can be done with a checkpoint of a job or of any location: verify, copy, export, delete."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.local.retention import KeepNewest
from safepoint.checkpoint.tools.copy import check_outside, copy
from safepoint.checkpoint.tools.documents import verify_document
from safepoint.checkpoint.tools.export import export_item
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.removal import remove
from safepoint.dashboard.pages.context import actor_of, context_of, in_thread
from safepoint.dashboard.pages.job import place_and_name
from safepoint.dashboard.reading.checkpoint_view import Check, inventory_of_job, open_any
from safepoint.dashboard.rendering import Refusal
from safepoint.dashboard.work import Outcome, Work
from safepoint.errors import ConflictError, StorageError, UsageError
from safepoint.foundation.units import format_bytes, plural
from safepoint.storage.location import Location, parse_location, resolve_claim

if TYPE_CHECKING:
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

LONGEST = 2000
"""The limit of characters of a location or of a name. Further characters are ignored."""
_READ_IN_POD = "read the checkpoints"
Do = Callable[[Inventory, str], Outcome]


async def verify(request: Request) -> Response:
    """Read all files of a checkpoint and compare their digests, as `safepoint checkpoints verify --deep` does."""
    return await _begin(request, "verify", _verify)


async def delete(request: Request) -> Response:
    """Delete a checkpoint."""
    form: Mapping[str, str] = request.state.form
    if form.get("sure") != "on":
        raise Refusal(400, "the deletion was not confirmed; nothing was done", hint="go back, and tick the box")
    return await _begin(request, "delete", _delete)


async def copy_to(request: Request) -> Response:
    """Copy a checkpoint to another output location, as `safepoint checkpoints copy` does."""
    target = _target(request)
    return await _begin(request, "copy", lambda inventory, name: _copy(inventory, name, target))


async def export_to(request: Request) -> Response:
    """Write the model of a checkpoint to an empty location, as `safepoint checkpoints export` does."""
    target = _target(request)
    return await _begin(request, "export", lambda inventory, name: _export(inventory, name, target))


async def read_in_pod(request: Request) -> Response:
    """Read the checkpoints of a job on a cluster in a pod."""
    reader, name = place_and_name(request)
    await in_thread(request, lambda: reader.job(name))
    if reader.is_local:
        raise Refusal(400, "the checkpoints of a job of this machine need no pod; nothing was done")
    actor = actor_of(request)

    def read() -> Outcome:
        with reader.open_jobs(actor) as jobs:
            listed = cast("ClusterJobs", jobs).checkpoints_in_pod(name)
        sentence = f"{plural(len(listed), 'checkpoint')} found. The page of the job shows them."
        return Outcome(sentence=sentence, document={"checkpoints": listed})

    work = context_of(request).works.begin(_READ_IN_POD, read, back=back_of_job(reader.key, name), by=actor)
    return RedirectResponse(f"/actions/{work.number}", status_code=303)


def last_read_in_pod(request: Request, back: str) -> Work | None:
    """The last action that has read the checkpoints of this page in a pod; None if there is none."""
    found = [work for work in context_of(request).works.done(back) if work.title == _READ_IN_POD]
    return next((work for work in reversed(found) if work.outcome is not None), None)


def back_of(location: str) -> str:
    """The page of the checkpoints at a location."""
    return f"/checkpoints?location={quote(location, safe='')}"


def back_of_job(place: str, name: str) -> str:
    """The page of a job."""
    return f"/jobs/{quote(place)}/{quote(name)}"


def checks_here(request: Request, back: str) -> dict[str, Check]:
    """Name of a checkpoint → the last check of it that this dashboard has made.

    Args:
        request: the request.
        back: the page from which the checks were requested, see `Work`.
    """
    found: dict[str, Check] = {}
    for work in context_of(request).works.done(back):
        verb, _, checkpoint = work.title.partition(" ")
        if verb == "verify" and work.outcome is not None and work.ended is not None:
            faults = tuple(Fault(**fault) for fault in work.outcome.document["faults"])
            found[checkpoint] = Check(time=work.ended, how="here", faults=faults)
    return found


async def _begin(request: Request, verb: str, do: Do) -> Response:
    form: Mapping[str, str] = request.state.form
    checkpoint = form.get("checkpoint", "")[:LONGEST]
    opened: Callable[[], Inventory]
    if "place" in request.path_params:
        reader, name = place_and_name(request)
        opened, back = (lambda: inventory_of_job(reader, name)), back_of_job(reader.key, name)
    else:
        location = form.get("location", "")[:LONGEST]
        opened, back = (lambda: open_any(location)[0]), back_of(location)
    # If there is no such checkpoint, this line raises an error, and the action does not begin.
    await in_thread(request, lambda: opened().item(checkpoint))
    work = context_of(request).works.begin(
        f"{verb} {checkpoint}", lambda: do(opened(), checkpoint), back=back, by=actor_of(request)
    )
    return RedirectResponse(f"/actions/{work.number}", status_code=303)


def _target(request: Request) -> Location:
    """The location to write to.

    Raises:
        UsageError: the text is not a location, the location is inside a checkpoint, or the path is not a full path.
    """
    form: Mapping[str, str] = request.state.form
    text = form.get("target", "").strip()[:LONGEST]
    try:
        location = resolve_claim(parse_location(text))
    except ValueError as error:
        raise UsageError(f"{error}; nothing was written", hint="go back, and give another location") from error
    if location.is_folder and not Path(text).is_absolute():
        raise UsageError(
            f"{text} is not a full path; nothing was written", hint="begin with /, or give s3://bucket/prefix"
        )
    check_outside(location)
    return location


def _verify(inventory: Inventory, name: str) -> Outcome:
    item = inventory.item(name)
    faults = inventory.verify(item)
    document = verify_document(item, faults)
    if faults:
        facts = tuple((fault.file, fault.reason) for fault in faults[:50])
        sentence = f"{item.where} is damaged: {plural(len(faults), 'fault')}. A resume does not use it."
        return Outcome(sentence=sentence, document=document, facts=facts, heading="It is damaged")
    return Outcome(
        sentence=f"{item.where} is complete: all {plural(item.num_files, 'file')} were read and match their digests.",
        document=document,
    )


def _copy(inventory: Inventory, name: str, target: Location) -> Outcome:
    item = inventory.item(name)
    where = str(target.child(item.name))
    is_new = copy(inventory, item, target)
    did = f"copied to {where} ({format_bytes(item.size_bytes)}), and every byte was compared" if is_new else ""
    return Outcome(
        sentence=f"{item.where} is {did or f'at {where} already'}.",
        document={"name": item.name, "from": item.where, "to": where, "copied": is_new},
    )


def _export(inventory: Inventory, name: str, target: Location) -> Outcome:
    item = inventory.item(name)
    files = export_item(inventory, item, target)
    return Outcome(
        sentence=f"The model of {item.where} is in {target} now: {plural(len(files), 'file')} for from_pretrained.",
        document={"from": item.where, "to": str(target), "files": files},
        facts=tuple(("File", file) for file in files[:50]),
    )


def _delete(inventory: Inventory, name: str) -> Outcome:
    item = inventory.item(name)
    # A checkpoint may be deleted if `safepoint checkpoints prune --keep newest=1` would delete it.
    if name not in {one.name for one in inventory.superseded([KeepNewest(1)])}:
        raise ConflictError(
            f"{item.where} is the newest valid checkpoint of its run, or is damaged, or a process reads or uploads "
            "it, or another user or program has made it; nothing was deleted",
            hint="`safepoint checkpoints repair --drop-damaged` removes damaged ones",
        )
    found = remove(inventory, [item])
    if found.failed or found.kept:
        reason = found.failed[0][1] if found.failed else "a process reads it, or a later release wrote it"
        raise (StorageError if found.failed else ConflictError)(f"{item.where} was not deleted: {reason}")
    return Outcome(sentence=f"{item.where} is deleted.", document={"deleted": [item.where]})


_ACTIONS = {"verify": verify, "copy": copy_to, "export": export_to, "delete": delete}
routes = [
    *(Route(f"/checkpoints/{verb}", act, methods=["POST"]) for verb, act in _ACTIONS.items()),
    *(
        Route(f"/jobs/{{place}}/{{name}}/checkpoints/{verb}", act, methods=["POST"])
        for verb, act in (*_ACTIONS.items(), ("read", read_in_pod))
    ),
]
