"""What is wrong with a command is said before anything happens: the value, what was done, what to do.

The objects of the namespace are the same before and after each of them.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ExitCode
from tests.support.cluster.running import RunningCluster
from tests.support.cluster.workspace import (
    CLAIM,
    QUEUE,
    RUNTIME,
    Workspace,
    apply,
    queue_objects,
    runtime,
    storage,
    workspace,
)
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE

_KINDS = (
    "trainjobs,trainingruntimes,jobsets,jobs,pods,services,configmaps,secrets,persistentvolumeclaims,"
    "workloads.kueue.x-k8s.io,localqueues,serviceaccounts,rolebindings"
)
_SCRIPT = "train.py"
_USAGE, _NOT_FOUND, _CONFLICT = ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.CONFLICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One invalid command.

    Args:
        words: the command; `submit` with these options if it begins with an option.
        code: its exit code.
        says: parts of the message, among them the value.
        fix: a part of what it says to do.
        prepare: changes the current folder, or returns a kubeconfig.
    """

    words: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    fix: str
    prepare: Callable[[Path, RunningCluster], Path | None] = lambda folder, cluster: None


def _bad(words: str | tuple[str, ...], code: int, says: str | tuple[str, ...], fix: str, **more: Any) -> Bad:
    return Bad(
        words=tuple(words.split()) if isinstance(words, str) else words,
        code=code,
        says=(says,) if isinstance(says, str) else says,
        fix=fix,
        **more,
    )


# ---- what is prepared ------------------------------------------------------------------------------------------


def _script(name: str) -> Callable[[Path, RunningCluster], None]:
    return lambda folder, _: (folder / name).write_text("print()\n") and None


def _link(folder: Path, _: RunningCluster) -> None:
    (folder / "code").mkdir()
    (folder / "code" / _SCRIPT).write_text("print()\n")
    (folder / "code" / "hosts").symlink_to("/etc/hosts")


def _kubeconfig(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, RunningCluster], Path]:
    """The kubeconfig of the cluster with a change."""

    def prepare(folder: Path, cluster: RunningCluster) -> Path:
        document = json.loads(cluster.kubeconfig.read_text())
        change(document)
        return _written(folder, json.dumps(document))

    return prepare


def _written(folder: Path, text: str) -> Path:
    place = folder / "kubeconfig"
    place.write_text(text)
    return place


def _cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["clusters"][0]["cluster"]


def _with_program(document: dict[str, Any]) -> None:
    program = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "no-such-program"}
    document["users"][0]["user"] = {"exec": program}


def _without_users(document: dict[str, Any]) -> None:
    document["users"] = []


_LONG = "a" * 49
_TWO = ("--nnodes", "2")
_SINGLE, _READ_ONLY, _UNBOUND = "single", "read-only", "unbound"
_CASES = {
    # names
    "name with capitals": _bad("--name Tiny", _USAGE, "'Tiny' is invalid", "lower case"),
    "name with underscore": _bad("--name my_job", _USAGE, "'my_job' is invalid", "lower case"),
    "name that is empty": _bad("--name=", _USAGE, "'' is invalid", "lower case"),
    "name that is a path": _bad("--name ../secrets/x", _USAGE, "'../secrets/x' is invalid", "lower case"),
    "name with a dash at the end": _bad("--name a-", _USAGE, "'a-' is invalid", "beginning and ending"),
    "name of 64 characters": _bad(("--name", "a" * 64), _USAGE, "is invalid", "63"),
    "name too long for pods": _bad(("--name", _LONG), _USAGE, "is too long", "at most 48 characters"),
    "name with a digit first": _bad("--name 1st", _USAGE, "'1st' begins with a digit", "letter"),
    "name that exists": _bad("--name taken", _CONFLICT, ("there is a job taken", "nothing was"), "another name"),
    # quantities
    "memory with another unit": _bad("--memory 32GX", _USAGE, "memory '32GX' is not a quantity", "32Gi"),
    "memory in GB": _bad("--memory 32GB", _USAGE, "memory '32GB' is not a quantity", "32Gi"),
    "memory below zero": _bad("--memory=-1Gi", _USAGE, "memory '-1Gi' is not a quantity", "32Gi"),
    "memory of zero": _bad("--memory 0", _USAGE, "memory '0' is zero", "ask for more"),
    "memory without unit": _bad("--memory 512", _USAGE, "memory '512' is too little", "unit"),
    "memory in thousandths": _bad("--memory 512m", _USAGE, "memory '512m' is too little", "unit"),
    "cpu below zero": _bad("--cpu=-1", _USAGE, "--cpu", "--help"),
    "half a gpu": _bad("--gpu 0.5", _USAGE, "--gpu", "--help"),
    "no node": _bad("--nnodes 0", _USAGE, "number of nodes is 0", "at least 1"),
    "nodes in words": _bad("--nnodes two", _USAGE, "--nnodes", "--help"),
    "no rank": _bad("--nproc-per-node 0", _USAGE, "--nproc-per-node '0'", "positive number"),
    # output locations and claims
    "no such claim": _bad(
        "--output-dir pvc://none/x", _NOT_FOUND, ("no claim none", "nothing was"), "kubectl get pvc"
    ),
    "claim without name": _bad("--output-dir pvc:///x", _USAGE, "'pvc:///x' names no claim", "pvc://<claim>/<path>"),
    "claim of one node": _bad(
        (*_TWO, "--output-dir", f"pvc://{_SINGLE}/x"),
        _CONFLICT,
        (f"claim {_SINGLE} is", "nothing was"),
        "ReadWriteMany",
    ),
    "claim that is read-only": _bad(
        f"--output-dir pvc://{_READ_ONLY}/x", _CONFLICT, ("is ReadOnlyMany", "nothing was"), "ReadWriteMany"
    ),
    "claim without a volume": _bad(
        f"--output-dir pvc://{_UNBOUND}/x",
        _CONFLICT,
        (f"claim {_UNBOUND} is Pending, and gets no volume: ", "none-such", "nothing was"),
        f"kubectl describe pvc {_UNBOUND}",
    ),
    "path out of the claim": _bad(f"--output-dir pvc://{CLAIM}/../x", _USAGE, "`..` in its path", "in full"),
    "claim with a blank": _bad(("--output-dir", "pvc://a b/x"), _USAGE, "invalid claim name", "254 letters"),
    "claim with a user": _bad("--output-dir pvc://me@a/x", _USAGE, "user name", "pvc://<claim>/<path>"),
    "folder of each pod": _bad(
        (*_TWO, "--output-dir", "/tmp/x"), _USAGE, "/tmp/x would be a separate folder", "pvc://"
    ),
    "unknown scheme": _bad("--output-dir ftp://a/x", _USAGE, "unknown scheme 'ftp'", "s3://"),
    "scheme with one slash": _bad("--output-dir s3:/a/x", _USAGE, "two slashes", "s3://"),
    # connections
    "no such connection": _bad("--connection none", _NOT_FOUND, ("no Secret none", "nothing was"), "data connection"),
    "connection that is a path": _bad("--connection a/b", _USAGE, "'a/b' is not a valid name", "letters"),
    "connection without keys": _bad(
        "--connection empty", ExitCode.NOT_AUTHORISED, ("Secret empty", "has no keys"), "AWS_ACCESS_KEY_ID"
    ),
    # queues
    "no such queue": _bad("--queue none", _NOT_FOUND, ("no queue none", "nothing was"), f"use one of {QUEUE}"),
    "queue with a blank": _bad(("--queue", "a b"), _USAGE, "'a b' is not a valid name", "letters"),
    "priority without queue": _bad("--priority-class low", _USAGE, "--priority-class low has no effect", "--queue"),
    "no such priority": _bad(
        f"--queue {QUEUE} --priority-class none", _NOT_FOUND, ("no priority class none", "nothing was"), "low"
    ),
    # runtimes
    "no such runtime": _bad("--runtime none", _NOT_FOUND, ("no runtime 'none'", "nothing was"), RUNTIME),
    "runtime with a blank": _bad(("--runtime", "a b"), _USAGE, "'a b' is not a valid name", "letters"),
    "runtime that does not train": _bad(
        "--runtime odd", _USAGE, "odd has no replicated job that trains", "kubectl get"
    ),
    # images
    "image without name": _bad("--image=", _USAGE, "'' is not a valid name of an image", "REGISTRY/PATH:TAG"),
    "image with a blank": _bad(("--image", "a b"), _USAGE, "'a b' is not a valid name of an image", "REGISTRY"),
    "image with capitals": _bad("--image quay.io/Team/x:1", _USAGE, "'quay.io/Team/x:1'", "REGISTRY"),
    "image with two tags": _bad("--image a:1:2", _USAGE, "'a:1:2'", "REGISTRY"),
    # options that contradict each other, or are out of range
    "steps and epochs": _bad("--save-steps 5 --save-strategy epoch", _USAGE, "contradicts", "leave one of them out"),
    "time and steps": _bad("--save-every 10m --save-steps 5", _USAGE, "contradicts", "leave one of them out"),
    "scratch and resume": _bad("--from-scratch --resume a/b", _USAGE, "contradicts", "leave one of them out"),
    "unknown policy": _bad("--keep best", _USAGE, "--keep", "best=N:METRIC"),
    "port beyond the last": _bad("--metrics-port 70000", _USAGE, "--metrics-port 70000", "port number"),
    "rank without a pod": _bad("logs taken --rank 0", _NOT_FOUND, "has no pods", "deleted with them"),
    # grace
    "no grace": _bad("--grace 0", _USAGE, "--grace 0", "positive"),
    "grace below zero": _bad("--grace=-5", _USAGE, "--grace -5", "positive"),
    "grace that is no number": _bad("--grace nan", _USAGE, "--grace nan", "positive"),
    "grace below a second": _bad("--grace 0.4", _USAGE, "grace period of 0 s", "whole seconds"),
    "grace beyond a life": _bad("--grace 1e30", _USAGE, "grace period of 1", "whole seconds"),
    # env
    "env without a value": _bad("--env NAME", _USAGE, "--env 'NAME'", "NAME=VALUE"),
    "env with a digit first": _bad("--env 1A=b", _USAGE, "'1A' is not a valid variable name", "letters"),
    "env with a blank": _bad(("--env", "A B=c"), _USAGE, "'A B' is not a valid variable name", "letters"),
    "env with a key": _bad(
        "--env AWS_SECRET_ACCESS_KEY=x", _USAGE, ("AWS_SECRET_ACCESS_KEY", "nothing was"), "Secret"
    ),
    "env with a password": _bad(
        "--env PIP_INDEX_URL=https://kim:hunter2@index.example/simple",
        _USAGE,
        ("PIP_INDEX_URL has a user name or a password", "nothing was"),
        "add the key PIP_INDEX_URL with the whole address to a Secret",
    ),
    "env of the Trainer": _bad("--env PET_NNODES=3", _USAGE, ("PET_NNODES", "nothing was"), "leave out PET_NNODES"),
    # code
    "no such folder": _bad("--code none", _USAGE, ("--code none is not a folder", "nothing was"), "leave --code out"),
    "script instead of a folder": _bad(
        f"--code {_SCRIPT}", _USAGE, f"--code {_SCRIPT} is not a folder", "leave --code out"
    ),
    "script outside of the folder": _bad(
        "--code code",
        _USAGE,
        (f"no file {_SCRIPT} in --code code", "nothing was"),
        "path of the script",
        prepare=lambda folder, _: (folder / "code").mkdir(),
    ),
    "link out of the folder": _bad(
        "--code code", _USAGE, ("hosts is a link", "nothing was"), "replace", prepare=_link
    ),
    "no such script": _bad("submit none.py", _USAGE, "none.py cannot be read", "path"),
    "script with a blank": _bad(
        ("submit", "my train.py"),
        _USAGE,
        ("'my train.py'", "nothing was"),
        "rename it",
        prepare=_script("my train.py"),
    ),
    "script with our name": _bad(
        "submit safepoint.pyz",
        _USAGE,
        ("'safepoint.pyz'", "nothing was"),
        "rename it",
        prepare=_script("safepoint.pyz"),
    ),
    # namespaces and kubeconfigs
    "no such namespace": _bad(
        "--namespace none --output-dir s3://a/x",
        _NOT_FOUND,
        ("there is no namespace none", "nothing was"),
        "--namespace",
    ),
    "namespace with a blank": _bad(("--namespace", "a b"), _USAGE, "'a b' is not a valid name", "letters"),
    "namespace that is a path": _bad("--namespace ../x", _USAGE, "'../x' is not a valid name", "letters"),
    "no such context": _bad("--on none", _NOT_FOUND, "no context 'none'", "kubectl config get-contexts"),
    "no kubeconfig": _bad(
        "list", _NOT_FOUND, "there is no kubeconfig", "log in", prepare=lambda folder, _: folder / "none"
    ),
    "kubeconfig that is no YAML": _bad(
        "list", _USAGE, "is not valid YAML", "KUBECONFIG", prepare=lambda folder, _: _written(folder, "a: [")
    ),
    "kubeconfig that is a list": _bad(
        "list", _USAGE, "is not a kubeconfig", "KUBECONFIG", prepare=lambda folder, _: _written(folder, "[]")
    ),
    "kubeconfig without context": _bad(
        "list",
        _NOT_FOUND,
        "no current context",
        "kubectl config",
        prepare=_kubeconfig(lambda found: found.pop("current-context")),
    ),
    "kubeconfig without its user": _bad(
        "list", _USAGE, "context 'test'", "KUBECONFIG", prepare=_kubeconfig(_without_users)
    ),
    "kubeconfig with a wrong token": _bad(
        "list",
        ExitCode.NOT_AUTHORISED,
        "does not accept your login",
        "log in again",
        prepare=_kubeconfig(lambda found: found["users"][0].update(user={"token": "wrong"})),
    ),
    "kubeconfig with a missing program": _bad(
        "list", ExitCode.NOT_AUTHORISED, "token for test failed", "log in", prepare=_kubeconfig(_with_program)
    ),
    "kubeconfig with a missing certificate": _bad(
        "list",
        _USAGE,
        "none does not exist",
        "KUBECONFIG",
        prepare=_kubeconfig(
            lambda found: found["users"][0].update(user={"client-certificate": "none", "client-key": "none"})
        ),
    ),
    "kubeconfig with another authority": _bad(
        "list",
        ExitCode.STORAGE,
        "is not trusted",
        "certificate-authority",
        prepare=_kubeconfig(lambda found: _cluster_of(found).pop("certificate-authority-data")),
    ),
    "kubeconfig without encryption": _bad(
        "list",
        _USAGE,
        "encrypted",
        "the field `server`",
        prepare=_kubeconfig(lambda found: _cluster_of(found).update(server="http://10.88.0.99:80")),
    ),
    "kubeconfig of a server that is gone": _bad(
        "list",
        ExitCode.STORAGE,
        "cannot be reached",
        "check the network",
        prepare=_kubeconfig(lambda found: _cluster_of(found).update(server="https://127.0.0.1:1")),
    ),
    # jobs
    "status of no job": _bad("status none", _NOT_FOUND, ("no job none", "nothing was"), "safepoint list"),
    "suspend no job": _bad("suspend none", _NOT_FOUND, ("no job none", "nothing was"), "safepoint list"),
    "scale to nothing": _bad("scale taken --nnodes 0", _USAGE, "--nnodes", "--help"),
    "scale what is not ours": _bad(
        "scale taken --nnodes 2", _CONFLICT, ("did not submit job taken", "nothing was"), "suspend the job"
    ),
    "delete a path": _bad(
        "delete ../secrets/empty --yes", _USAGE, "'../secrets/empty' is not a valid name", "letters"
    ),
}


@pytest.fixture(scope="module")
def village(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A namespace for all cases, with a queue, a claim of one node, an empty Secret, an odd runtime and a job."""
    folder = tmp_path_factory.mktemp("village")
    with workspace(cluster, folder) as team:
        metadata = {"namespace": team.namespace}
        odd = {**runtime(), "kind": "TrainingRuntime", "metadata": {"name": "odd", **metadata}}
        job = odd["spec"]["template"]["spec"]["replicatedJobs"][0]
        job["name"] = "other"
        del job["template"]["metadata"]
        claims = storage(team.namespace, team.folder, _SINGLE)
        for item in claims:
            item["spec"]["accessModes"] = ["ReadWriteOnce"]
        read_only = storage(team.namespace, team.folder, _READ_ONLY)
        for item in read_only:
            item["spec"]["accessModes"] = ["ReadOnlyMany"]
        _, unbound = storage(team.namespace, team.folder, _UNBOUND)
        del unbound["spec"]["volumeName"]
        unbound["spec"]["storageClassName"] = "none-such"
        claims += [*read_only, unbound]
        reference = {"kind": "ClusterTrainingRuntime", "name": RUNTIME}
        taken = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": "taken", **metadata},
            "spec": {"runtimeRef": reference, "suspend": True},
        }
        empty = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "empty", **metadata}}
        apply(cluster, [*queue_objects(team.namespace, cpu="1"), *claims, odd, empty])
        apply(cluster, [taken])
        deadline_s = time.monotonic() + 60 * PATIENCE
        while "ProvisioningFailed" not in team.kubectl("get", "events"):  # the cluster looks at the claim
            assert time.monotonic() < deadline_s
            time.sleep(1)
        yield team


def _objects(team: Workspace) -> dict[str, Any]:
    """All objects of the namespace as the API server has them, without what controllers note about them."""
    found: dict[str, Any] = {}
    for item in team.get(_KINDS)["items"]:
        item.pop("status", None)
        for noted in ("resourceVersion", "managedFields", "generation", "annotations"):
            item["metadata"].pop(noted, None)
        found[f"{item['kind']}/{item['metadata']['name']}"] = item
    return found


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", _CASES)
def test_a_bad_input(name: str, village: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / _SCRIPT).write_text("print()\n")
    kubeconfig = case.prepare(tmp_path, village.cluster) or village.cluster.kubeconfig
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    before = _objects(village)
    words = case.words
    if words[0].startswith("-"):
        words = ("submit", *words, _SCRIPT)
    place = () if "--on" in words else ("--on", ".")
    place += () if "--namespace" in words else ("--namespace", village.namespace)
    done = safepoint(words[0], *place, "--json", *words[1:])
    assert done.code == case.code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    error = done.exit_error
    assert error["code"] == case.code
    for part in case.says:
        assert part in error["message"], error
    assert case.fix
    assert case.fix in f"{error['message']} {error['hint']}", error
    assert _objects(village) == before


def test_there_are_fifty() -> None:
    assert len(_CASES) >= 50
