"""The pages of an action on a job: what the action would do, its start, and its result with the receipt."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from safepoint.answers.consequence import Action, consequence_of
from safepoint.answers.freezing import FreezePlan, plan_freeze
from safepoint.answers.job_documents import job_document
from safepoint.answers.process_images import continues_from
from safepoint.answers.receipts import facts_of, receipt_of
from safepoint.dashboard.pages.checkpoint_actions import back_of_job, checks_here
from safepoint.dashboard.pages.context import actor_of, context_of, in_thread, visitor_of
from safepoint.dashboard.pages.job import place_and_name
from safepoint.dashboard.reading.checkpoint_view import inventory_of_job, rows_of
from safepoint.dashboard.reading.places import ListedJob, PlaceReader
from safepoint.dashboard.rendering import Refusal, respond
from safepoint.dashboard.work import Outcome
from safepoint.errors import NotFoundError, SafepointError, UnsupportedError
from safepoint.foundation.units import format_bytes, format_duration, plural
from safepoint.jobs.local.chosen_checkpoint import Choice, choice_of
from safepoint.jobs.local.images.job_images import freeze_job, images_folder
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.newest_state import newest_state
from safepoint.jobs.model.job_place import JobPlace
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.states import JobState
from safepoint.presentation.tones import TONES
from safepoint.storage.location import Location
from safepoint.transparent.criu.program import find_criu
from safepoint.transparent.packages import require_packages

_MOST_NODES = 100_000
_LONGEST_STEP = _LONGEST_NUMBER = 19


async def before(request: Request) -> Response:
    """What the action would mean now."""
    (reader, name), action = place_and_name(request), _action(request)
    step = _step(request.query_params.get("step", "")) if action is Action.RESUME else None

    def read() -> tuple[ListedJob, str | None, Choice | None, str, FreezePlan | None]:
        one = reader.job(name)
        output = reader.call(lambda jobs: jobs.output_of(one.job))
        job, choice, begins, plan = one.job, None, "", None
        if action is Action.FREEZE and isinstance(job, JobRecord):
            plan = plan_freeze(job)
        if action is Action.RESUME and job.can_resume:
            if not isinstance(job, JobRecord):
                begins = continues_from(job)
            elif step is not None:
                choice = choice_of(job, output, step)
            else:
                begins = newest_state(job, output).why
        return one, output, choice, begins, plan

    one, output, choice, begins, plan = await in_thread(request, read)
    found = consequence_of(action, one.job, one.progress, output, choice=choice, begins=begins, freeze=plan)
    is_newest = action is Action.RESUME and found.is_possible and choice is None and not begins
    damage = await in_thread(request, lambda: _known_damage(request, reader, name)) if is_newest else ""
    return await respond(
        request,
        "action.html",
        {"job": name, **found.to_document()},
        found=found,
        action=action,
        job=one.job,
        reader=reader,
        output=output,
        choice=choice,
        damage=damage,
        tone=TONES[one.job.state],
    )


def _known_damage(request: Request, reader: PlaceReader, name: str) -> str:
    """A sentence if a check of this dashboard has found the newest checkpoint damaged; otherwise empty."""
    checks = checks_here(request, back_of_job(reader.key, name))
    if not any(check.faults for check in checks.values()):
        return ""
    try:
        rows = rows_of(inventory_of_job(reader, name), checks=checks)
    except SafepointError:
        return ""
    newer = list(itertools.takewhile(lambda row: not row.is_next, rows))
    damaged = next((row.item.name for row in newer if row.check is not None and row.check.faults), "")
    newest = next((row.item.name for row in rows if row.is_next), "none")
    found = f"A check has found that {damaged} is damaged. The newest checkpoint without a known fault: {newest}."
    return found if damaged else ""


async def act(request: Request) -> Response:
    """Begin the action, and show its page."""
    (reader, name), action = place_and_name(request), _action(request)
    form: Mapping[str, str] = request.state.form
    await in_thread(request, lambda: reader.job(name))
    actor, back = actor_of(request), f"/jobs/{reader.key}/{name}"
    do = _doing(action, form, name, actor)

    def run() -> Outcome:
        try:
            with reader.open_jobs(actor) as jobs:
                return do(jobs)
        finally:
            reader.expire()

    work = context_of(request).works.begin(f"{action} {name}", run, back=back, by=actor)
    return RedirectResponse(f"/actions/{work.number}", status_code=303)


def _doing(action: Action, form: Mapping[str, str], name: str, actor: str) -> Callable[[JobPlace[Any]], Outcome]:
    """The function that carries out the action.

    Raises:
        Refusal: the form is not valid; nothing was done.
    """
    if action is Action.SUSPEND:
        return lambda jobs: _suspend(jobs, name)
    if action is Action.RESUME:
        step = _step(form.get("step", ""))
        return lambda jobs: _resume(jobs, name, step)
    if action is Action.FREEZE:
        return lambda jobs: _freeze(jobs, name, actor)
    if action is Action.DELETE:
        with_checkpoints = form.get("checkpoints") == "on"
        if with_checkpoints and form.get("name", "") != name:
            raise Refusal(
                400,
                "to delete the checkpoints too, type the name of the job; nothing was done",
                hint="go back, and type the name",
            )
        return lambda jobs: _delete(jobs, name, with_checkpoints=with_checkpoints)
    text = form.get("nnodes", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and 1 <= int(text) <= _MOST_NODES):
        raise Refusal(400, "the number of nodes is not valid; nothing was done", hint="use a whole number from 1")
    return lambda jobs: _scale(jobs, name, int(text))


def _suspend(jobs: JobPlace[Any], name: str) -> Outcome:
    job = jobs.suspend(name)
    document = {**job_document(jobs, job), "was_saved": job.was_saved}
    receipt = job.particulars.get("receipt")
    if receipt is None and isinstance(job, JobRecord) and job.was_saved and job.state is JobState.SUSPENDED:
        found = receipt_of(job, jobs.output_of(job))
        document["receipt"] = receipt = None if found is None else found.to_document()
    why = f": {job.message}" if job.message else ""
    if job.state is JobState.SUSPENDED and job.was_saved is False:
        step = "nothing is saved" if job.safe_step is None else f"the newest checkpoint is step {job.safe_step:,}"
        return Outcome(
            sentence=f"The job is suspended, but its last attempt ended without a save; {step}. “Resume” repeats the "
            "steps that are not saved.",
            document=document,
            heading="Suspended without a save",
        )
    facts = facts_of(receipt) if isinstance(receipt, Mapping) else ()  # pyright: ignore[reportUnknownArgumentType]
    return Outcome(sentence=f"The job is {job.state}{why}.", document=document, facts=facts)


def _resume(jobs: JobPlace[Any], name: str, step: int | None) -> Outcome:
    if step is None:
        job = jobs.resume(name)
        begins = f" {job.message}" if isinstance(job, JobRecord) and job.message else ""
        return Outcome(sentence=f"The job resumes{begins}.", document=job_document(jobs, job))
    if not isinstance(jobs, LocalJobs):
        raise UnsupportedError(
            "on a cluster, you cannot choose the checkpoint from which a job resumes; nothing was changed",
            hint="submit another job, with another output location and --resume PATH",
        )
    job = jobs.resume(name, step=step)
    return Outcome(sentence=f"The job resumes from step {step:,}.", document=job_document(jobs, job))


def _freeze(jobs: JobPlace[Any], name: str, actor: str) -> Outcome:
    """Freeze a job, as `safepoint freeze` does."""
    if not isinstance(jobs, LocalJobs):
        raise UnsupportedError("only a job of this machine can be frozen; nothing was changed")
    criu = find_criu()
    require_packages()
    # Not at the top: without numpy, this module must still be importable.
    from safepoint.transparent.images.opening import key_of, open_images

    with open_images(Location.of_folder(images_folder(name)), key_of(None, is_made=True)) as location:
        found = freeze_job(criu, name, location, is_running_after=False, actor=actor)
        image = location.where(found.manifest.name)
    size = format_bytes(found.manifest.size_bytes)
    return Outcome(
        sentence=f"A process image of the job was made: {image} ({size}; frozen for "
        f"{format_duration(found.frozen_s)}). “Resume” continues in the middle of the step.",
        document={**job_document(jobs, jobs.job(name)), "image": image, "frozen_s": round(found.frozen_s, 3)},
    )


def _step(text: str) -> int | None:
    """The step of a checkpoint; None if no step is given.

    Raises:
        Refusal: the text is not a number; nothing was done.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < _LONGEST_STEP):
        raise Refusal(400, "the step is not valid; nothing was done", hint="choose a checkpoint of the job")
    return int(text)


def _scale(jobs: JobPlace[Any], name: str, num_nodes: int) -> Outcome:
    job = jobs.scale(name, num_nodes)
    remark = jobs.remark_on(job)
    sentence = f"The job has {plural(num_nodes, 'node')} now, and is {job.state}."
    return Outcome(
        sentence=f"{sentence} {remark[:1].upper()}{remark[1:]}." if remark else sentence,
        document=job_document(jobs, job),
    )


def _delete(jobs: JobPlace[Any], name: str, *, with_checkpoints: bool) -> Outcome:
    output = jobs.output_of(jobs.job(name)) or "its output location"
    num_deleted = jobs.delete(name, with_checkpoints=with_checkpoints)
    what = (
        f"{plural(num_deleted, 'checkpoint')} in {output} deleted"
        if with_checkpoints
        else f"its checkpoints stay in {output}"
    )
    return Outcome(
        sentence=f"The job is deleted; {what}.", document={"name": name, "checkpoints_deleted": num_deleted}
    )


async def work(request: Request) -> Response:
    """The result of an action."""
    number = request.path_params["number"]
    is_number = number.isascii() and number.isdecimal() and len(number) < _LONGEST_NUMBER
    found = context_of(request).works.get(int(number)) if is_number else None
    # A viewer may see only checkpoints of jobs, and so only actions on jobs and on their checkpoints.
    if found is None or not (visitor_of(request).is_operator or found.back.startswith("/jobs/")):
        raise NotFoundError(
            "this dashboard has no such action, probably because the dashboard was started again",
            hint="see the page of the job",
        )
    return await respond(request, "work.html", found.to_document(), work=found)


def _action(request: Request) -> Action:
    text = request.path_params["action"]
    if text not in list(Action):
        raise NotFoundError(f"there is no page {text!r} of a job", hint="see the page of the job")
    return Action(text)


routes = [
    Route("/actions/{number}", work),
    Route("/jobs/{place}/{name}/{action}", before, methods=["GET"]),
    Route("/jobs/{place}/{name}/{action}", act, methods=["POST"]),
]
