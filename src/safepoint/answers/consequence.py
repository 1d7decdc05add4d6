"""Describes an action on a job before the action begins: what is safe, whether a save fits, what would be lost."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from safepoint.answers.freezing import FreezePlan
from safepoint.answers.situation import age_s, save_interval_s
from safepoint.foundation.units import format_bytes, format_duration, plural
from safepoint.jobs.local.chosen_checkpoint import Choice
from safepoint.jobs.local.images.job_images import FREEZABLE
from safepoint.jobs.model.job_place import Job
from safepoint.jobs.model.job_progress import newest_save, risk_of_suspending
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress
from safepoint.transparent.criu.program import is_promising


class Action(enum.StrEnum):
    """What a person can do with a job."""

    SUSPEND = "suspend"
    RESUME = "resume"
    SCALE = "scale"
    FREEZE = "freeze"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What an action would mean.

    Args:
        action: the action.
        is_possible: whether the job accepts the action in the state that it has.
        sentences: what would happen, for a person.
        safe_step: the step of the newest checkpoint, or of the chosen checkpoint; None if there is no checkpoint.
        safe_age_s: the age of that checkpoint in seconds; None if the age is unknown.
        save_needed_s: about how long a save takes, in seconds; None if it is unknown, or if nothing has to be saved.
        usable_s: how much of the grace period a save may take, in seconds; None if nothing has to be saved.
        fits: whether a save fits into the grace period; None if it is unknown, or if nothing has to be saved.
        lost_s: for a resume from a chosen checkpoint, the time of the steps that the job would repeat; otherwise, the
            time of the steps that would be lost if the save failed. In seconds; None if it is unknown.
    """

    action: Action
    is_possible: bool
    sentences: tuple[str, ...]
    safe_step: int | None = None
    safe_age_s: float | None = None
    save_needed_s: float | None = None
    usable_s: float | None = None
    fits: bool | None = None
    lost_s: float | None = None

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        document = dataclasses.asdict(self)
        return {**document, "action": str(self.action), "sentences": list(self.sentences)}


def consequence_of(
    action: Action,
    job: Job,
    progress: Progress | None,
    output: str | None = None,
    *,
    choice: Choice | None = None,
    begins: str = "",
    freeze: FreezePlan | None = None,
) -> Consequence:
    """What the action would mean for the job now.

    Args:
        action: the action.
        job: the job.
        progress: the last report of the job; None if there is no report.
        output: the output location of the job, for the sentence about its checkpoints; None if it is unknown.
        choice: the checkpoint from which to resume; None for the newest one.
        begins: for a job with a process image: from which image or checkpoint it continues, see `NewestState.why`;
            empty for other jobs.
        freeze: what a freeze of the job needs; used only for `Action.FREEZE`.
    """
    is_possible, refusal = _is_possible(action, job)
    if not is_possible:
        return Consequence(action=action, is_possible=False, sentences=(refusal,), safe_step=job.safe_step)
    if action is Action.RESUME and choice is not None:
        return Consequence(
            action=action,
            is_possible=True,
            sentences=_from_choice(choice, progress),
            safe_step=choice.step,
            lost_s=_repeated_s(choice, progress),
        )
    if action is Action.RESUME:
        if begins:
            sentences = (f"The job continues {begins}.", "It does so as soon as there is room for it.")
        elif job.safe_step is None:
            sentences = (
                "No checkpoint of the job is known. The job starts as soon as there is room for it.",
                "It continues from its newest valid checkpoint. If there is none, it begins at step 0.",
            )
        else:
            sentences = (
                f"The job continues from its newest checkpoint, step {job.safe_step:,}, as soon as there is room for "
                "it.",
                "The checkpoint is verified first. If it is damaged, the newest valid checkpoint is used.",
            )
        return Consequence(action=action, is_possible=True, sentences=sentences, safe_step=job.safe_step)
    if action is Action.FREEZE:
        return _of_freeze(job, progress, freeze)
    trains = job.state.holds_slots and progress is not None and not progress.state.is_end
    if not trains or progress is None:
        nothing = "No training runs now, so there is nothing to save."
        return Consequence(
            action=action,
            is_possible=True,
            sentences=(nothing, *_afterwards(action, output)),
            safe_step=job.safe_step,
        )
    usable_s = max(0.0, job.settings.grace_s - job.settings.margin_s)
    needed_s, lost_s = progress.save_needed_s, _unsaved_s(progress)
    fits = None if needed_s is None else risk_of_suspending(job, progress) is None
    return Consequence(
        action=action,
        is_possible=True,
        sentences=(
            *_save_sentences(progress, usable_s, job.settings.grace_s, fits),
            *(_choices(action, job, progress) if fits is False else ()),
            *_afterwards(action, output),
        ),
        safe_step=progress.safe_step,
        safe_age_s=None if progress.safe_time is None else age_s(progress.safe_time),
        save_needed_s=needed_s,
        usable_s=usable_s,
        fits=fits,
        lost_s=lost_s,
    )


def actions_of(job: Job) -> list[Action]:
    """The actions that the job accepts in its state. `FREEZE` is left out if this machine cannot freeze processes."""
    found = [action for action in Action if _is_possible(action, job)[0]]
    return [action for action in found if action is not Action.FREEZE or is_promising()]


def _of_freeze(job: Job, progress: Progress | None, plan: FreezePlan | None) -> Consequence:
    """What a freeze would mean."""
    if plan is None or plan.obstacle:
        why = "It is not known whether this machine can freeze the job." if plan is None else plan.obstacle
        return Consequence(action=Action.FREEZE, is_possible=False, sentences=(why,), safe_step=job.safe_step)
    free = "" if plan.free_bytes is None else f", and {format_bytes(plan.free_bytes)} are free there"
    is_tight = plan.free_bytes is not None and plan.free_bytes < plan.memory_bytes
    tight = ": it may not fit. If it does not, the processes run on" if is_tight else ""
    newest = None if progress is None else newest_save(progress)
    return Consequence(
        action=Action.FREEZE,
        is_possible=True,
        sentences=(
            f"All {plural(plan.num_processes, 'process')} of the job stop at the same moment, are written to a "
            f"process image in {plan.folder}, and end. The job is then suspended.",
            f"The image takes at most {format_bytes(plan.memory_bytes)}{free}{tight}.",
            "A resume restores the processes in the middle of the step, so no step is lost. If they cannot be "
            f"restored, it uses the newest checkpoint{f': {newest}' if newest else ''}.",
            "The image holds the memory of the processes, with all passwords in it. Only root can read it.",
        ),
        safe_step=job.safe_step if progress is None else progress.safe_step,
        safe_age_s=None if progress is None or progress.safe_time is None else age_s(progress.safe_time),
    )


def _is_possible(action: Action, job: Job) -> tuple[bool, str]:
    state = job.state
    if state is JobState.DELETING:
        return False, "The job is being deleted, and accepts no other request."
    if action is Action.SUSPEND:
        return not state.is_over and state is not JobState.SUSPENDED, f"The job is {state}; there is nothing to stop."
    if action is Action.RESUME:
        why = "it has to be submitted again" if state.is_over else "only a job that has stopped can be resumed"
        return job.can_resume, f"The job is {state}; {why}."
    if action is Action.FREEZE:
        can_freeze = isinstance(job, JobRecord) and state in FREEZABLE and not job.is_to_stop
        return can_freeze, "Only a running job of this machine can be frozen."
    if action is Action.SCALE:
        why = "Safepoint did not submit the job, so it is not known whether the job would resume."
        if state.is_over:
            why = f"The job is {state}. To train further, delete it and submit it again; its checkpoints stay."
        return job.can_scale, why
    return True, ""


def _from_choice(choice: Choice, progress: Progress | None) -> tuple[str, ...]:
    repeated_s = _repeated_s(choice, progress)
    steps = 0 if progress is None else max(0, progress.step - choice.step)
    again = f" and repeats {plural(steps, 'step')}" if steps else ""
    again += f", about {format_duration(repeated_s)} of work" if steps and repeated_s is not None else ""
    first = f"The job continues from the checkpoint of step {choice.step:,}{again}, as soon as there is room for it."
    if not choice.newer:
        return (first,)
    return first, f"{plural(len(choice.newer), 'newer checkpoint')} will be moved aside; nothing is deleted."


def _repeated_s(choice: Choice, progress: Progress | None) -> float | None:
    return None if progress is None else progress.time_of(progress.step - choice.step)


def _unsaved_s(progress: Progress) -> float | None:
    return progress.time_of(progress.step - (progress.safe_step or 0))


def _save_sentences(progress: Progress, usable_s: float, grace_s: float, fits: bool | None) -> list[str]:
    newest = newest_save(progress)
    first = "Nothing is saved yet." if progress.safe_step is None else f"The last safe point is {newest}."
    needed_s, lost_s = progress.save_needed_s, _unsaved_s(progress)
    if needed_s is None:
        second = f"How long a save takes is not known yet; {format_duration(usable_s)} can be used."
    elif fits:
        second = (
            f"A save needs about {format_duration(needed_s)}, and {format_duration(usable_s)} of the "
            f"{grace_s:g} s grace period can be used: it fits, and no step is lost."
        )
    else:
        lost = "" if lost_s is None else f", and {format_duration(lost_s)} of work would be lost"
        second = (
            f"A save needs about {format_duration(needed_s)}, and only {format_duration(usable_s)} of the "
            f"{grace_s:g} s grace period can be used: it may not fit{lost}."
        )
    return [first, second]


def _choices(action: Action, job: Job, progress: Progress) -> list[str]:
    """What a person can do so that less is lost, if a save may not fit."""
    found: list[str] = []
    if "namespace" in job.particulars and action is not Action.DELETE:
        found.append(
            "If you have the right to run programs in the pods of the job (pods/exec), the job is saved before it is "
            "stopped. The grace period does not limit this save, and no work is lost."
        )
    interval_s = save_interval_s(progress)
    if interval_s is not None and progress.safe_time is not None and age_s(progress.safe_time) < interval_s:
        due_s = interval_s - age_s(progress.safe_time)
        found.append(f"If you wait, less is lost: the next save is due in about {format_duration(due_s)}.")
    return found


def _afterwards(action: Action, output: str | None) -> list[str]:
    if action is Action.SUSPEND:
        return ["The job then waits until it is resumed."]
    if action is Action.SCALE:
        return ["The job then starts again with the new number of nodes."]
    where = "" if output is None else f" in {output}"
    return [f"The job then leaves the list. Its checkpoints{where} stay, unless you choose to delete them."]
