"""`safepoint freeze` and `thaw` of jobs of a cluster whose API is in memory; tests/cluster has those with pods."""

import os
from pathlib import Path
from typing import cast

import pytest

from safepoint.cli import cluster_options
from safepoint.errors import ExitCode
from safepoint.foundation.configuration import user_file
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.state import SAFE_STEP
from safepoint.jobs.cluster.suspension import stop
from safepoint.jobs.cluster.watches import pod_ends
from tests.support.cluster.kept import JOB, Kept, answer_with_image, job_with_images, running_pod
from tests.support.commands import safepoint

ON = ("--on", "kind")
IMAGE = "pvc://ckpt/x/images/image-1"


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A namespace with a job that trains, whose pod can make images. Nothing here can freeze."""
    for name in ("HOME", "XDG_CONFIG_HOME", "SAFEPOINT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("_OPEN_S", "_LAST_EVENTS_S"):
        monkeypatch.setattr(pod_ends, name, 0.0)
    monkeypatch.setattr(stop, "_LOOK_S", 0.01)
    answer_with_image(monkeypatch)
    found = Kept(trainjobs=[job_with_images()], pods=[running_pod()])

    def connected(on: str, namespace: str | None, **_: object) -> ClusterJobs:
        return ClusterJobs(cast("ClusterApi", found))

    monkeypatch.setattr(cluster_options, "connected", connected)
    return found


@pytest.fixture
def frozen(namespace: Kept) -> Kept:
    """The same after `safepoint freeze`."""

    def after(change: str) -> None:
        namespace.kept["pods"] = []

    namespace.after = after
    done = safepoint("freeze", *ON, "--json", JOB)
    assert done.code == 0, done.stderr
    assert done.document["job"]["state"] == "Suspended"
    assert done.document["job"]["image"] == done.document["path"] == IMAGE
    return namespace


def test_a_frozen_job_is_thawed(frozen: Kept) -> None:
    """Where nothing can be frozen or restored: the pod restores it."""
    done = safepoint("thaw", *ON, JOB, "--json")
    assert done.code == 0, done.stderr
    assert (done.document["image"], done.document["job"]) == (IMAGE, JOB)
    assert frozen.kept["trainjobs"][0]["spec"]["suspend"] is False
    again = safepoint("thaw", *ON, JOB)
    assert again.code == ExitCode.CONFLICT


def test_the_default_place_has_the_job(frozen: Kept) -> None:
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[places.kind]\ndefault = true\n")
    done = safepoint("thaw", JOB)
    assert done.code == 0, done.stderr
    assert f"its next pod restores {IMAGE}" in done.stdout
    local = safepoint("thaw", "--on", "local", JOB)
    assert (local.code, f"there is no job '{JOB}'" in local.stderr) == (ExitCode.NOT_FOUND, True)


def test_a_job_without_an_image_is_not_thawed(namespace: Kept) -> None:
    namespace.kept["trainjobs"][0]["spec"]["suspend"] = True
    namespace.kept["pods"] = []
    done = safepoint("thaw", *ON, JOB, "--json")
    assert done.code == ExitCode.NOT_FOUND
    assert "`safepoint resume tiny` continues the job from its newest checkpoint" in done.exit_error["hint"]


@pytest.mark.parametrize("options", [("--trust",), ("--key", os.devnull)])
def test_options_without_an_effect_are_refused(options: tuple[str, ...], frozen: Kept) -> None:
    done = safepoint("thaw", *ON, JOB, *options)
    assert done.code == ExitCode.USAGE
    assert f"{options[0]} has no effect with --on kind" in done.stderr
    assert frozen.kept["trainjobs"][0]["spec"]["suspend"] is True


def test_an_image_is_no_job_of_a_cluster(namespace: Kept) -> None:
    """A path of an image needs CRIU here, whatever the default place is."""
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[places.kind]\ndefault = true\n")
    done = safepoint("thaw", "images/image-1")
    assert done.code == ExitCode.NOT_SUPPORTED
    assert "CRIU" in done.stderr


def test_the_image_is_shown(frozen: Kept) -> None:
    """When it was made, how large it is, and whether it is newer than the newest checkpoint."""
    shown = safepoint("status", *ON, JOB)
    assert shown.code == 0, shown.stderr
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("  image ")]
    assert IMAGE in line
    assert "old, 10 B, newer than every known checkpoint" in line
    document = safepoint("status", *ON, "--json", JOB).document
    assert document["image"] == IMAGE
    assert document["process_image"] == {
        "name": "image-1",
        "path": IMAGE,
        "created": "2026-11-27T10:00:00Z",
        "size_bytes": 10,
        "memory_bytes": 20,
        "is_newest": True,
    }
    frozen.kept["trainjobs"][0]["metadata"]["annotations"][SAFE_STEP] = "5"
    assert "older than step 5" in safepoint("status", *ON, JOB).stdout
    [listed] = safepoint("list", *ON, "--json").document
    assert listed["process_image"]["is_newest"] is False


def test_a_job_without_an_image_shows_none(namespace: Kept) -> None:
    namespace.kept["trainjobs"][0]["spec"]["suspend"] = True
    namespace.kept["pods"] = []
    shown = safepoint("status", *ON, JOB)
    assert shown.code == 0, shown.stderr
    assert "  image " not in shown.stdout
    assert safepoint("status", *ON, "--json", JOB).document["process_image"] is None
