"""Tests of safepoint.jobs.cluster.planned_sizes: what becomes of a plan in the objects and in the record of a job."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.errors import UsageError
from safepoint.estimates.job_needs import JobNeeds
from safepoint.foundation.volumes.room import STORAGE_LIMIT
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.planned_sizes import outline_of, parse_local_limit, planned_in
from safepoint.jobs.cluster.spec import RECORD, ClusterSpec, read_record
from safepoint.jobs.cluster.state import Observed, describe
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime

GIB = 1 << 30
NEEDS = JobNeeds(
    model="org/tiny (8.03B parameters; --model_name_or_path)",
    training="single, adamw, bfloat16",
    checkpoint_bytes=48 * 10**9,
    most_bytes=161 * 10**9,
    local_bytes=1000 * GIB,
    snapshot_bytes=48 * 10**9,
    save_s=200.0,
    least_grace_s=204,
)
REMOTE = RunSettings(output_dir="s3://bucket/run", save_total_limit=2)


def made(*, needs: JobNeeds | None = NEEDS, **changes: Any) -> Manifests:
    values = {"name": "tiny", "program": ("train.py",), "settings": REMOTE, **changes}
    return manifests_for(ClusterSpec(needs=needs, **values), Runtime(document=runtime()))


def volume(manifests: Manifests) -> dict[str, Any] | None:
    *_, patch = manifests.trainjob["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    volumes = {one["name"]: one for one in job["template"]["spec"]["template"]["spec"]["volumes"]}
    return volumes["checkpoint-storage"].get("emptyDir") if "checkpoint-storage" in volumes else None


def limit_of_launcher(manifests: Manifests) -> str | None:
    entries = manifests.trainjob["spec"]["trainer"]["env"]
    return next((entry["value"] for entry in entries if entry["name"] == STORAGE_LIMIT), None)


def planned(manifests: Manifests) -> tuple[str, ...]:
    return planned_in(read_record(manifests.trainjob["metadata"]["annotations"][RECORD]))


def said(manifests: Manifests, what: str) -> str:
    return next((text for text in planned(manifests) if text.startswith(what)), "")


def test_the_local_folder_has_the_size_of_the_plan() -> None:
    found = made()
    assert volume(found) == {"sizeLimit": str(1000 * GIB)}
    assert limit_of_launcher(found) == f"/mnt/kubeflow-checkpoints={1000 * GIB}"
    assert "a checkpoint has about 48.0 GB (single, adamw, bfloat16)" in planned(found)[0]
    assert "a size limit of 1000Gi" in said(found, "local folder")


def test_a_folder_in_the_volume_has_the_limit_of_the_volume() -> None:
    found = made(settings=replace(REMOTE, local_dir="/mnt/kubeflow-checkpoints/own"))
    assert volume(found) == {"sizeLimit": str(1000 * GIB)}


def test_a_job_without_a_plan_is_as_before() -> None:
    found = made(needs=None)
    assert volume(found) == {}
    assert planned(found) == ()


@pytest.mark.parametrize("given", [None, 200 * GIB])
def test_what_the_user_has_set_counts(given: int | None) -> None:
    found = made(staging_bytes=given, is_staging_given=True)
    assert volume(found) == ({} if given is None else {"sizeLimit": str(given)})
    assert "as given; 1000Gi is enough" in said(found, "local folder")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env": {"HF_HOME": "/mnt/kubeflow-checkpoints/cache"}}, "something else is to be written to"),
        ({"settings": replace(REMOTE, local_dir="/scratch")}, "--local-dir /scratch is in another volume"),
        ({"program": ("train.py", "--cache_dir", "/mnt/kubeflow-checkpoints/c")}, "something else is to be written"),
    ],
)
def test_a_folder_in_which_there_is_more_has_no_limit(changes: dict[str, Any], reason: str) -> None:
    found = made(**changes)
    assert (volume(found), limit_of_launcher(found)) == ({}, None)
    assert reason in said(found, "local folder")
    assert "--local-limit 1000Gi would be enough" in said(found, "local folder")


def test_a_plan_that_is_not_certain_sets_no_limit() -> None:
    needs = JobNeeds(model="a", checkpoint_bytes=1, local_bytes=5 * GIB, unlimited="N is not known")
    found = made(needs=needs)
    assert volume(found) == {}
    assert said(found, "local folder") == (
        "local folder: no size limit was set, because N is not known; --local-limit 5Gi would be enough"
    )


def test_a_volume_of_a_patch_has_no_limit() -> None:
    """The launcher would count a limit that does not exist."""
    container = {"name": "node", "volumeMounts": [{"name": "own", "mountPath": "/mnt/kubeflow-checkpoints"}]}
    pod = {"volumes": [{"name": "own", "emptyDir": {}}], "containers": [container]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "me", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    for given in ({}, {"staging_bytes": GIB, "is_staging_given": True}):
        found = made(patches=(patch,), **given)
        assert (volume(found), limit_of_launcher(found)) == (None, None)
        assert said(found, "local folder") == ""


def test_a_claim_has_no_local_folder() -> None:
    found = made(settings=RunSettings(output_dir="pvc://claim/run"))
    assert (said(found, "local folder"), limit_of_launcher(found)) == ("", None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "did not change the requested memory"),
        ({"resources": {"memory": "40Gi"}}, "--memory 40Gi leaves too little for them"),
        ({"resources": {"memory": "400Gi"}}, "did not change the requested memory"),
        ({"resources": {"memory": "much"}}, "did not change the requested memory"),
        ({"settings": RunSettings(snapshot_memory="8Gi")}, "--snapshot-memory 8Gi allows less"),
    ],
)
def test_memory_is_stated_and_never_set(changes: dict[str, Any], words: str) -> None:
    found = made(**changes)
    assert words in said(found, "memory")
    asked = changes.get("resources")
    assert found.trainjob["spec"]["trainer"].get("resourcesPerNode") == (
        asked and {"requests": asked, "limits": asked}
    )


@pytest.mark.parametrize(
    ("snapshot_bytes", "memory", "expected"),
    [
        (
            10**9,
            None,
            "memory: snapshots take about 1.0 GB in the first pod and the template of the ranks takes about ",
        ),
        (10**9, "1600M", "in each pod, and --memory 1600M leaves too little for them: training would wait"),
        (10**9, "1700M", "in addition to what the training needs"),
        (0, None, "memory: the template of the ranks takes about 600 MB in each pod, in addition to"),
        (0, "500M", "leaves too little for them: the pod would be OOM-killed"),
    ],
)
def test_the_memory_of_a_template_counts(snapshot_bytes: int, memory: str | None, expected: str) -> None:
    """The template counts; also if there are no snapshots."""
    needs = replace(NEEDS, snapshot_bytes=snapshot_bytes)
    resources = {} if memory is None else {"memory": memory}
    assert expected in said(made(needs=needs, resources=resources), "memory")
    cold = made(needs=needs, settings=replace(REMOTE, preload=False), resources=resources)
    assert "template" not in said(cold, "memory")


def test_a_grace_period_that_is_too_short_is_stated_and_not_changed() -> None:
    """The runtime of the test has 60 s."""
    found = made()
    assert [kind for kind, _ in found.before] == ["configmaps"]
    assert said(found, "grace period").startswith(
        "grace period: 60 s, and a save at SIGTERM and its upload take about"
    )
    assert "did not set a longer grace period" in said(found, "grace period")
    assert said(found, "grace period").endswith("use --grace 204")
    assert "did not set a longer grace period" not in said(made(grace_s=90), "grace period")
    assert said(made(grace_s=204), "grace period") == ""


def test_users_of_the_sdk_read_its_fields() -> None:
    settings = RunSettings(output_dir="s3://bucket/run", save_total_limit=2, wording="sdk")
    text = " ".join(planned(made(settings=settings)))
    assert "local_limit none" in text
    assert "grace_period_seconds 204" in text
    assert "--local-limit" not in text


def test_a_model_that_cannot_be_planned_is_no_obstacle() -> None:
    found = made(needs=JobNeeds(model="a", problem="its family is not known"))
    assert planned(found) == ("the sizes of the job were not computed: its family is not known",)
    assert volume(found) == {}


def test_the_record_has_only_what_is_shown() -> None:
    record = read_record(made().trainjob["metadata"]["annotations"][RECORD])
    assert not {"needs", "is_staging_given"} & record.keys()
    assert record["staging_bytes"] == 1000 * GIB


@pytest.mark.parametrize("changed", [None, 5, "text", {"a": 1}, [1, None, {}], ["x" * 5000] * 100])
def test_a_record_that_was_changed(changed: Any) -> None:
    found = planned_in({"planned": changed})
    assert len(found) <= 8
    assert all(len(text) <= 1000 for text in found)


def test_the_events_of_a_job_begin_with_its_plan() -> None:
    job = made().trainjob
    job["metadata"] |= {"uid": "1", "creationTimestamp": "2026-11-26T00:00:00Z"}
    api = SimpleNamespace(
        connection=SimpleNamespace(name="kind"),
        find=lambda kind, name: job if kind == "trainjobs" else None,
        objects=lambda kind, **_: [],
    )
    first, *_ = ClusterJobs(cast("ClusterApi", api)).events("tiny")
    assert (first.name, first.actor, first.time) == ("Planned", "safepoint", "2026-11-26T00:00:00Z")
    assert first.cause == planned(made())[0]
    assert describe(Observed(trainjob=job), place="kind").particulars["planned"] == [*planned(made())]


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("200Gi", REMOTE, 200 * GIB),
        ("none", REMOTE, None),
        ("None", RunSettings(output_dir="pvc://claim/run"), None),
        ("much", REMOTE, "--local-limit: 'much' is not a size"),
        ("200", REMOTE, "is 200 bytes, and no checkpoint would fit"),
    ],
)
def test_the_limit_of_a_user(text: str, settings: RunSettings, expected: int | str | None) -> None:
    if not isinstance(expected, str):
        assert parse_local_limit("--local-limit", text, settings) == expected
        return
    with pytest.raises(UsageError, match=expected):
        parse_local_limit("--local-limit", text, settings)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("s3://bucket/run", ""),
        ("pvc://claim/run", "with output location pvc://claim/run"),
        (None, "without an output location"),
    ],
)
def test_a_limit_without_a_local_folder_is_a_warning(
    output: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a default of the place, which must not keep jobs with a claim from being submitted."""
    assert parse_local_limit("--local-limit", "200Gi", RunSettings(output_dir=output)) == 200 * GIB
    assert (f"--local-limit 200Gi has no effect {words}" in caplog.text) == bool(words)


@pytest.mark.parametrize(
    ("settings", "kept", "is_unbounded"),
    [
        ({}, None, False),
        ({"save_total_limit": 3}, 3, False),
        ({"keep": "newest=4"}, 4, False),
        ({"keep": "newest=4", "save_total_limit": 5}, 5, False),
        ({"keep": "newest=4,best=2:loss"}, 6, False),
        ({"keep": "newest=2,every=100"}, 2, True),
        ({"keep": "newest=2,younger=2h"}, 2, True),
        ({"keep": "every=100", "save_total_limit": 2}, 2, True),
    ],
)
def test_the_checkpoints_that_an_outline_keeps(
    settings: dict[str, Any], kept: int | None, is_unbounded: bool
) -> None:
    spec = ClusterSpec(name="a", program=("b",), settings=RunSettings(output_dir="s3://b/r", **settings))
    outline = outline_of(spec)
    assert (outline.num_kept, outline.is_unbounded, outline.is_remote) == (kept, is_unbounded, True)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, None),
        ({"ranks_per_node": 3, "resources": {"nvidia.com/gpu": "8"}}, 3),
        ({"resources": {"nvidia.com/gpu": "8"}}, 8),
        ({"resources": {"nvidia.com/gpu": "8"}, "ranks_from": "cpu"}, None),
        ({"resources": {"nvidia.com/gpu": "many"}}, None),
        ({"resources": {"nvidia.com/gpu": "0"}}, None),
    ],
)
def test_the_ranks_of_an_outline(changes: dict[str, Any], ranks: int | None) -> None:
    outline = outline_of(ClusterSpec(name="a", program=("b",), **changes))
    assert (outline.ranks_per_node, outline.is_remote) == (ranks, False)


def test_a_dry_run_states_the_plan_above_the_objects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As comments, so that the output can still be applied."""
    import yaml

    from safepoint.cli import on_cluster

    def create(kind: str, body: Any, *, is_dry_run: bool = False) -> Any:
        assert is_dry_run
        return body

    api = SimpleNamespace(
        connection=SimpleNamespace(name="kind"),
        namespace="team",
        find=lambda kind, name: runtime() if kind == "clustertrainingruntimes" else None,
        may=lambda verb, kind: True,
        create=create,
    )
    jobs = nullcontext(ClusterJobs(cast("ClusterApi", api)))
    monkeypatch.setattr(on_cluster, "connected", lambda on, namespace: jobs)
    spec = ClusterSpec(name="tiny", program=("train.py",), settings=REMOTE, needs=NEEDS)
    on_cluster.submit("kind", None, spec, is_dry_run=True, as_json=False)
    text = capsys.readouterr().out
    assert text.startswith("# org/tiny (8.03B parameters; --model_name_or_path): a checkpoint has about 48.0 GB")
    assert "\n# local folder: the emptyDir volume has a size limit of 1000Gi" in text
    assert [one["kind"] for one in yaml.safe_load_all(text)] == ["ConfigMap", "TrainJob"]
    on_cluster.submit("kind", None, spec, is_dry_run=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["kind"] == "List"
