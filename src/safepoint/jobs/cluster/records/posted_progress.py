"""The progress of a job, as its pods have posted it to the cluster. This module sends no requests."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from safepoint.jobs.cluster.objects import Object, at, count_of, items, texts
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import OUTPUT_FOLDER, Progress, SaveStatistics, SpaceRecord, State
from safepoint.progress.trainer_status import (
    FREE_BYTES,
    OUTPUT_SECONDS,
    REPEATED,
    SAFE_TIME,
    SAVE_SECONDS,
    SIZE_BYTES,
    SPACE_SAVES,
    SPACE_SECONDS,
)


def progress_of(job: Object, state: JobState) -> Progress | None:
    """The progress of a job; None if the cluster has no progress of the job.

    The progress is in one of two places: in the status of the job, if the pods post to Kubeflow Trainer's status
    server; or in an annotation of the job, if OpenShift AI's controller reads the progress from the pods.
    """
    status = at(job, "status", "trainerStatus")
    if status is not None:
        values = {str(at(item, "name")): number_in(at(item, "value")) for item in items(status, "metrics")}
        return _progress(
            state,
            values,
            remaining_s=number_in(at(status, "estimatedRemainingSeconds")),
            updated=str(at(status, "lastUpdatedTime") or ""),
        )
    text = texts(job, "metadata", "annotations").get("trainer.opendatahub.io/trainerStatus")
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    metrics: dict[str, object] = {**texts(found, "trainMetrics"), **texts(found, "evalMetrics")}
    values = {name: number_in(value) for name, value in metrics.items()}
    for name in ("currentStep", "totalSteps", "currentEpoch", "totalEpochs"):
        values[name] = number_in(at(found, name))
    remaining_s = number_in(at(found, "estimatedRemainingSeconds"))
    return _progress(state, values, remaining_s=remaining_s, updated=str(at(found, "lastUpdatedTime") or ""))


_STATES = {JobState.COMPLETE: State.FINISHED, JobState.FAILED: State.FAILED, JobState.SUSPENDED: State.INTERRUPTED}
_OWN = {
    *("currentStep", "totalSteps", "currentEpoch", "totalEpochs", "loss", "safeStep", "attempt"),
    *(SAFE_TIME, SAVE_SECONDS, SPACE_SAVES, SPACE_SECONDS, REPEATED, FREE_BYTES, SIZE_BYTES, OUTPUT_SECONDS),
}


def _progress(
    state: JobState, values: dict[str, float | None], *, remaining_s: float | None, updated: str
) -> Progress:
    step, total = count_of(values.get("currentStep")) or 0, count_of(values.get("totalSteps")) or 0
    left = total - step
    progress = Progress(
        time=updated,
        state=_STATES.get(state, State.TRAINING),
        step=step,
        max_steps=total,
        epoch=values.get("currentEpoch") or 0.0,
        num_epochs=values.get("totalEpochs") or 0.0,
        loss=values.get("loss"),
        train_metrics={name: value for name, value in values.items() if name not in _OWN},
        attempt=count_of(values.get("attempt")) or 0,
        safe_step=count_of(values.get("safeStep")),
        safe_time=_utc(values.get(SAFE_TIME)),
        saves=SaveStatistics(expected_s=values.get(SAVE_SECONDS)),
        space=_space(values),
        repeated_steps=count_of(values.get(REPEATED)),
    )
    if remaining_s is None or left <= 0:
        return progress
    # The training has finished, but its last report was not posted.
    if progress.state is State.FINISHED and remaining_s > 0:
        return replace(progress, step=total)
    return replace(progress, step_s=remaining_s / left)


def _space(values: Mapping[str, float | None]) -> tuple[SpaceRecord, ...]:
    """The records of up to two folders: a folder that is nearly full, and the output folder. A folder is left out if
    the pods have not posted its figures."""
    found: list[SpaceRecord] = []
    saves_left, remaining_s = count_of(values.get(SPACE_SAVES)), values.get(SPACE_SECONDS)
    if saves_left is not None or remaining_s is not None:
        found.append(SpaceRecord(place="folder", saves_left=saves_left, remaining_s=remaining_s, is_low=True))
    free_bytes, size_bytes = count_of(values.get(FREE_BYTES)), count_of(values.get(SIZE_BYTES))
    if free_bytes is not None and size_bytes is not None and free_bytes <= size_bytes:
        output_s = values.get(OUTPUT_SECONDS)
        found.append(
            SpaceRecord(place=OUTPUT_FOLDER, free_bytes=free_bytes, size_bytes=size_bytes, remaining_s=output_s)
        )
    return tuple(found)


def number_in(value: object) -> float | None:
    """`value` as a finite number, or None. Anyone who may change the job can write any value."""
    with contextlib.suppress(ValueError):
        return found if math.isfinite(found := float(str(value))) else None
    return None


def _utc(seconds: float | None) -> str | None:
    """The time as RFC 3339; None if `seconds` is None or out of range."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    return None
