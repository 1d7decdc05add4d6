"""Process images of pods: while the job runs on, and as a suspension that another pod continues, bit for bit."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import ExitCode
from safepoint.sdk import TrainerClient
from safepoint.sdk.upstream import KubernetesBackendConfig
from tests.cluster.test_life import ON, status, submit, trains_at, wait
from tests.support import criu
from tests.support.cluster.workspace import CLAIM, QUEUE, RUNTIME, Workspace, apply, queue_objects, with_criu
from tests.support.commands import Outcome, safepoint
from tests.support.equality import assert_same_run
from tests.support.jobs import TINY, read_events

_UNAVAILABLE = criu.unavailable()
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(_UNAVAILABLE is not None, reason=f"no pod was frozen: {_UNAVAILABLE}"),
]
EPOCHS = 6
OUT = "/mnt/kubeflow-checkpoints/tiny"
PROGRAM = ("--out", OUT, "--epochs", str(EPOCHS), "--step-ms", "250")
ONE_POD = ("--cpu", "1", "--memory", "4Gi")


def freeze(team: Workspace, *options: str) -> Outcome:
    return safepoint("freeze", *ON, team.namespace, "--json", "tiny", *options)


def uid_of_pod(team: Workspace) -> str:
    [pod] = team.get("pods")["items"]
    return pod["metadata"]["uid"]


def has_thawed(team: Workspace, times: int) -> Callable[[object], bool]:
    """Whether the processes were restored so often."""
    return lambda _: len(read_events(team.folder / "tiny", "thawed")) == times


def assert_complete_and_equal(team: Workspace, undisturbed: Callable[[int, int], Path]) -> None:
    """The job ends as one that was never frozen, and was never resumed from a checkpoint."""
    wait(team, "tiny", lambda job: job["state"] == "Complete", 300)
    assert read_events(team.folder / "tiny", "resumed") == []
    assert_same_run(team.folder / "tiny", undisturbed(1, EPOCHS))
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left_at_last() == []


def test_a_pod_is_frozen_while_it_runs_on(team: Workspace, undisturbed: Callable[[int, int], Path]) -> None:
    """The image is in the claim, complete, and was read in the pod. The training is not disturbed."""
    with_criu(team)
    submit(team, "tiny", "--freeze-as-last-resort", *ONE_POD, program=PROGRAM)
    wait(team, "tiny", trains_at(4))
    pod = uid_of_pod(team)
    done = freeze(team, "--leave-running")
    assert done.code == 0, done.stderr
    assert done.document["path"] == f"pvc://{CLAIM}/tiny/images/image-1"
    assert done.document["is_running"] is True
    verified = safepoint("images", "verify", "--deep", "--json", str(team.folder / "tiny" / "images"))
    assert verified.code == 0, verified.stdout + verified.stderr
    step = wait(team, "tiny", trains_at(1))["progress"]["step"]
    wait(team, "tiny", trains_at(step + 2))
    assert uid_of_pod(team) == pod
    assert_complete_and_equal(team, undisturbed)


@pytest.mark.parametrize("in_queue", [False, True])
def test_a_job_is_suspended_by_an_image_and_goes_on_in_another_pod(
    in_queue: bool, team: Workspace, undisturbed: Callable[[int, int], Path]
) -> None:
    """In the middle of its training: no checkpoint is read. It can be frozen in the second pod, too."""
    with_criu(team)
    options = ONE_POD
    if in_queue:
        apply(team.cluster, queue_objects(team.namespace, cpu="1"))
        options += ("--queue", QUEUE)
    submit(team, "tiny", "--freeze-as-last-resort", *options, program=PROGRAM)
    wait(team, "tiny", trains_at(4))
    pods = {uid_of_pod(team)}
    for number in (1, 2):
        done = freeze(team)
        assert done.code == 0, done.stderr
        assert done.document["job"]["state"] == "Suspended", json.dumps(done.document, indent=1)
        assert done.document["name"] == f"image-{number}"
        phases = [pod["status"]["phase"] for pod in team.get("pods")["items"]]
        assert set(phases) <= {"Succeeded", "Failed"}, phases  # it has ended, and is about to be deleted
        if in_queue:
            [workload] = team.get("workloads.kueue.x-k8s.io")["items"]
            assert workload["spec"]["active"] is False

        assert done.document["job"]["image"] == done.document["path"]
        command = ("resume", "thaw")[number - 1]
        assert safepoint(command, *ON, team.namespace, "tiny").code == 0
        wait(team, "tiny", has_thawed(team, number), 180)
        pods.add(uid_of_pod(team))
        wait(team, "tiny", lambda job: job["state"] == "Running")
    assert len(pods) == 3
    assert_complete_and_equal(team, undisturbed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Kubeflow's client is never closed
def test_a_pod_with_a_group_is_frozen_and_thawed_by_the_client(
    team: Workspace, undisturbed: Callable[[int, int], Path]
) -> None:
    """The key of its images has mode 0440 in a pod with an `fsGroup`. Before that, a command that is interrupted
    leaves nothing frozen."""
    with_criu(team, securityContext={"fsGroup": 4321})
    found = safepoint("doctor", *ON, team.namespace, "--json").document["findings"]
    [images] = [one for one in found if one["check"] == "process images"]
    assert f"possible with runtime {RUNTIME}" in images["found"], images
    submit(team, "tiny", "--freeze-as-last-resort", *ONE_POD, program=PROGRAM)
    wait(team, "tiny", trains_at(4))
    command = [
        sys.executable,
        "-m",
        "safepoint.cli.main",
        "freeze",
        *ON,
        team.namespace,
        "--leave-running",
        "tiny",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as interrupted:
        time.sleep(3)  # it has connected to the pod, or is about to
        interrupted.send_signal(signal.SIGTERM)
        _, errors = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 143, errors
    assert "interrupted by SIGTERM: the job runs on" in errors
    step = wait(team, "tiny", trains_at(1))["progress"]["step"]
    wait(team, "tiny", trains_at(step + 2))
    client = TrainerClient(
        KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))
    )
    frozen = client.freeze_job("tiny")
    assert frozen.status == "Suspended"
    assert frozen.image is not None
    assert frozen.image.startswith(f"pvc://{CLAIM}/tiny/images/image-")
    assert status(team, "tiny")["process_image"]["is_newest"] is True
    client.thaw_job("tiny")
    wait(team, "tiny", has_thawed(team, 1), 180)
    assert_complete_and_equal(team, undisturbed)


def test_an_image_with_the_address_of_its_pod_is_not_restored(
    team: Workspace, undisturbed: Callable[[int, int], Path]
) -> None:
    """As the connections of several pods have. CRIU cannot use an address that another pod had, and the job goes on
    from its newest checkpoint. Its end is the same."""
    with_criu(team)
    options = ("--freeze-as-last-resort", "--save-steps", "2", "--env", "GLOO_SOCKET_IFNAME=eth0", *ONE_POD)
    submit(team, "tiny", *options, program=PROGRAM)
    wait(team, "tiny", trains_at(4))
    done = freeze(team)
    assert done.code == 0, done.stderr
    step = max(team.steps("tiny"))
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    wait(team, "tiny", lambda _: bool(read_events(team.folder / "tiny", "resumed")), 180)
    logs = safepoint("logs", *ON, team.namespace, "tiny").stdout
    assert "a process used a network address that this machine or pod does not have" in logs, logs
    wait(team, "tiny", lambda job: job["state"] == "Complete", 300)
    assert read_events(team.folder / "tiny", "thawed") == []
    assert [event["step"] for event in read_events(team.folder / "tiny", "resumed")] == [step]
    assert_same_run(team.folder / "tiny", undisturbed(1, EPOCHS))


def test_a_pod_that_cannot_save_is_frozen_at_its_deadline(
    team: Workspace, undisturbed: Callable[[int, int], Path]
) -> None:
    """A step that lasts longer than the grace period: `suspend` leaves an image, and `resume` continues this step."""
    with_criu(team)
    late = ("--out", OUT, "--epochs", str(EPOCHS), "--slow-from", "4", "--step-ms", "60000", "--hurry", f"{OUT}/go")
    submit(team, "tiny", "--freeze-as-last-resort", "--grace", "30", *ONE_POD, program=late)
    wait(team, "tiny", trains_at(4))
    done = safepoint("suspend", *ON, team.namespace, "--json", "tiny")
    assert done.code == 0, done.stdout + done.stderr
    image = f"pvc://{CLAIM}/tiny/images/image-1"
    assert (done.document["state"], done.document["image"]) == ("Suspended", image), done.document
    assert team.steps("tiny") == []
    (team.folder / "tiny" / "go").touch()
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    wait(team, "tiny", has_thawed(team, 1), 180)
    # The request to stop is still valid in the restored processes: they save when their step has ended.
    wait(team, "tiny", lambda job: job["state"] == "Complete", 300)
    assert read_events(team.folder / "tiny", "thawed")
    assert [event["step"] for event in read_events(team.folder / "tiny", "resumed")] == [5]
    assert_same_run(team.folder / "tiny", undisturbed(1, EPOCHS))


def test_several_pods_are_refused(team: Workspace) -> None:
    """Before anything is created."""
    output = ("--output-dir", f"pvc://{CLAIM}/tiny")
    done = safepoint(
        "submit",
        *ON,
        team.namespace,
        *output,
        "--nnodes",
        "2",
        "--freeze-as-last-resort",
        "--code",
        str(TINY.parent),
        "tiny.py",
    )
    assert done.code == ExitCode.NOT_SUPPORTED, done.stdout
    assert "restored pods have new addresses" in done.stderr
    assert team.left() == []
