"""Tests of safepoint.jobs.cluster.shared_memory."""

from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.shared_memory import parse_shared_memory
from safepoint.jobs.cluster.spec import ClusterSpec
from tests.support.cluster.workspace import runtime

SPEC = ClusterSpec(name="tiny", program=("train.py",), files={"train.py": b""}, shared_memory_bytes=8 << 30)


@pytest.mark.parametrize("resources", [{}, {"memory": "8Gi"}, {"memory": "invalid"}])
def test_a_size(resources: dict[str, str]) -> None:
    assert parse_shared_memory("--shared-memory", "8Gi", resources) == 8 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("much", "--shared-memory: 'much' is not a size"),
        ("32Mi", "--shared-memory 32Mi is less than 64 MiB"),
        ("8", "less than 64 MiB"),
        ("8Gi", "more than the memory of the pod, 4Gi"),
    ],
)
def test_a_size_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_shared_memory("--shared-memory", text, {"memory": "4Gi"})


def test_the_volume_has_the_limit() -> None:
    *_, patch = manifests_for(SPEC, Runtime(document=runtime())).trainjob["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    volumes = {one["name"]: one for one in job["template"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["safepoint-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(8 << 30)}


def test_a_runtime_with_a_volume_of_its_own_cannot_have_a_limit() -> None:
    document: Any = runtime()
    [job] = document["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"].append(
        {"name": "usr", "mountPath": "/dev/shm"}
    )
    with pytest.raises(UsageError, match="--shared-memory has no effect, because runtime torch-distributed"):
        manifests_for(SPEC, Runtime(document=document))
