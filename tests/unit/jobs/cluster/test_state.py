"""Tests of safepoint.jobs.cluster.state: each state, from objects as the cluster sends them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from safepoint.jobs.cluster.spec import RECORD, ClusterSpec
from safepoint.jobs.cluster.state import SAFE_STEP, SUSPENDED_BY, ClusterJob, Observed, describe
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings

SPEC = ClusterSpec(name="tiny", program=("train.py", "--lr", "1e-4"), settings=RunSettings(output_dir="pvc://c/run"))


def trainjob(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "tiny", "namespace": "team", "uid": "u", "creationTimestamp": "2026-11-23T10:00:00Z"}
    return {
        "metadata": {**metadata, "annotations": {RECORD: SPEC.to_record()}, "labels": {}},
        "spec": {
            "trainer": {"numNodes": 2, "env": [{"name": "SAFEPOINT_OUTPUT_DIR", "value": "pvc://c/run"}]},
            **spec,
        },
        "status": {},
    }


def pod(node: int = 0, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {"name": "node", "state": state or {"running": {"startedAt": "2026-11-23T10:01:00Z"}}, **status}
    return {
        "metadata": {"name": f"tiny-node-{node}", "labels": {"batch.kubernetes.io/job-completion-index": str(node)}},
        "spec": {"containers": [{"name": "node", "env": []}]},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


def workload(*conditions: tuple[str, str, str, str], active: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": "w"},
        "spec": {"active": active},
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": message}
                for kind, status, reason, message in conditions
            ]
        },
    }


def of(job: dict[str, Any], *pods: dict[str, Any], **rest: Any) -> ClusterJob:
    return describe(Observed(trainjob=job, pods=pods, **rest), place="kind")


def condition(job: dict[str, Any], kind: str, message: str = "", status: str = "True") -> dict[str, Any]:
    job["status"].setdefault("conditions", []).append({"type": kind, "status": status, "message": message})
    return job


def test_what_safepoint_submitted_is_shown_as_it_was_typed() -> None:
    job = of(trainjob(), pod(0), pod(1))
    assert (job.command, job.output, job.is_ours, job.num_nodes) == ("train.py --lr 1e-4", "pvc://c/run", True, 2)


def test_the_output_location_is_that_of_the_pods() -> None:
    """The record is only a note: it could name another one."""
    job = trainjob()
    record = json.loads(job["metadata"]["annotations"][RECORD])
    record["settings"]["SAFEPOINT_OUTPUT_DIR"] = "pvc://other/run"
    job["metadata"]["annotations"][RECORD] = json.dumps(record)
    assert of(job).output == "pvc://c/run"


def test_a_job_of_kubectl_has_no_command() -> None:
    other = trainjob(trainer={"numNodes": 2})
    other["metadata"]["annotations"] = None
    job = of(other, pod(0), pod(1))
    assert (job.command, job.output, job.is_ours, job.state) == ("", None, False, JobState.RUNNING)


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "[" * 100_000, json.dumps({"program": 5, "settings": []})])
def test_a_record_that_someone_changed_is_ignored(text: str) -> None:
    job = trainjob()
    job["metadata"]["annotations"][RECORD] = text
    assert of(job, pod(0), pod(1)).state is JobState.RUNNING


def test_an_end_counts_before_everything_else() -> None:
    assert of(condition(trainjob(suspend=True), "Complete")).state is JobState.COMPLETE
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-23T10:05:00Z"}}
    later = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": "2026-11-23T10:05:03Z"}}
    failed = of(condition(trainjob(), "Failed", "backoff limit"), pod(0, later), pod(1, killed))
    assert (failed.state, failed.message) == (JobState.FAILED, "pod tiny-node-1: out of memory (OOMKilled)")
    gone = trainjob()
    gone["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z"
    assert of(gone, pod()).state is JobState.DELETING


def test_a_person_suspended_it() -> None:
    job = trainjob(suspend=True)
    job["metadata"]["annotations"][SUSPENDED_BY] = "me@laptop"
    assert of(job, pod(0)).state is JobState.SUSPENDING
    assert (of(job).state, of(job).message) == (JobState.SUSPENDED, "requested by me@laptop")


def test_an_old_condition_suspended_does_not_count() -> None:
    assert of(condition(trainjob(suspend=False), "Suspended"), pod(0), pod(1)).state is JobState.RUNNING


def test_a_queue_holds_it() -> None:
    job = trainjob(suspend=True)
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert of(job).state is JobState.QUEUED
    waits = workload(("QuotaReserved", "False", "WaitingForQuota", "insufficient unused quota for cpu"))
    assert (of(job, workload=waits).state, of(job, workload=waits).message) == (
        JobState.QUEUED,
        "insufficient unused quota for cpu",
    )
    never = workload(("QuotaReserved", "False", "ExceedsMaxQuota", "more than the queue has"))
    assert of(job, workload=never).state is JobState.INADMISSIBLE
    preempted = workload(
        ("QuotaReserved", "False", "Pending", "Preempted to accommodate a workload"),
        ("Evicted", "True", "Preempted", "Preempted to accommodate a workload"),
    )
    assert of(job, workload=preempted).state is JobState.PREEMPTED
    assert of(job, pod(0), workload=preempted).state is JobState.SUSPENDING
    assert of(job, workload=workload(active=False)).state is JobState.SUSPENDED


def test_pods_that_do_not_run_yet() -> None:
    assert of(trainjob()).state is JobState.STARTING
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert of(trainjob(), pod(0, creating), pod(1)).state is JobState.STARTING
    assert of(trainjob(), pod(0, creating), pod(1)).message == "waits for pod tiny-node-0"
    pulls = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    stuck = of(trainjob(), pod(0, pulls), pod(1))
    assert stuck.state is JobState.INADMISSIBLE
    assert stuck.message == "pod tiny-node-0: its image cannot be pulled: not found"
    alone = pod(0, creating)
    alone["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}
    ]
    assert of(trainjob(), alone, pod(1)).message == "no node has room for pod tiny-node-0: 0/1 nodes: cpu"
    refused = {"reason": "TrainJobResourcesCreationFailed", "message": "field is immutable"}
    assert of(trainjob(), events=[refused]).state is JobState.INADMISSIBLE


def test_a_pod_that_has_finished_before_the_others() -> None:
    assert of(trainjob(), pod(0, {"terminated": {"exitCode": 0}}), pod(1)).state is JobState.RUNNING


def test_pods_that_restart() -> None:
    ended = {"terminated": {"exitCode": 75}}
    again = pod(1, {"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=1, lastState=ended)
    job = of(trainjob(), pod(0), again)
    assert (job.state, job.message) == (JobState.RESTARTING, "pod tiny-node-1: exit code 75")
    leaving = pod(0)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z"
    leaving["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "message": "evicted by the API"}
    ]
    assert of(trainjob(), leaving, pod(1)).message == "pod tiny-node-0: evicted by the API"


def test_it_runs_when_it_has_posted_since_it_started() -> None:
    job = trainjob()
    posting = pod(0)
    posting["spec"]["containers"][0]["env"] = [{"name": "KUBEFLOW_TRAINER_SERVER_URL", "value": "https://t"}]
    assert of(job, posting, pod(1)).state is JobState.STARTING
    metrics = {"currentStep": "20", "totalSteps": "100", "loss": "0.5", "safeStep": "16", "attempt": "2"}
    job["status"]["trainerStatus"] = {
        "lastUpdatedTime": "2026-11-23T10:00:30Z",
        "estimatedRemainingSeconds": 160,
        "metrics": [{"name": name, "value": value} for name, value in metrics.items()],
    }
    assert of(job, posting, pod(1)).state is JobState.RESUMING
    job["status"]["trainerStatus"]["lastUpdatedTime"] = "2026-11-23T10:02:00Z"
    found = of(job, posting, pod(1))
    assert found.state is JobState.RUNNING
    assert found.progress is not None
    assert (found.progress.step, found.progress.max_steps, found.safe_step, found.attempt) == (20, 100, 16, 2)
    assert found.progress.remaining_s == pytest.approx(160)


def test_a_folder_that_is_nearly_full_is_posted() -> None:
    """Only while there is one."""
    job = trainjob()
    metrics = [{"name": "currentStep", "value": "20"}, {"name": "repeatedSteps", "value": "6"}]
    metrics.append({"name": "spaceSavesLeft", "value": "3"})
    job["status"]["trainerStatus"] = {"lastUpdatedTime": "2026-11-23T10:02:00Z", "metrics": metrics}
    found = of(job, pod(0), pod(1)).progress
    assert found is not None
    assert [(one.saves_left, one.remaining_s, one.is_low) for one in found.space] == [(3, None, True)]
    assert found.repeated_steps == 6
    assert not found.train_metrics
    metrics.pop()
    without = of(job, pod(0), pod(1)).progress
    assert without is not None
    assert without.space == ()


@pytest.mark.parametrize(
    ("posted", "expected"),
    [
        ({"outputFreeBytes": "25", "outputSizeBytes": "100", "outputSeconds": "60.5"}, [(25, 100, 60.5)]),
        ({"outputFreeBytes": "25", "outputSizeBytes": "100"}, [(25, 100, None)]),
        ({"outputFreeBytes": "101", "outputSizeBytes": "100"}, []),
        ({"outputFreeBytes": "25"}, []),
        ({"outputFreeBytes": "-1", "outputSizeBytes": "1e400"}, []),
    ],
)
def test_how_full_the_output_folder_is(posted: dict[str, str], expected: list[tuple[int, int, float | None]]) -> None:
    """Also while there is room; values that cannot be true are left out."""
    job = trainjob()
    metrics = [{"name": name, "value": value} for name, value in posted.items()]
    job["status"]["trainerStatus"] = {"lastUpdatedTime": "2026-11-23T10:02:00Z", "metrics": metrics}
    found = of(job, pod(0), pod(1)).progress
    assert found is not None
    assert [(one.free_bytes, one.size_bytes, one.remaining_s) for one in found.space] == expected
    assert not any(one.is_low for one in found.space)
    assert not found.train_metrics


def test_progress_that_openshift_ai_has_read() -> None:
    job = trainjob()
    text = json.dumps({"currentStep": 7, "totalSteps": 10, "trainMetrics": {"loss": 0.25}, "evalMetrics": None})
    job["metadata"]["annotations"]["trainer.opendatahub.io/trainerStatus"] = text
    found = of(job, pod(0), pod(1)).progress
    assert found is not None
    assert (found.step, found.max_steps, found.loss) == (7, 10, 0.25)


def posted(job: dict[str, Any], **metrics: int) -> dict[str, Any]:
    """The job, after its pods have posted to the status server."""
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    job["status"]["trainerStatus"] = {"lastUpdatedTime": "2026-11-23T10:30:00Z", "metrics": listed}
    return job


def test_a_job_that_has_ended_keeps_its_attempt() -> None:
    """With its end, how it ended, and the exit code of its first pod that failed."""
    done = condition(posted(trainjob(), currentStep=20, attempt=2), "Complete")
    done["status"]["conditions"][0]["lastTransitionTime"] = "2026-11-23T10:31:00Z"
    [found] = of(done).attempts
    assert (found.number, found.num_nodes, found.started) == (2, 2, "2026-11-23T10:00:00Z")
    assert (found.ended, found.outcome, found.exit_code) == ("2026-11-23T10:31:00Z", "Complete", None)
    failed = condition(trainjob(), "Failed", "too many restarts")
    failed["status"]["conditions"][0]["lastTransitionTime"] = "2026-11-23T10:05:00Z"
    [found] = of(failed, pod(0, {"terminated": {"exitCode": 11}})).attempts
    assert (found.number, found.ended, found.exit_code) == (1, "2026-11-23T10:05:00Z", 11)
    assert found.outcome == "Failed: pod tiny-node-0: exit code 11"


def test_a_job_that_is_stopped_keeps_its_attempt() -> None:
    """Its end is its last report; what a queued job waits for now is not how the attempt has ended."""
    suspended = posted(trainjob(suspend=True), currentStep=20)
    suspended["metadata"]["annotations"][SUSPENDED_BY] = "kim"
    [found] = of(suspended).attempts
    assert (found.ended, found.outcome) == ("2026-11-23T10:30:00Z", "Suspended: requested by kim")
    evicted = ("Evicted", "True", "Preempted", "by job b")
    held = posted(trainjob(suspend=True), currentStep=20)
    [found] = of(held, workload=workload(evicted)).attempts
    assert found.outcome == "Preempted: by job b"
    [found] = of(held, workload=workload(("QuotaReserved", "False", "Pending", "no quota"))).attempts
    assert found.outcome == "Suspended"


def test_a_job_that_has_never_trained_has_no_attempt() -> None:
    """Neither one that was suspended before it ran, nor one whose queue does not exist."""
    assert of(trainjob(suspend=True)).attempts == ()
    never = of(trainjob(suspend=True), workload=workload(("QuotaReserved", "False", "Inadmissible", "no queue")))
    assert (never.state, never.attempts) == (JobState.INADMISSIBLE, ())


def saved(step: Any, code: int = 75) -> dict[str, Any]:
    """The end of a container."""
    return {"terminated": {"exitCode": code, "message": json.dumps({"currentStep": step})}}


def test_the_safe_step_is_in_the_message_of_a_pod_that_has_ended() -> None:
    """A cluster without a status server has it nowhere else. The last end of a container is kept when it restarts."""
    assert of(trainjob(suspend=True), pod(0, saved(40)), pod(1, saved(40))).safe_step == 40
    assert of(trainjob(), pod(0, lastState=saved(24)), pod(1)).safe_step == 24
    assert of(trainjob(), pod(0, saved(40), lastState=saved(24)), pod(1)).safe_step == 40
    assert of(trainjob(), pod(0), pod(1, saved(40))).safe_step is None
    assert of(posted(trainjob(), safeStep=32), pod(0, lastState=saved(24)), pod(1)).safe_step == 32


@pytest.mark.parametrize(
    "state", [saved(40, code=143), saved("40"), saved(-1), saved(10**16), saved(None), saved([])]
)
def test_a_message_without_a_save_is_ignored(state: dict[str, Any]) -> None:
    """Anyone who may run code in a pod can write any message."""
    assert of(trainjob(), pod(0, state), pod(1)).safe_step is None


def test_what_a_watch_has_seen_is_newer_than_the_annotation() -> None:
    job = trainjob(suspend=True)
    job["metadata"]["annotations"][SAFE_STEP] = "16"
    assert of(job).safe_step == 16
    assert of(job, saved_step=40).safe_step == 40


@pytest.mark.parametrize(
    "value", [None, 5, "text", [], {"metadata": None}, {"metadata": {"labels": []}, "status": 1}]
)
def test_objects_may_lack_everything(value: Any) -> None:
    job = describe(Observed(trainjob=value if isinstance(value, dict) else {}, pods=[value]), place="kind")
    assert job.state in set(JobState)


def test_a_job_waits_for_its_dataset() -> None:
    """The pod of an initializer does not train, and what keeps it is named."""
    waits = pod(0, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    waits["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] = "dataset-initializer"
    job = of(trainjob(), waits)
    assert (job.state, job.pods) == (JobState.INADMISSIBLE, ())
    assert "its image cannot be pulled" in job.message
    waits["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2026-11-23T10:01:00Z"}}
    assert (of(trainjob(), waits).state, of(trainjob(), waits).message) == (
        JobState.STARTING,
        "waits for pod tiny-node-0",
    )


def test_a_job_that_lacks_pods_does_not_run() -> None:
    """Without a status server, the state of the pods that exist says nothing about the others."""
    job = of(trainjob(), pod(0))
    assert (job.state, job.message) == (JobState.STARTING, "1 of 2 pods exist")
    done = pod(1, {"terminated": {"exitCode": 0}})
    done["status"]["phase"] = "Succeeded"
    assert of(trainjob(), pod(0), done).state is JobState.RUNNING


def test_a_pod_that_is_not_replaced_yet() -> None:
    """Kubernetes waits before it replaces a pod, and longer after each failure."""
    failed = pod(1, {"terminated": {"exitCode": 1, "finishedAt": "2026-11-23T10:05:00Z"}})
    failed["status"]["phase"] = "Failed"
    job = of(trainjob(), pod(0), failed)
    assert (job.state, job.message) == (JobState.RESTARTING, "1 of 2 pods exist: pod tiny-node-1: exit code 1")
    job = of(trainjob(), failed)
    assert (job.state, job.message) == (JobState.RESTARTING, "pod tiny-node-1: exit code 1")
    assert of(trainjob(), pod(0, restartCount=1)).state is JobState.RESTARTING  # the other one was deleted
    posted = trainjob()
    posted["status"]["trainerStatus"] = {"lastUpdatedTime": "2026-11-23T10:02:00Z"}
    assert of(posted, pod(0)).state is JobState.RESTARTING
    posted["status"]["trainerStatus"]["lastUpdatedTime"] = "2026-11-23T10:00:00Z"  # before a suspension
    assert of(posted, pod(0)).state is JobState.RESUMING


def test_the_number_of_pods_may_come_from_the_runtime() -> None:
    job = trainjob(trainer={})
    few = pod(0)
    few["spec"]["containers"][0]["env"] = [{"name": "PET_NNODES", "value": "2"}]
    assert of(job, few).message == "1 of 2 pods exist"
    assert of(job, few, pod(1)).state is JobState.RUNNING


def test_the_quota_of_pods_is_used_up() -> None:
    """A warning from before the newest pod was created is no longer true."""
    refused = {"reason": "FailedCreate", "message": "exceeded quota", "lastTimestamp": "2026-11-23T10:00:05Z"}
    first = pod(0)
    first["metadata"]["creationTimestamp"] = "2026-11-23T10:00:05Z"
    job = of(trainjob(), first, events=[refused])
    assert (job.state, job.message) == (JobState.INADMISSIBLE, "1 of 2 pods exist: exceeded quota")
    first["metadata"]["creationTimestamp"] = "2026-11-23T10:00:06Z"
    assert of(trainjob(), first, events=[refused]).message == "1 of 2 pods exist"


def test_a_runtime_may_name_the_job_that_trains() -> None:
    """The pods of such a job count: otherwise it would be Suspended while they run."""
    other, fetches = pod(0), pod(1)
    other["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] = "trainer"
    fetches["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] = "data"
    fetches["spec"]["containers"][0]["name"] = "dataset-initializer"
    assert of(trainjob(suspend=True), other).state is JobState.SUSPENDING
    alone = of(trainjob(trainer={"numNodes": 1}), other, fetches)
    assert (alone.state, [one.name for one in alone.pods]) == (JobState.RUNNING, ["tiny-node-0"])


@pytest.mark.parametrize(
    ("refers_to", "shown"), [("tiny-90s", "torch"), ("torch", "torch"), ("tiny-60s", "tiny-60s"), ("own", "own")]
)
def test_the_runtime_is_the_one_that_was_submitted(refers_to: str, shown: str) -> None:
    """The TrainJob refers to a copy of it, if the job has a grace period of its own."""
    job = trainjob(runtimeRef={"name": refers_to, "kind": "TrainingRuntime"})
    job["metadata"]["annotations"][RECORD] = replace(SPEC, runtime="torch", grace_s=90).to_record()
    assert (of(job).runtime, of(job).runtime_of_pods) == (shown, refers_to)
    del job["metadata"]["annotations"][RECORD]
    assert of(job).runtime == refers_to


@pytest.mark.parametrize(
    ("real", "says"), [(30, "longer than 30 s is lost"), (120, "the rest is not used"), (90, "")]
)
def test_pods_with_another_grace_period_are_a_warning(real: int, says: str) -> None:
    """A webhook may have changed them, or the runtime was changed after the submission."""
    job = trainjob()
    job["spec"]["trainer"]["env"].append({"name": "SAFEPOINT_GRACE", "value": "90"})
    pods = [pod(0), pod(1)]
    pods[1]["spec"]["terminationGracePeriodSeconds"] = real
    found = of(job, *pods)
    assert (found.grace_s, bool(found.warning)) == (90, bool(says))
    assert says in found.warning
    assert found.particulars["warning"] == found.warning


TEN, ELEVEN = "2026-11-23T10:30:00Z", "2026-11-23T11:00:00Z"


def at_time(job: dict[str, Any], time: str) -> dict[str, Any]:
    """The same object, whose last condition has changed at this time."""
    job["status"]["conditions"][-1]["lastTransitionTime"] = time
    return job


def test_when_a_job_has_ended_or_was_preempted_is_when_it_has_changed() -> None:
    """According to the condition that says so; the time of other changes is not known."""
    failed = of(at_time(condition(trainjob(), "Failed"), ELEVEN))
    assert (failed.changed, failed.particulars["changed"]) == (ELEVEN, ELEVEN)
    preempted = at_time(
        workload(("QuotaReserved", "False", "Pending", ""), ("Evicted", "True", "Preempted", "")), TEN
    )
    job = of(trainjob(suspend=True), workload=preempted)
    assert (job.state, job.changed) == (JobState.PREEMPTED, TEN)
    assert (of(condition(trainjob(), "Complete")).changed, of(trainjob(), pod(0), pod(1)).changed) == (None, None)


def test_the_time_in_a_queue_is_no_part_of_an_attempt() -> None:
    """The attempt began when the queue admitted the job, unless the queue has taken the quota back since."""
    admitted = at_time(workload(("Admitted", "True", "", "")), TEN)
    assert [one.started for one in of(trainjob(), workload=admitted).attempts] == [TEN]
    again = at_time(workload(("Evicted", "False", "Preempted", ""), ("Admitted", "True", "", "")), TEN)
    assert [one.started for one in of(trainjob(), workload=again).attempts] == ["2026-11-23T10:00:00Z"]


def test_devices_and_priority() -> None:
    """From the TrainJob or else from its pods; the runtime may decide about ranks in words."""
    job = trainjob()
    job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
    job["spec"]["trainer"] |= {
        "numProcPerNode": "auto",
        "resourcesPerNode": {"requests": {"cpu": "2500m"}, "limits": {"nvidia.com/gpu": 2, "memory": "8Gi"}},
    }
    found = of(job, pod(0), pod(1))
    assert (found.ranks_per_node, found.gpu_per_node, found.cpu_per_node) == (None, 2, 3)
    assert (found.priority_class, found.particulars["priority_class"]) == ("high", "high")
    assert of(trainjob(trainer={"numProcPerNode": 2})).ranks_per_node == 2
    of_runtime = pod(0)
    of_runtime["spec"]["containers"][0]["resources"] = {"limits": {"amd.com/gpu": "8", "cpu": "9e99"}}
    from_pods = of(trainjob(), of_runtime)
    assert (from_pods.gpu_per_node, from_pods.cpu_per_node) == (8, None)
    assert (of(trainjob(), pod(0)).gpu_per_node, of(trainjob()).cpu_per_node) == (None, None)


def test_what_a_page_shows_of_a_pod() -> None:
    """Where it runs, how often it restarted, and why it does not run."""
    first = pod(0, {"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=3)
    first["spec"] |= {"nodeName": "worker-7"}
    first["spec"]["containers"][0]["resources"] = {"limits": {"memory": "8Gi"}}
    leaving = pod(1)
    leaving["metadata"]["deletionTimestamp"] = TEN
    ended = pod(2, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    shown = of(trainjob(trainer={"numNodes": 4}), first, leaving, ended, pod(3)).pods
    assert (shown[0].machine, shown[0].restarts, shown[0].memory) == ("worker-7", 3, "8Gi")
    assert [one.reason for one in shown] == ["CrashLoopBackOff", "is being deleted", "out of memory (OOMKilled)", ""]


def test_only_a_job_of_ours_that_has_not_ended_can_be_scaled() -> None:
    """Another job may not resume, and one that has ended is submitted again."""
    other = trainjob()
    other["metadata"]["annotations"] = None
    assert (of(trainjob()).can_scale, of(other).can_scale) == (True, False)
    assert not of(condition(trainjob(), "Failed")).can_scale


def test_the_options_of_its_run_are_those_that_were_submitted() -> None:
    """With the grace period that the pods have; invalid ones count as not known."""
    assert of(trainjob()).settings == RunSettings(output_dir="pvc://c/run", grace_s=RunSettings().grace_s)
    job = trainjob()
    record = json.loads(job["metadata"]["annotations"][RECORD])
    record["settings"]["SAFEPOINT_SAVE_STEPS"] = "often"
    job["metadata"]["annotations"][RECORD] = json.dumps(record)
    assert of(job).settings == RunSettings(grace_s=RunSettings().grace_s)
