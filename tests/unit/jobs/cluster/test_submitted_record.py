"""Tests of safepoint.jobs.cluster.records.submitted_record."""

import json
from typing import Any

import pytest

from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.records.submitted_record import SubmittedRecord, read_submitted
from safepoint.jobs.cluster.spec import RECORD, ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime


def test_what_was_submitted() -> None:
    settings = RunSettings(output_dir="s3://bucket/run", save_total_limit=3, snapshot_slots=2)
    spec = ClusterSpec(
        name="tiny",
        program=("train.py", "--lr", "1"),
        settings=settings,
        resources={"nvidia.com/gpu": "4"},
    )
    found = read_submitted(manifests_for(spec, Runtime(document=runtime())).trainjob)
    assert found == SubmittedRecord(arguments=("--lr", "1"), settings=settings, ranks_per_node=4)


def test_a_job_of_another_program_has_no_record() -> None:
    assert read_submitted({"metadata": {"name": "a"}}) is None


@pytest.mark.parametrize(
    "record",
    [
        {"program": 5, "settings": 5, "ranks_per_node": "8", "initializer": []},
        {"program": [1, 2, None], "settings": {"SAFEPOINT_GRACE": "-1"}, "ranks_per_node": 10**30},
        {"program": ["a"], "settings": {"SAFEPOINT_KEEP": "nonsense"}, "resources": {"nvidia.com/gpu": ["x"]}},
        {"program": ["a"], "settings": {"SAFEPOINT_SNAPSHOT_SLOTS": "9" * 5000}, "ranks_per_node": -1},
        {"program": ["a"], "initializer": {"model": {"storageUri": 5}}, "resources": {"nvidia.com/gpu": "9" * 5000}},
    ],
)
def test_a_record_that_was_changed(record: dict[str, Any]) -> None:
    found = read_submitted({"metadata": {"annotations": {RECORD: json.dumps(record)}}})
    assert found is not None
    assert (found.ranks_per_node, found.model_uri) == (None, None)
    assert all(isinstance(word, str) for word in found.arguments)
