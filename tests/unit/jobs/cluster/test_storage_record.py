"""Tests of safepoint.jobs.cluster.records.storage_record, and of its use in safepoint.jobs.cluster.helper."""

import base64
import json
from typing import Any, cast

import pytest

from safepoint.errors import ConflictError, UsageError
from safepoint.jobs.cluster.checks.values import check_values
from safepoint.jobs.cluster.helper.job_storage import storage_of
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.objects import name_of
from safepoint.jobs.cluster.records.storage_record import FILE, named_output, read_storage_record
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.workspace import runtime


class OneConfigMap:
    def __init__(self, config_map: Any) -> None:
        self.config_map = config_map

    def find(self, kind: str, name: str) -> Any:
        return self.config_map if (kind, name) == ("configmaps", name_of(self.config_map)) else None


@pytest.mark.parametrize("output", ["s3://bucket/run", "pvc://claim/run", None])
def test_a_submitted_job_says_where_it_saves(output: str | None) -> None:
    spec = ClusterSpec(
        name="a",
        program=("train.py",),
        files={"train.py": b""},
        settings=RunSettings(output_dir=output),
        connection="models",
        env={"AWS_REGION": "eu-west-1", "AWS_CA_BUNDLE": "/ca.pem", "HF_HOME": "/tmp"},
    )
    made = manifests_for(spec, Runtime(document=runtime()), secret_keys=("AWS_ACCESS_KEY_ID",))
    [config_map] = [item for kind, item in made.before if kind == "configmaps"]
    storage = storage_of(cast("Any", OneConfigMap(config_map)), made.trainjob)
    assert (storage.output, storage.connection) == (output, "models")
    assert storage.env == {"AWS_REGION": "eu-west-1", "AWS_CA_BUNDLE": "/ca.pem"}
    assert storage.env_here == {"AWS_REGION": "eu-west-1"}
    assert named_output(made.trainjob) == output
    record = json.loads(base64.b64decode(config_map["binaryData"][FILE]))
    assert set(record) == {"job", "output", "connection", "env"}


def test_a_job_of_another_program_has_no_known_location() -> None:
    trainjob: Any = {"metadata": {"name": "a"}, "spec": {"trainer": {"command": ["python", "train.py"]}}}
    assert storage_of(cast("Any", OneConfigMap({})), trainjob).output is None
    trainjob["spec"]["trainer"]["env"] = [{"name": "SAFEPOINT_OUTPUT_DIR", "value": "s3://bucket/run"}]
    with pytest.raises(ConflictError, match="Safepoint did not submit it"):
        storage_of(cast("Any", OneConfigMap({})), trainjob)


@pytest.mark.parametrize("data", [None, b"", b"[]", b"\xff", b"[" * 100_000, b"{}", b'{"job": "a", "output": 5}'])
def test_what_is_no_record(data: bytes | None) -> None:
    assert read_storage_record(data) is None


def test_the_variables_may_have_any_shape() -> None:
    record = read_storage_record(b'{"job": "a", "env": {"AWS_REGION": 5, "PATH": "/x"}}')
    assert record is not None
    assert (record.output, record.connection, record.env) == (None, None, {"AWS_REGION": "5"})


def test_a_script_may_not_have_the_name_of_the_record() -> None:
    with pytest.raises(UsageError, match="cannot be sent under its name"):
        check_values(ClusterSpec(name="a", program=(FILE,), files={FILE: b""}))
