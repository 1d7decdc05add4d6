"""Tests of `open_store_of` in safepoint.jobs.cluster.helper.job_storage."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.errors import ConflictError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.helper.job_storage import open_store_of
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime


def _submitted(output: str | None) -> tuple[ClusterApi, Any]:
    """A cluster with the config map of a job, and its TrainJob."""
    spec = ClusterSpec(name="tiny", program=("train.py",), settings=RunSettings(output_dir=output))
    manifests = manifests_for(spec, Runtime(document=runtime()))
    objects = {(kind, item["metadata"]["name"]): item for kind, item in manifests.before}
    api = SimpleNamespace(find=lambda kind, name: objects.get((kind, name)))
    return cast("ClusterApi", api), manifests.trainjob


@pytest.mark.parametrize("output", [None, "pvc://claim/run"])
def test_what_only_pods_can_reach_is_not_opened(output: str | None) -> None:
    assert open_store_of(*_submitted(output)) is None


def test_an_object_store_is_opened() -> None:
    inventory = open_store_of(*_submitted("s3://bucket/run"))
    assert inventory is not None


def test_a_folder_in_the_pods_is_a_message() -> None:
    with pytest.raises(ConflictError, match="a folder inside its pods"):
        open_store_of(*_submitted("/workspace/out"))


def test_a_changed_location_is_a_message() -> None:
    api, trainjob = _submitted("s3://bucket/run")
    for entry in trainjob["spec"]["trainer"]["env"]:
        if entry["name"] == "SAFEPOINT_OUTPUT_DIR":
            entry["value"] = "s3://other/run"
    with pytest.raises(ConflictError, match="it is not certain where job tiny saves"):
        open_store_of(api, trainjob)
