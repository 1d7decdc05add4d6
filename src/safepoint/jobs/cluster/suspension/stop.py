"""Stops a job, and reports what is saved.

If the user may run programs in pods, this module first requests a save. After the save the ranks wait, and the
checkpoint is checked before the job is stopped. If the user may not run programs in pods, the ranks save when the
pods receive SIGTERM. When a pod ends, it reports which checkpoint it has found complete.

A job in a queue can be stopped only through its Workload, Kueue's object for the job. If only the TrainJob is
suspended, Kueue starts an admitted job again at once.

If the ranks cannot save before the deadline, and the job makes process images, its pod makes one. The pod reports the
image when it ends, and this module records it. After a stop by a queue, or the loss of a node, no command records the
image: only the next pod finds it.

A receipt states which checkpoint a suspension has saved, and whether the files of the checkpoint were verified.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from safepoint.errors import AccessDeniedError, ConflictError, SafepointError, TransientError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, texts
from safepoint.jobs.cluster.records.pod_image import IMAGE, PodImage, image_of
from safepoint.jobs.cluster.records.receipts import RECEIPT, read_receipt, receipt_of
from safepoint.jobs.cluster.state import SUSPENDED_BY, ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.remaining_pods import RemainingPods
from safepoint.jobs.cluster.suspension.save_request import request_save
from safepoint.jobs.cluster.transport.failures import RejectedError
from safepoint.jobs.cluster.watches.pod_ends import PodEnds
from safepoint.jobs.cluster.watches.safe_points import SafePoints
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import this_user
from safepoint.jobs.model.states import JobState

_LOOK_S = 1.0
_HELD_S = 50.0
"""The minimum time that the ranks wait after a requested save; see `safepoint.training.outcome.hold`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSave:
    """A save that is not a checkpoint, such as a process image.

    Args:
        annotations: the annotations for the TrainJob of the stopped job.
        step: the step of the job's newest checkpoint at the time of the save; None if there was no checkpoint.
        what: what was made, for messages.
    """

    annotations: Mapping[str, str]
    step: int | None
    what: str


def stop_job(
    api: ClusterApi,
    look: Callable[[], Observed],
    *,
    place: str,
    timeout_s: float | None,
    save: Callable[[Observed, ClusterJob], OtherSave] | None = None,
) -> ClusterJob:
    """Save a checkpoint of a job, stop the job, and wait until its pods are gone.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        look: returns the objects of the job as they are now.
        place: the name of the cluster in messages.
        timeout_s: how long to wait; None for no limit.
        save: saves the job in another way than with a checkpoint on request. If it raises an exception, the job is
            not stopped. The job then has a receipt only if the pods have saved a newer checkpoint when they ended.

    Returns:
        The job. Its message says what is saved.

    Raises:
        ConflictError: the job has ended or is being deleted, or another person resumes it meanwhile.
        AccessDeniedError: you may not stop the job, see `check_may_stop`.
        WaitTimeoutError: the pods of the job are not gone yet; the request stays in effect.
    """
    began_s = clock.monotonic_s()
    seen, job = _look(look, place)
    if job.state is JobState.SUSPENDED:
        return replace(job, message=_joined(f"it was suspended before{_by(seen)}", _what_is_saved(job)))
    first, name = job, job.name
    check_may_stop(api, seen, job)
    is_stopping = _is_stopping(seen, job)
    requested, reason, saved_s = None, "Safepoint did not submit it", -math.inf
    other: OtherSave | None = None
    with PodEnds(api, name) as ends:
        if is_stopping:  # the command that began the suspension may have requested a save, and recorded its receipt
            requested, reason = _recorded(seen.trainjob), f"its suspension had begun before{_by(seen)}"
        else:
            if save is not None:
                other = save(seen, job)
                reason = f"the job trained on after {other.what}"
                seen, job = _look(look, place)
            elif job.is_ours:
                requested, reason = _try_to_save(api, seen, job, timeout_s)
                saved_s = clock.monotonic_s()
                seen, job = _look(look, place)
            request_stop(api, seen, receipt=requested, notes=None if other is None else other.annotations)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (clock.monotonic_s() - began_s))

        remaining = RemainingPods(api, name)

        def has_stopped() -> bool:
            nonlocal job
            now = look()
            job = describe(now, place=place)
            if job.state.is_over or job.state is JobState.SUSPENDED:
                return True
            if not _is_requested(now) and job.state is not JobState.DELETING:
                raise ConflictError(
                    f"job {name} was resumed while it was being suspended; it is {job.state}",
                    hint=f"`safepoint suspend {name}` suspends it once more",
                )
            remaining.look(now.pods)
            return False

        wait_until(
            has_stopped,
            f"job {name} was not suspended",
            left_s,
            f"`safepoint status {name}` shows when it is suspended",
        )
        if seen.pods:
            ends.wait_for_last()
    if job.state.is_over:
        return job
    at_end = receipt_of(ends.checkpoint, output=job.output, was_requested=False, reason=reason)
    if at_end is not None and other is not None and at_end.step <= (-1 if other.step is None else other.step):
        at_end = None  # this checkpoint was there before the suspension
    receipt = _keep_receipt(api, name, requested, at_end, is_stopping=is_stopping)
    image = _keep_image(api, job, ends)
    if receipt is None:
        SafePoints(api).keep(replace(seen, saved_step=ends.safe_step))
    is_held = requested is not None and receipt is requested and clock.monotonic_s() - saved_s < _HELD_S
    safe_step = ends.safe_step if ends.safe_step is not None else job.safe_step
    if receipt is not None:
        safe_step = max(receipt.step, safe_step or 0)
    job = replace(
        job,
        safe_step=safe_step,
        receipt=receipt,
        image=image or job.image,
        was_saved=None if not job.is_ours else True if is_held else ends.is_saved,
    )
    saved = _joined(_frozen_in(image), _what_is_saved(job, first.state, reason))
    before = reason if is_stopping and reason not in saved else ""
    return replace(job, message=_joined(before, job.message, saved))


def _look(look: Callable[[], Observed], place: str) -> tuple[Observed, ClusterJob]:
    """The objects of the job as they are now, and the job.

    Raises:
        ConflictError: the job has ended or is being deleted, so it cannot be suspended.
    """
    seen = look()
    job = describe(seen, place=place)
    if job.state.is_over or job.state is JobState.DELETING:
        raise ConflictError(f"job {job.name} cannot be suspended: it is {job.state}")
    return seen, job


def _try_to_save(
    api: ClusterApi, seen: Observed, job: ClusterJob, timeout_s: float | None
) -> tuple[Receipt | None, str]:
    """Request a save. Returns its receipt and an empty text, or None and the reason why there is no receipt."""
    if job.state is not JobState.RUNNING:
        return None, f"it was {job.state}"
    try:
        return request_save(api, job, seen, within_s=timeout_s), ""
    except SafepointError as error:
        return None, error.message


def check_may_stop(api: ClusterApi, seen: Observed, job: ClusterJob) -> None:
    """Check the rights to stop a job, before anything is done.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        seen: the objects of the job.
        job: the job that these objects describe. If it is suspended or being suspended, no right is needed.

    Raises:
        AccessDeniedError: you may not change the TrainJob. For a job in a queue: you may not change its Workload, or
            you may not list Workloads.
    """
    if job.state is JobState.SUSPENDED or _is_stopping(seen, job):
        return
    if not api.may("patch", "trainjobs"):
        raise AccessDeniedError(
            f"job {job.name} cannot be stopped: you are not allowed to patch trainjobs; nothing was done",
            hint=_role(api, "trainjobs", "patch"),
        )
    if seen.workload is None and (job.queue is None or not api.serves("workloads")):
        return
    needed = ("patch",) if seen.workload is not None else ("list", "patch")
    missing = ", ".join(verb for verb in needed if not api.may(verb, "workloads"))
    if missing:
        raise AccessDeniedError(
            f"job {job.name} cannot be stopped: Kueue would start it again at once, unless its Workload is "
            f"deactivated; you are not allowed to {missing} workloads; nothing was done",
            hint=_role(api, "workloads", missing),
        )


def _role(api: ClusterApi, kind: str, verbs: str) -> str:
    return f"ask for a Role with apiGroups [{api.group_of(kind)}], resources [{kind}], verbs [{verbs}]"


def request_stop(
    api: ClusterApi, seen: Observed, *, receipt: Receipt | None = None, notes: Mapping[str, str] | None = None
) -> None:
    """Set the field that stops the job: `active` of its Workload (Kueue's object for a job in a queue) or, without a
    Workload, `suspend` of its TrainJob.

    The annotations are written first, so that a job is never stopped without its receipt. If the change of the
    Workload is then refused, they are removed again.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        seen: the objects of the job.
        receipt: what was saved; None if there is no receipt.
        notes: further annotations for the TrainJob.

    Raises:
        AccessDeniedError: you may not change the TrainJob or the Workload; the job was not stopped.
    """
    known = {SUSPENDED_BY: this_user(), RECEIPT: None if receipt is None else _text(receipt)}
    annotations = {**known, **(notes or {})}
    by: Object = {"metadata": {"annotations": annotations}}
    if seen.workload is None:
        by["spec"] = {"suspend": True}
    api.patch("trainjobs", name_of(seen.trainjob), by)
    if seen.workload is None:
        return
    try:
        api.patch("workloads", name_of(seen.workload), {"spec": {"active": False}})
    except SafepointError as error:
        # After another TransientError, the Workload may be changed.
        if isinstance(error, RejectedError) or not isinstance(error, TransientError):
            with contextlib.suppress(SafepointError):
                removed: Object = {"metadata": {"annotations": dict.fromkeys(annotations)}}
                api.patch("trainjobs", name_of(seen.trainjob), removed)
        raise


def _recorded(trainjob: Object) -> Receipt | None:
    """The receipt in the annotation of a TrainJob."""
    return read_receipt(texts(trainjob, "metadata", "annotations").get(RECEIPT))


def _keep_image(api: ClusterApi, job: ClusterJob, ends: PodEnds) -> PodImage | None:
    """The image that a pod made at its deadline, which is written into the annotation of the TrainJob; None if the
    pods report none."""
    image = image_of(ends.image, job.output)
    if image is not None:
        api.patch("trainjobs", job.name, {"metadata": {"annotations": {IMAGE: image.to_annotation()}}})
    return image


def _keep_receipt(
    api: ClusterApi, name: str, requested: Receipt | None, at_end: Receipt | None, *, is_stopping: bool
) -> Receipt | None:
    """The receipt of a suspension. It is written into the annotation of the TrainJob, unless it is there already.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        name: the name of the job.
        requested: the receipt of the requested save, which the annotation already has; None if there is none.
        at_end: the receipt of the save at SIGTERM; None if there is none.
        is_stopping: whether another command has begun the suspension.
    """
    receipt = _later(requested, at_end)
    if receipt is None or receipt is requested:
        return receipt
    if is_stopping:  # only the command that began the suspension knows why no save was requested
        recorded = _recorded(api.find("trainjobs", name) or {})
        if recorded is not None and recorded.step >= receipt.step:
            return recorded
    api.patch("trainjobs", name, {"metadata": {"annotations": {RECEIPT: _text(receipt)}}})
    return receipt


def _text(receipt: Receipt) -> str:
    return json.dumps(receipt.to_document(), sort_keys=True)


def _later(requested: Receipt | None, at_end: Receipt | None) -> Receipt | None:
    """The receipt for the newer of the two checkpoints; None if there is no receipt.

    After the requested save, the ranks wait only for a limited time. If the stop arrives later, they have trained on,
    and save again when they are stopped.
    """
    if requested is None or at_end is None:
        return requested or at_end
    if at_end.step <= requested.step:
        return requested
    return replace(at_end, reason="the job trained on after the requested save")


def _is_stopping(seen: Observed, job: ClusterJob) -> bool:
    """Whether a person has requested the stop already.

    A stop by a queue does not count: after such a stop, the job would resume by itself.
    """
    is_of_person = seen.workload is None or at(seen.workload, "spec", "active") is False
    return job.state is JobState.SUSPENDING and is_of_person


def _is_requested(seen: Observed) -> bool:
    """Whether a request to stop the job is in effect."""
    if seen.workload is not None and at(seen.workload, "spec", "active") is False:
        return True
    return seen.workload is None and at(seen.trainjob, "spec", "suspend") is True


def _by(seen: Observed) -> str:
    by = texts(seen.trainjob, "metadata", "annotations").get(SUSPENDED_BY)
    return f", by {by}" if by else ", by another program than Safepoint"


def _what_is_saved(job: ClusterJob, before: JobState | None = None, reason: str = "") -> str:
    """What the suspension has saved, in words.

    Args:
        job: the suspended job.
        before: the job's state before this suspension; None if the job was suspended already.
        reason: why no save was made on request; empty if a save was made on request.
    """
    newest = "" if job.safe_step is None else f"its newest checkpoint is of step {job.safe_step}"
    if job.receipt is not None:
        return job.receipt.text
    if not job.is_ours:
        return "without a receipt: Safepoint did not submit it, and has no record of its saves"
    if before is None:
        return newest
    if before.is_waiting:
        return _joined("it was not admitted, so nothing ran", newest)
    if before in {JobState.STARTING, JobState.RESUMING}:
        return _joined("it did not train yet", newest)
    saved = "" if job.safe_step is None else f"step {job.safe_step} is saved"
    return _joined(saved, f"no save was made on request, because {reason}" if reason else "")


def _frozen_in(image: PodImage | None) -> str:
    if image is None:
        return ""
    return f"its ranks did not save before the deadline, so a process image of them was made: {image.path}"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def wait_until(is_done: Callable[[], bool], what_not: str, timeout_s: float | None, hint: str) -> None:
    """Call `is_done` every second until it returns True.

    Raises:
        WaitTimeoutError: `is_done` did not return True in time. `what_not` begins the message.
    """
    deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
    while not is_done():
        if deadline_s is not None and clock.monotonic_s() >= deadline_s:
            raise WaitTimeoutError(f"{what_not} within {timeout_s:g} s", hint=f"the request stays in effect; {hint}")
        clock.sleep(_LOOK_S)
