"""Tests of safepoint.jobs.cluster.large_code."""

import hashlib
import random
from typing import Any

import pytest

from safepoint.checkpoint.remote.code import MOST_BYTES
from safepoint.errors import UsageError
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime

CODE = random.Random(1).randbytes(2_000_000)
DIGEST = hashlib.sha256(CODE).hexdigest()


def made(output: str | None, code: bytes = CODE) -> Manifests:
    spec = ClusterSpec(name="a", program=("train.py",), code=code, settings=RunSettings(output_dir=output))
    return manifests_for(spec, Runtime(document=runtime()))


def variables(manifests: Manifests) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in manifests.trainjob["spec"]["trainer"]["env"]}


@pytest.mark.parametrize(
    ("output", "location", "where"),
    [
        ("pvc://data/run", "pvc://data/run/.safepoint/code", "/mnt/kubeflow-checkpoints/run/.safepoint/code"),
        ("pvc://data", "pvc://data/.safepoint/code", "/mnt/kubeflow-checkpoints/.safepoint/code"),
        ("s3://b/run", "s3://b/run/.safepoint/code", "s3://b/run/.safepoint/code"),
    ],
)
def test_large_code_lies_under_its_digest_in_the_output_location(output: str, location: str, where: str) -> None:
    manifests = made(output)
    assert manifests.code is not None
    assert str(manifests.code.location) == f"{location}/{DIGEST}.zip"
    assert manifests.code.data == CODE
    assert variables(manifests)["SAFEPOINT_CODE"] == f"{where}/{DIGEST}.zip"
    assert variables(manifests)["SAFEPOINT_CODE_DIGEST"] == DIGEST
    assert list(manifests.before[0][1]["binaryData"]) == ["safepoint-storage.json", "safepoint.pyz"]


def test_code_that_fits_stays_in_the_config_map() -> None:
    manifests = made("pvc://data/run", CODE[:100_000])
    assert manifests.code is None
    assert variables(manifests)["SAFEPOINT_CODE"] == "/opt/safepoint/code.zip"


@pytest.mark.parametrize("output", [None, "/tmp/out"])
def test_without_a_claim_or_bucket_it_is_refused_with_its_size(output: str | None) -> None:
    with pytest.raises(UsageError, match=r"2,000,000 bytes.*nothing was submitted.*--output-dir"):
        made(output)


def test_too_large_code_is_refused_with_its_size() -> None:
    with pytest.raises(UsageError, match=f"{MOST_BYTES + 1:,} bytes"):
        made("pvc://data/run", bytes(MOST_BYTES + 1))
