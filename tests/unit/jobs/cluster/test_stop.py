"""Tests of safepoint.jobs.cluster.suspension.stop with an API that is injected; tests/cluster has the others."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, ConflictError, SafepointError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.submission import is_gone
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.objects import name_of
from safepoint.jobs.cluster.records.receipts import RECEIPT
from safepoint.jobs.cluster.state import SUSPENDED_BY
from safepoint.jobs.cluster.suspension import stop
from safepoint.jobs.cluster.transport.failures import RejectedError
from tests.support.cluster.kept import JOB, Kept, running_pod, trainjob, workload_of

CLAIM = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def queued(*, denied: set[str]) -> Kept:
    """A job in a queue that trains, and a user without some rights."""
    job = trainjob(**QUEUE)
    return Kept(
        denied=denied,
        trainjobs=[job],
        pods=[running_pod()],
        workloads=[workload_of(job)],
        persistentvolumeclaims=[CLAIM],
    )


def jobs_of(namespace: Kept) -> ClusterJobs:
    return ClusterJobs(cast("ClusterApi", namespace))


@pytest.mark.parametrize("denied", ["patch", "list"])
@pytest.mark.parametrize("change", [lambda jobs: jobs.suspend(JOB), lambda jobs: jobs.scale(JOB, 2)])
def test_a_job_in_a_queue_is_stopped_only_through_its_workload(
    change: Callable[[ClusterJobs], Any], denied: str
) -> None:
    """Kueue would start it again at once, so nothing is stopped; also if the Workload cannot be found."""
    namespace = queued(denied={f"{denied} workloads", "create pods"})
    with pytest.raises(
        AccessDeniedError, match=f"job tiny cannot be stopped: .*not allowed to {denied} workloads"
    ) as raised:
        change(jobs_of(namespace))
    assert "resources [workloads]" in str(raised.value.hint)
    assert namespace.changes == []
    jobs_of(namespace).jobs()
    assert namespace.changes == []


@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("change", [lambda jobs: jobs.suspend(JOB), lambda jobs: jobs.scale(JOB, 2)])
def test_without_the_right_to_record_it_nothing_is_stopped(
    change: Callable[[ClusterJobs], Any], is_queued: bool
) -> None:
    """A job in a queue could be stopped through its Workload alone, but then it would have no receipt."""
    namespace = queued(denied={"patch trainjobs", "create pods"})
    if not is_queued:
        namespace.kept["workloads"] = []
    with pytest.raises(
        AccessDeniedError, match="job tiny cannot be stopped: you are not allowed to patch trainjobs"
    ) as raised:
        change(jobs_of(namespace))
    assert "resources [trainjobs]" in str(raised.value.hint)
    assert namespace.changes == []


@pytest.mark.parametrize(
    ("error", "is_undone"),
    [(ConflictError("changed"), True), (RejectedError("busy"), True), (TransientError("no answer"), False)],
)
def test_a_job_whose_workload_cannot_be_changed(
    error: SafepointError, is_undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job trains on, so it has no annotations of a suspended job, unless the change may have been carried out."""
    namespace = queued(denied=set())
    patch = namespace.patch

    def refuse(kind: str, name: str, body: Any) -> Any:
        if kind == "workloads":
            raise error
        return patch(kind, name, body)

    monkeypatch.setattr(namespace, "patch", refuse)
    seen = jobs_of(namespace).observe(JOB)
    with pytest.raises(type(error)):
        stop.request_stop(cast("ClusterApi", namespace), seen)
    annotations = namespace.kept["trainjobs"][0]["metadata"]["annotations"]
    assert (SUSPENDED_BY in annotations) != is_undone
    assert namespace.kept["workloads"][0]["spec"]["active"] is True


def test_scale_checks_the_names_of_the_pods_before_it_stops_the_job() -> None:
    """With eleven pods, the index has one more digit."""
    name = "n" * 48
    namespace = Kept(trainjobs=[trainjob(name)], pods=[running_pod(name)], persistentvolumeclaims=[CLAIM])
    with pytest.raises(
        UsageError, match=r"the names of its pods, such as .* more than 63 characters; nothing was done"
    ):
        jobs_of(namespace).scale(name, 11)
    assert namespace.changes == []


# ---- while a command waits -------------------------------------------------------------------------------------


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save can be requested, and no time passes while a command waits."""

    def refuse(*_: object, **__: object) -> Any:
        raise AccessDeniedError("you are not allowed to create and get pods/exec")

    monkeypatch.setattr(stop, "request_save", refuse)


def while_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Each pause takes no time, and is a second later; `act` gets its number."""
    now_s, num_pauses = clock.monotonic_s(), 0

    def sleep(seconds: float) -> None:
        nonlocal now_s, num_pauses
        now_s += seconds
        num_pauses += 1
        assert num_pauses < 400, "the command waits for ever"
        act(num_pauses)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)


@pytest.mark.usefixtures("no_exec")
@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("change", [lambda jobs: jobs.suspend(JOB), lambda jobs: jobs.scale(JOB, 2)])
def test_a_job_that_another_person_resumes_meanwhile(
    change: Callable[[ClusterJobs], Any], is_queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends, and does not stop the job once more; `scale` gives its plan up."""
    namespace = queued(denied=set())
    if not is_queued:
        namespace.kept["workloads"] = []

    def resume(number: int) -> None:
        if number == 2 and is_queued:
            namespace.kept["workloads"][0]["spec"]["active"] = True
        elif number == 2:
            namespace.kept["trainjobs"][0]["spec"]["suspend"] = False

    while_waiting(monkeypatch, resume)
    with pytest.raises(ConflictError, match="job tiny was resumed while it was being suspended; it is Running"):
        change(jobs_of(namespace))
    assert [name_of(item) for item in namespace.kept["trainjobs"]] == [JOB]


class Ends:
    """In place of `PodEnds`: the pods have ended, and the pod of node 0 has checked a checkpoint."""

    is_saved, safe_step, image = True, None, None

    def __init__(self, step: int) -> None:
        self.checkpoint = {"step": step, "name": f"checkpoint-{step}", "digest": "abc", "is_read": False}

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_for_last(self) -> None:
        """All ends are known."""


def being_stopped(*, by: str | None, receipt: dict[str, Any] | None = None) -> Kept:
    """A job without a queue that a person, or another program, has begun to suspend."""
    job = trainjob()
    job["spec"]["suspend"] = True
    notes = {SUSPENDED_BY: by, RECEIPT: receipt and json.dumps(receipt)}
    job["metadata"]["annotations"] |= {name: text for name, text in notes.items() if text is not None}
    return Kept(trainjobs=[job], pods=[running_pod()])


def suspended(namespace: Kept, monkeypatch: pytest.MonkeyPatch, *, at_end: int) -> tuple[Any, Any]:
    """The job after `suspend`, and the receipt in its annotation."""
    monkeypatch.setattr(stop, "PodEnds", lambda *_: Ends(at_end))

    def end(number: int) -> None:
        namespace.kept["pods"] = []

    while_waiting(monkeypatch, end)
    job = jobs_of(namespace).suspend(JOB)
    text = namespace.kept["trainjobs"][0]["metadata"]["annotations"].get(RECEIPT)
    return job, None if text is None else json.loads(text)


@pytest.mark.parametrize(("by", "who"), [("anna", "anna"), (None, "another program than Safepoint")])
def test_a_suspension_that_had_begun_before(by: str | None, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safepoint has submitted the job. No save was requested, because the pods had SIGTERM already."""
    job, receipt = suspended(being_stopped(by=by), monkeypatch, at_end=8)
    why = f"its suspension had begun before, by {who}"
    assert receipt["reason"] == job.receipt.reason == why
    assert "did not submit" not in job.message
    assert job.message.count(why) == 1


@pytest.mark.parametrize("at_end", [8, 9])
def test_the_receipt_of_the_command_that_began_the_suspension_is_kept(
    at_end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That command has requested a save. A later command reports the same receipt, unless the job has trained on."""
    requested = {
        "step": 8,
        "checkpoint": "pvc://ckpt/x/checkpoint-8",
        "digest": "abc",
        "is_read": True,
        "was_requested": True,
        "reason": "",
    }
    job, receipt = suspended(being_stopped(by="anna", receipt=requested), monkeypatch, at_end=at_end)
    if at_end == 8:
        assert receipt == requested == job.receipt.to_document()
        assert "its suspension had begun before, by anna" in job.message
    else:
        assert (receipt["step"], receipt["reason"]) == (9, "the job trained on after the requested save")


def leaving(overdue_s: float) -> Any:
    """A pod whose grace period ended some seconds ago."""
    pod = running_pod(nodeName="gpu-7")
    pod["metadata"]["deletionTimestamp"] = clock.as_utc(clock.wall_s() - overdue_s)
    return pod


@pytest.mark.usefixtures("no_exec")
@pytest.mark.parametrize("is_overdue", [True, False])
@pytest.mark.parametrize("change", ["suspend", "scale", "delete"])
def test_a_pod_that_does_not_end_is_named(
    change: str, is_overdue: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, after half a minute: its node may be gone, and then it never ends by itself."""
    namespace = Kept(trainjobs=[trainjob()], pods=[running_pod()], persistentvolumeclaims=[CLAIM])
    pod = leaving(60 if is_overdue else -600)

    def act(number: int) -> None:
        namespace.kept["pods"] = [pod] if number < 100 else []
        assert caplog.records == [] if number < 30 else number < 35 or caplog.records, number

    while_waiting(monkeypatch, act)
    jobs = jobs_of(namespace)
    {"suspend": jobs.suspend, "delete": jobs.delete, "scale": lambda name: jobs.scale(name, 2)}[change](JOB)
    [message] = [record.getMessage() for record in caplog.records]
    assert "pod tiny-node-0-0-abcde on node gpu-7" in message
    assert ("kubectl delete pod tiny-node-0-0-abcde -n team --force" in message) == is_overdue


@pytest.mark.parametrize("denied", ["get jobsets", "list pods", ""])
def test_a_job_whose_pods_run_is_not_gone(denied: str) -> None:
    """Each of the two kinds that may be read is looked at."""
    namespace = Kept(denied={denied}, pods=[running_pod()], jobsets=[{"metadata": {"name": JOB}}])
    assert not is_gone(cast("ClusterApi", namespace), JOB, "old")
    namespace.kept["jobsets"] = []
    assert is_gone(cast("ClusterApi", namespace), JOB, "old") == (denied == "list pods")
