"""Resumes a job of this machine from a checkpoint that a person has chosen, instead of the newest one.

The next start of the job then resumes from this checkpoint, and moves newer checkpoints aside (docs/resume.md). Later
starts resume from the newest checkpoint, as always.
"""

import secrets
from dataclasses import dataclass, replace

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.errors import CheckpointError, UnsupportedError
from safepoint.foundation.shared_folders.ownership import is_of_stranger
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.spec import JobSpec
from safepoint.storage.location import parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A checkpoint from which a job can be resumed.

    Args:
        path: its folder.
        step: its step.
        newer: the names of the newer checkpoints, which the next start of the job moves aside; newest first.
    """

    path: str
    step: int
    newer: tuple[str, ...]


def choice_of(job: JobRecord, output: str | None, step: int) -> Choice:
    """The checkpoint of a step.

    Args:
        job: the job.
        output: the location of its checkpoints.
        step: the step of the checkpoint.

    Raises:
        NotFoundError: the job has no checkpoint of this step.
        CheckpointError: the checkpoint is not complete, or belongs to another user in a shared folder.
        UnsupportedError: the checkpoints of the job are in an object store, or their location is unknown.
        SafepointError: the output folder cannot be read.
    """
    if output is None or not parse_location(output).is_folder:
        where = "an unknown location" if output is None else output
        raise UnsupportedError(
            f"the checkpoints of job {job.name} are in {where}, and only a job with an output folder can resume from "
            "an older checkpoint; nothing was changed",
            hint="submit another job, with another output location and --resume PATH, where PATH is the path of "
            f"{checkpoint_name(step)}",
        )
    inventory = open_output(job.spec, output)
    item = inventory.item(checkpoint_name(step))
    if not item.is_complete or item.stated is None:
        reason = f": {item.faults[0]}" if item.faults else ""
        raise CheckpointError(
            f"{item.where} is not a complete checkpoint{reason}; nothing was changed",
            hint="`safepoint checkpoints list` shows which checkpoints are complete",
        )
    if is_of_stranger(item.where):
        raise CheckpointError(
            f"{item.where} belongs to another user, and other users may write to the folder that contains it; "
            "nothing was changed",
            hint="to use it, copy it to a folder that only you can write to, and submit a job with --resume PATH",
        )
    others = [one for one in inventory.items() if not one.is_of_other_user and one.name != "final"]
    newer = tuple(one.name for one in others if one.stated is not None and one.stated.step > step)
    return Choice(path=item.where, step=step, newer=newer)


def spec_for(job: JobRecord, output: str | None, step: int | None) -> tuple[JobSpec, str]:
    """Return the specification with which a job resumes, and a text for an event: what the job resumes from.

    Args:
        job: the job.
        output: the location of its checkpoints.
        step: the step of the checkpoint from which it resumes; None for the newest checkpoint.

    Raises:
        SafepointError: see `choice_of`.
    """
    spec = job.spec
    if step is not None:
        choice = choice_of(job, output, step)
        settings = replace(spec.settings, resume=choice.path, from_scratch=False)
        changed = replace(spec, settings=settings, resume_mark=secrets.token_hex(8))
        return changed, f"resumes from {choice.path}"
    if spec.resume_mark is not None:  # drop an earlier choice, because the job may not have started from it yet
        spec = replace(spec, settings=replace(spec.settings, resume="auto"), resume_mark=None)
    return spec, "resumes from the newest checkpoint"
