"""Commands that are killed after each of their requests: the next command goes on, and no object is left over."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import killed
from tests.support.cluster.plans import plan_for
from tests.support.cluster.workspace import CLAIM, RUNTIME, Workspace, apply, queue_objects
from tests.support.commands import Outcome, safepoint
from tests.support.patience import PATIENCE

_SIGKILL = -9
_KUEUE = "kueue.x-k8s.io/v1beta1"


class Command:
    """A command with its options.

    Args:
        team: where it runs.
        name: its name.
        words: its arguments.
    """

    def __init__(self, team: Workspace, name: str, *words: str) -> None:
        self.team, self.words = team, [name, "--on", ".", "--namespace", team.namespace, *words]

    def run(self) -> Outcome:
        """Run it to its end."""
        return safepoint(*self.words)

    def requests(self, log: Path, *fatal: str) -> int:
        """Run it in a process that a request kills; returns the exit code. `log` receives the requests."""
        command = [sys.executable, "-P", killed.__file__, str(log), *fatal, "--", *self.words]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=200)
        assert done.returncode in {0, _SIGKILL} or fatal, done.stderr
        return done.returncode

    def points(self, log: Path) -> Iterator[tuple[str, str, str]]:
        """After each request once; looking is repeated while a command waits, so of each kind once."""
        log.unlink(missing_ok=True)
        assert self.requests(log) == 0
        times: Counter[str] = Counter()
        for line in log.read_text().splitlines():
            times[line] += 1
            method, path = line.split()
            if method != "GET" or times[line] == 1:
                yield method, path, str(times[line])


# ---- what is left ----------------------------------------------------------------------------------------------


def submission(team: Workspace, script: Path, name: str = "a", nodes: int = 1) -> Command:
    """A job whose pods never start: the node has no such image. What is tested is in the cluster, not in the pods."""
    script.write_text("print('never')\n")
    options = (
        "--name",
        name,
        "--nnodes",
        str(nodes),
        "--image",
        "none.example/none:1",
        "--output-dir",
        f"pvc://{CLAIM}/a",
    )
    return Command(team, "submit", *options, str(script))


def objects_of(team: Workspace) -> dict[str, str]:
    """The owner of each object that Safepoint made, by name."""
    found = team.get("trainjobs,configmaps,secrets,trainingruntimes")["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}": " ".join(
            one["uid"] for one in item["metadata"].get("ownerReferences", [])
        )
        for item in found
        if any(label.startswith("safepoint.dev/") for label in item["metadata"].get("labels", {}))  # not Trainer's
    }


def assert_whole(team: Workspace, name: str = "a") -> None:
    """The job is there with what was made for it, which belongs to it, and there is nothing else."""
    job = team.get("trainjob", name)
    objects = objects_of(team)
    assert objects.pop(f"TrainJob/{name}") == ""
    assert sum(key.startswith("ConfigMap/") for key in objects) == 1, objects
    assert set(objects.values()) == {job["metadata"]["uid"]}, objects


def assert_gone(team: Workspace) -> None:
    """Kubernetes deletes what belonged to a job some seconds later."""
    deadline_s = time.monotonic() + 30 * PATIENCE
    while objects_of(team) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert objects_of(team) == {}


def plans(team: Workspace) -> list[str]:
    """The TrainJobs that keep a plan of `scale`."""
    found = team.get("trainjobs", "", "-l", "safepoint.dev/successor-of")["items"]
    return [item["metadata"]["name"] for item in found]


def release(team: Workspace) -> None:
    """End the lease of the killed `scale`, which would end by itself half a minute later."""
    for plan in plans(team):
        team.kubectl("annotate", "trainjob", plan, "safepoint.dev/lease-")


def until(is_so: object, seconds: float = 60) -> None:
    deadline_s = time.monotonic() + seconds * PATIENCE
    assert callable(is_so)
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.5)


# ---- tests -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_submit(team: Workspace, tmp_path: Path) -> None:
    """The same command again finishes what the first one began, or says that the job is there."""
    submit, log = submission(team, tmp_path / "train.py", nodes=2), tmp_path / "log"
    delete = Command(team, "delete", "a")
    for point in list(submit.points(log)):
        assert delete.run().code == 0
        assert_gone(team)
        code = submit.requests(log, *point)
        assert code == _SIGKILL, point
        again = submit.run()
        assert again.code == 0 or "there is a job a" in again.stderr, again.stderr
        assert_whole(team)


@pytest.mark.timeout(900)
def test_delete_after_a_submit_that_was_killed(team: Workspace, tmp_path: Path) -> None:
    """What was made for the job goes with it, also if it has no owner yet. Before there is a job, nothing is deleted:
    another `submit` may just have made the objects."""
    submit, log = submission(team, tmp_path / "train.py", nodes=2), tmp_path / "log"
    delete = Command(team, "delete", "a")
    for point in list(submit.points(log)):
        assert delete.run().code == 0
        assert_gone(team)
        assert submit.requests(log, *point) == _SIGKILL, point
        done = delete.run()
        if done.code != 0:
            assert "there is no job a" in done.stderr, (point, done.stderr)
            assert submit.run().code == 0, point
            assert_whole(team)
            continue
        assert_gone(team)
        assert submit.run().code == 0, point


@pytest.mark.timeout(900)
def test_suspend_and_resume(team: Workspace, tmp_path: Path) -> None:
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    suspend, resume = Command(team, "suspend", "a"), Command(team, "resume", "a")
    assert submit.run().code == 0
    suspensions = list(suspend.points(log))
    resumptions = list(resume.points(log))
    for one, other in itertools.zip_longest(suspensions, resumptions):
        if one is not None:
            suspend.requests(log, *one)
        done = suspend.run()
        assert done.code == 0, (one, done.stderr)
        assert team.get("trainjob", "a")["spec"]["suspend"] is True
        if other is not None:
            resume.requests(log, *other)
        done = resume.run()
        assert done.code == 0 or "not suspended" in done.stderr, (other, done.stderr)
        assert team.get("trainjob", "a")["spec"].get("suspend", False) is False
        assert_whole(team)


@pytest.mark.timeout(1500)
def test_scale(team: Workspace, tmp_path: Path) -> None:
    """Up and down in turn. Each of the commands that look at the job finishes the change."""
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    assert submit.run().code == 0
    created = team.get("trainjob", "a")["metadata"]["creationTimestamp"]
    up, down = (Command(team, "scale", "a", "--nnodes", str(nodes)) for nodes in (2, 1))
    points = list(dict.fromkeys([*up.points(log), *down.points(log)]))
    nodes = 1
    finishers = itertools.cycle(
        [Command(team, "status", "a"), Command(team, "list"), down, submit, Command(team, "resume", "a")]
    )
    for point in points:
        command, wanted = (up, 2) if nodes == 1 else (down, 1)
        code = command.requests(log, *point)
        if plans(team):
            release(team)
            finisher = next(finishers)
            finisher = command if finisher is down else finisher

            def is_finished(finisher: Command = finisher) -> bool:
                finisher.run()
                return not plans(team)

            until(is_finished)
            nodes = wanted
        else:  # it was killed before the change was written down, or after its end
            nodes = team.get("trainjob", "a")["spec"]["trainer"]["numNodes"]
        job = team.get("trainjob", "a")
        assert job["spec"]["trainer"]["numNodes"] == nodes, (point, code)
        assert job["metadata"]["annotations"]["safepoint.dev/created"] == created
        assert job["spec"].get("suspend", False) is False, point
        assert_whole(team)


@pytest.mark.timeout(300)
def test_a_successor_that_is_refused(team: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other jobs are listed, and the change is finished when the cluster allows it."""
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    other = submission(team, tmp_path / "train.py", name="b")
    scale, list_, status = (
        Command(team, *words) for words in (("scale", "a", "--nnodes", "2"), ("list",), ("status", "a"))
    )
    assert (submit.run().code, other.run().code) == (0, 0)
    job = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs/a"
    assert scale.requests(log, "DELETE", job, "1") == _SIGKILL
    release(team)
    team.kubectl("create", "quota", "none", "--hard=count/trainjobs.trainer.kubeflow.org=0")
    until(lambda: "used" in team.get("quota", "none")["status"])
    done = list_.run()
    until(lambda: list_.run().code == 0 and "a quota of the namespace is used up" in caplog.text)
    assert done.code == 0
    assert "\nb " in done.stdout
    caplog.clear()
    assert status.run().code == 0
    assert "a quota of the namespace is used up" in caplog.text
    team.kubectl("delete", "quota", "none")
    until(lambda: status.run().code == 0 and not plans(team))
    assert team.get("trainjob", "a")["spec"]["trainer"]["numNodes"] == 2


@pytest.mark.timeout(900)
def test_delete(team: Workspace, tmp_path: Path) -> None:
    submit, log = submission(team, tmp_path / "train.py", nodes=2), tmp_path / "log"
    delete = Command(team, "delete", "a")
    assert submit.run().code == 0
    for point in list(delete.points(log)):
        assert_gone(team)
        assert submit.run().code == 0
        delete.requests(log, *point)
        done = delete.run()
        assert done.code == 0 or "there is no job a" in done.stderr, (point, done.stderr)
        assert_gone(team)


@pytest.mark.timeout(300)
def test_a_deleted_job_has_no_successor(team: Workspace, tmp_path: Path) -> None:
    """`scale` was killed, and the job is deleted instead."""
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    scale, delete = Command(team, "scale", "a", "--nnodes", "2"), Command(team, "delete", "a")
    job = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs/a"
    for method in ("PATCH", "DELETE"):
        assert submit.run().code == 0
        assert scale.requests(log, method, job, "1") == _SIGKILL
        done = delete.run()
        assert done.code == 0, done.stderr
        assert_gone(team)
    assert team.left_at_last() == []


@pytest.mark.timeout(300)
def test_the_plan_of_a_change_is_no_job(team: Workspace, tmp_path: Path) -> None:
    """It runs nothing, is not listed, cannot be deleted by name, and leaves nothing.

    When the lease of the killed command is over, `list` continues the change.
    """
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    scale = Command(team, "scale", "a", "--nnodes", "2")
    assert submit.run().code == 0
    jobs = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs"
    assert scale.requests(log, "POST", jobs, "1") == _SIGKILL
    [plan] = team.get("trainjobs", "", "-l", "safepoint.dev/successor-of=a")["items"]
    name = plan["metadata"]["name"]
    until(lambda: f"jobset.jobset.x-k8s.io/{name}" in team.left())
    pods = [pod["metadata"]["name"] for pod in team.get("pods")["items"]]
    assert not any(pod.startswith(name) for pod in pods), pods
    for word in ("status", "delete", "suspend", "resume"):
        done = Command(team, word, name).run()
        assert "there is no job" in done.stderr, done
    until(lambda: Command(team, "list", "--json").run().code == 0 and not plans(team))
    [listed] = json.loads(Command(team, "list", "--json").run().stdout)
    assert (listed["name"], listed["num_nodes"]) == ("a", 2)
    assert Command(team, "delete", "a").run().code == 0
    assert team.left_at_last() == []


@pytest.mark.timeout(300)
def test_the_plan_of_a_change_stays_out_of_the_default_queue(team: Workspace, tmp_path: Path) -> None:
    """Kueue puts TrainJobs without the name of a queue into the queue `default`, and starts them. A helper is put
    there, too, and runs."""
    apply(team.cluster, queue_objects(team.namespace, cpu="4"))
    spec = {"clusterQueue": team.namespace}
    metadata = {"name": "default", "namespace": team.namespace}
    apply(team.cluster, [{"apiVersion": _KUEUE, "kind": "LocalQueue", "metadata": metadata, "spec": spec}])
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    scale = Command(team, "scale", "a", "--nnodes", "2")
    assert submit.run().code == 0
    label = "kueue.x-k8s.io/queue-name"
    until(lambda: team.get("trainjob", "a")["metadata"]["labels"].get(label) == "default")
    jobs = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs"
    assert scale.requests(log, "POST", jobs, "1") == _SIGKILL
    [plan] = plans(team)
    time.sleep(10)  # Kueue would have admitted it
    assert team.get("trainjob", plan)["spec"]["suspend"] is True
    assert not any(pod["metadata"]["name"].startswith(plan) for pod in team.get("pods")["items"])
    listed = safepoint("checkpoints", "list", "--on", ".", "--namespace", team.namespace, f"pvc://{CLAIM}/a")
    assert "in queue" not in listed.stderr
    until(lambda: scale.run().code == 0 and not plans(team))
    assert team.get("trainjob", "a")["spec"]["trainer"]["numNodes"] == 2
    assert Command(team, "delete", "a").run().code == 0
    assert team.left_at_last() == []


@pytest.mark.timeout(300)
def test_a_plan_that_another_person_changes(
    team: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer lets this person replace the whole `spec.trainer`. The plan is carried out only as it was written."""
    submit, log = submission(team, tmp_path / "train.py"), tmp_path / "log"
    scale, list_ = Command(team, "scale", "a", "--nnodes", "2"), Command(team, "list")
    assert submit.run().code == 0
    job = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs/a"
    assert scale.requests(log, "DELETE", job, "1") == _SIGKILL
    release(team)
    until(lambda: "trainjob.trainer.kubeflow.org/a" not in team.left())
    [plan] = plans(team)
    content = team.get("trainjob", plan)["metadata"]["annotations"]["safepoint.dev/succession"]

    def patch(change: object) -> None:
        team.kubectl("patch", "trainjob", plan, "--type", "merge", "-p", json.dumps(change))

    evil = content.replace("none.example/none:1", "evil.example/evil:1")
    assert evil != content
    patch({"spec": {"trainer": None}})
    patch({"spec": {"trainer": {"numNodes": 1, "image": "evil.example/evil:1"}}})
    patch({"metadata": {"annotations": {"safepoint.dev/succession": evil}}})
    assert list_.run().code == 0
    assert "there is no job a" in Command(team, "status", "a").run().stderr
    assert f"kubectl delete trainjob {plan}" in caplog.text
    assert [item["metadata"]["name"] for item in team.get("trainjobs")["items"]] == [plan]
    patch({"metadata": {"annotations": {"safepoint.dev/succession": content}}})
    until(lambda: list_.run().code == 0 and not plans(team))
    trainer = team.get("trainjob", "a")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (2, "none.example/none:1")
    assert_whole(team)


@pytest.mark.timeout(120)
def test_a_config_map_is_no_plan(team: Workspace) -> None:
    """Its writer may create no TrainJobs, and the user who lists the jobs may."""
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "planted", "namespace": team.namespace},
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": {"numNodes": 1, "command": ["true"]}},
    }
    plan = plan_for(job, job="planted", old_uid="gone")
    for name in ("planted-successor", plan["metadata"]["name"]):
        metadata = {
            "name": name,
            "namespace": team.namespace,
            "labels": plan["metadata"]["labels"],
            "annotations": plan["metadata"]["annotations"],
        }
        apply(team.cluster, [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}])
    assert Command(team, "list").run().code == 0
    assert "there is no job planted" in Command(team, "status", "planted").run().stderr
    assert team.get("trainjobs")["items"] == []
