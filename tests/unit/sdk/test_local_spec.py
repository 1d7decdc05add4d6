"""From a trainer to a job of this machine: what is written down, and what is not."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.model.spec import JobSpec
from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TransformersTrainer
from safepoint.sdk.local.spec import LocalJob, local_job
from safepoint.sdk.upstream import types


def train_it(lr: float = 0.1) -> None:
    print("trained with", lr)


def made(trainer: Any = None, name: str | None = None, **config: Any) -> LocalJob:
    return local_job(trainer or TransformersTrainer(train_it), LocalConfig(**config), name)


def test_a_function_becomes_a_script_of_the_job(machine: Path) -> None:
    """In its folder; the name tells what it is, and is another one each time."""
    job = made(TransformersTrainer(train_it, {"lr": 3.0}))
    assert job.spec.name.startswith("train-it-")
    assert made().spec.name != job.spec.name
    assert job.spec.program == (str(machine / "state" / "safepoint" / "jobs" / job.spec.name / "train.py"),)
    assert job.spec.working_dir == str(machine)
    (machine / "shipped.py").write_bytes(job.files["train.py"])
    done = subprocess.run([sys.executable, machine / "shipped.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "trained with 3.0\n"
    assert JobSpec.from_json(job.spec.to_json()) == job.spec


def test_a_script_and_a_module(machine: Path) -> None:
    """Run where they are, with options."""
    (machine / "scripts").mkdir()
    (machine / "scripts" / "fine_tune.py").touch()
    script = made(TransformersTrainer("scripts/fine_tune.py", {"lr": 0.1}), working_dir=machine)
    assert script.spec.program == (str(machine / "scripts" / "fine_tune.py"), "--lr", "0.1")
    assert script.spec.name.startswith("fine-tune-")
    assert not script.files
    module = made(TransformersTrainer("trl.scripts.sft", {"bf16": True}))
    assert module.spec.program == ("trl.scripts.sft", "--bf16")
    assert module.spec.is_module
    for wrong, message in (
        ("missing.py", "there is no script"),
        ("no/such", "no script"),
        ("no.such.mod", "there is no module no.such.mod"),
        ("a-b", "neither the path of a script"),
    ):
        with pytest.raises(UsageError, match=message):
            made(TransformersTrainer(wrong))


def test_everything_of_the_trainer_is_in_the_job(machine: Path) -> None:
    """Each parameter has its place."""
    (machine / "ca.pem").touch()
    trainer = TransformersTrainer(
        train_it,
        packages_to_install=["peft==1"],
        pip_index_urls=["https://one", "https://two"],
        num_nodes=3,
        resources_per_node={"cpu": 2},
        env={"MY": "$HOME", "SAFEPOINT_SAVE_STEPS": "5", "SAFEPOINT_KEEP": "newest=9"},
        metrics_port=4000,
        output_dir="s3://bucket/prefix",
        data_connection_name="minio",
        periodic_checkpoint_config=PeriodicCheckpointConfig("epoch"),
        verify_cloud_storage_ssl=False,
        ca_bundle=machine / "ca.pem",
        grace_period_seconds=90,
    )
    spec = made(trainer, name="my-name", priority=7).spec
    assert (spec.name, spec.num_nodes, spec.ranks_per_node, spec.cpu_per_node, spec.priority) == (
        "my-name",
        3,
        2,
        2,
        7,
    )
    assert spec.packages == ("peft==1",)
    assert spec.package_indexes == ("https://one", "https://two")
    assert spec.data_connection == "minio"
    assert spec.env == {"MY": "$HOME", "SAFEPOINT_VERIFY_TLS": "0", "AWS_CA_BUNDLE": str(machine / "ca.pem")}
    settings = spec.settings
    assert (settings.output_dir, settings.grace_s, settings.metrics_port) == ("s3://bucket/prefix", 90, 4000)
    assert (settings.save_strategy, settings.save_steps, settings.keep) == ("epoch", None, "newest=9")


def test_kubeflows_own_trainer(machine: Path) -> None:
    """With options as variables; pip's own configuration is used without them."""
    trainer = types.CustomTrainer(train_it, env={"SAFEPOINT_OUTPUT_DIR": "out", "SAFEPOINT_SAVE_STEPS": "5"})
    spec = made(trainer).spec
    assert (spec.settings.output_dir, spec.settings.save_steps, spec.env) == ("out", 5, {})
    assert spec.package_indexes == ()
    assert (spec.num_nodes, spec.ranks_per_node) == (1, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nodes": "2"}, "num_nodes must be a whole number or None, not '2'"),
        ({"env": ["A=1"]}, "env must be a mapping"),
        ({"func_args": [1]}, "func_args must be a mapping"),
        ({"resources_per_node": "cpu"}, "resources_per_node must be a mapping"),
        ({"packages_to_install": "torch"}, "packages_to_install must be a list of requirements"),
        ({"packages_to_install": ["-r x"]}, "or an option of pip"),
    ],
)
def test_what_kubeflows_own_trainer_leaves_unchecked(values: dict[str, Any], message: str) -> None:
    """Is checked when it is to be a job."""
    with pytest.raises(UsageError, match=message):
        made(types.CustomTrainer(train_it, **values))


def test_a_module_of_another_interpreter_may_be_there(tmp_path: Path) -> None:
    """Or come with the job's own packages: that is unknown here."""
    assert made(TransformersTrainer("no.such.mod", packages_to_install=["no-such"])).spec.is_module


def test_claims_are_folders(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the client, of the environment, of a file of settings, in this order; or the error says how."""
    trainer = TransformersTrainer(train_it, output_dir="pvc://data/run")
    with pytest.raises(
        UsageError, match=r"no folder on this machine is configured for the claim 'data'.*LocalConfig\(pvc="
    ):
        made(trainer)
    (machine / "safepoint.toml").write_text('[pvc]\ndata = "from-file"\n')
    assert made(trainer).spec.env == {"SAFEPOINT_PVC_MOUNTS": f"data={machine}/from-file"}
    monkeypatch.setenv("SAFEPOINT_PVC_MOUNTS", "other=/x,data=/from/env")
    assert made(trainer).spec.env == {"SAFEPOINT_PVC_MOUNTS": "other=/x,data=/from/env"}
    assert made(trainer, pvc={"data": Path("here")}).spec.env == {"SAFEPOINT_PVC_MOUNTS": f"data={machine}/here"}
    own = TransformersTrainer(train_it, output_dir="pvc://data/run", env={"SAFEPOINT_PVC_MOUNTS": "data=/own"})
    assert made(own, pvc={"data": "here"}).spec.env == {"SAFEPOINT_PVC_MOUNTS": "data=/own"}


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing else is."""
    with caplog.at_level(logging.WARNING, "safepoint"):
        made()
        assert not caplog.messages
        made(TransformersTrainer(train_it, image="quay.io/x", env={"SAFEPOINT_SAVESTEPS": "5"}))
    assert "image quay.io/x has no effect" in caplog.text
    assert "SAFEPOINT_SAVESTEPS" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": {"A": 1}}, r"env\['A'\] is 1; its value must be a string"),
        ({"env": {"A B": "1"}}, "'A B' is not a valid variable name"),
        ({"env": {"SAFEPOINT_SAVE_STEPS": "0"}}, "must be at least 1"),
        ({"resources_per_node": {"tpu": 1}}, "tpu"),
        ({"ca_bundle": "/no/such.pem"}, "ca_bundle /no/such.pem is not a file"),
        ({"func_args": {"rate": 1}}, "unexpected keyword argument 'rate'"),
    ],
)
def test_what_cannot_be_meant(values: dict[str, Any], message: str) -> None:
    """Before anything is written down."""
    with pytest.raises(UsageError, match=message):
        made(TransformersTrainer(train_it, **values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pvc": {"a": "x,y"}}, "give the name of a claim, and a folder"),
        ({"pvc": {"a=b": "x"}}, "give the name of a claim, and a folder"),
        ({"pvc": {"a": ""}}, "give the name of a claim, and a folder"),
        ({"pvc": "x"}, "pvc must be a mapping"),
        ({"pvc": {"a": 5}}, r"pvc\['a'\] must be a path, not 5"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ({"working_dir": 5}, "working_dir must be a path or None, not 5"),
        ({"python": None}, "python must be a string, not None"),
        ({"working_dir": "/no/such"}, "'/no/such' is not a folder"),
        ({"python": "python-that-is-not-there"}, "cannot be executed"),
    ],
)
def test_a_config_that_cannot_be_meant(values: dict[str, Any], message: str) -> None:
    """Before any job is."""
    with pytest.raises(ValueError, match=message):
        LocalConfig(**values)
