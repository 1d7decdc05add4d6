"""Red Hat's `TransformersTrainer`: the same parameters, defaults and rules, and what was added."""

import copy
import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.sdk import PeriodicCheckpointConfig, TransformersTrainer
from safepoint.sdk.upstream import trainer as kubeflow
from safepoint.settings.run_settings import RunSettings

RED_HATS = {
    "func": inspect.Parameter.empty,
    "func_args": None,
    "packages_to_install": None,
    "pip_index_urls": ["https://pypi.org/simple"],
    "num_nodes": None,
    "resources_per_node": None,
    "env": None,
    "enable_progression_tracking": True,
    "metrics_port": 28080,
    "metrics_poll_interval_seconds": 30,
    "enable_jit_checkpoint": False,
    "output_dir": None,
    "periodic_checkpoint_config": None,
    "data_connection_name": None,
    "verify_cloud_storage_access": True,
    "verify_cloud_storage_ssl": True,
}


def train(rate: float = 0.1) -> float:
    return 2 * rate


def test_red_hats_parameters_by_position_and_name() -> None:
    """In its order and with its defaults; what is new is by name only."""
    parameters = inspect.signature(TransformersTrainer).parameters
    by_position = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert by_position == list(RED_HATS)
    trainer = TransformersTrainer(train)
    assert trainer.func_args is None
    for name, default in RED_HATS.items():
        if name != "func":
            assert getattr(trainer, name) == default, name
    config = PeriodicCheckpointConfig()
    assert dataclasses.astuple(config) == ("epoch", None, 3)


def test_it_is_a_custom_trainer() -> None:
    """And so stands wherever Kubeflow takes one; each of its fields is there."""
    trainer = TransformersTrainer(train, image="quay.io/some/image")
    assert isinstance(trainer, kubeflow.CustomTrainer)
    for field in dataclasses.fields(kubeflow.CustomTrainer):
        assert hasattr(trainer, field.name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"func": 3}, "func must be a function"),
        ({"func": ""}, "func must be a function"),
        ({"func": None}, "func must be a function"),
        ({"metrics_port": 1023}, "metrics_port 1023 must be from 1024 to 65535"),
        ({"metrics_port": 65536}, "metrics_port 65536"),
        ({"metrics_port": "28080"}, "metrics_port must be a whole number"),
        ({"metrics_port": 28080.0}, "metrics_port must be a whole number"),
        ({"metrics_poll_interval_seconds": 4}, "metrics_poll_interval_seconds 4 must be from 5 to 300"),
        ({"metrics_poll_interval_seconds": 301}, "metrics_poll_interval_seconds 301"),
        ({"metrics_poll_interval_seconds": None}, "metrics_poll_interval_seconds must be a whole number"),
        ({"output_dir": "gs://bucket/x"}, "the scheme 'gs'"),
        ({"output_dir": "ftp://host/x"}, "the scheme 'ftp'"),
        ({"output_dir": "file:///x"}, "the scheme 'file'"),
        ({"output_dir": "s3:/bucket/x"}, "must begin with s3://"),
        ({"output_dir": "s3:///x", "data_connection_name": "a"}, "has no bucket"),
        ({"output_dir": "pvc://"}, "has no claim"),
        ({"output_dir": "pvc:///x"}, "has no claim"),
        ({"output_dir": "pvc://claim/../x"}, "in its path"),
        ({"output_dir": "s3://bucket/x"}, "requires data_connection_name"),
        ({"output_dir": "S3://bucket", "data_connection_name": ""}, "requires data_connection_name"),
        ({"periodic_checkpoint_config": {"save_strategy": "epoch"}}, "must be a PeriodicCheckpointConfig"),
        ({"grace_period_seconds": 0}, "must be a positive number of seconds"),
        ({"retention": "all"}, "retention: the policy 'all' is unknown"),
        (
            {"retention": {"disk": "newest=1"}},
            "retention has the unknown key 'disk'; its keys are 'local' and 'store'",
        ),
        ({"retention": {"store": "newest=0"}}, "retention: the policy 'newest=0'"),
        ({"staging_size": "8 GB of it"}, "staging_size: '8 GB of it' is not a size"),
        ({"save_every": "often"}, "'often' is not a time"),
        (
            {"save_every": "10m", "periodic_checkpoint_config": PeriodicCheckpointConfig()},
            "save_every '10m' contradicts",
        ),
        ({"output_dir": 5}, "output_dir must be a string or None, not 5"),
        ({"data_connection_name": 5}, "data_connection_name must be a string or None, not 5"),
        ({"num_nodes": "2"}, "num_nodes must be a whole number or None, not '2'"),
        ({"num_nodes": 0}, "num_nodes 0 must be at least 1"),
        ({"env": ["A=1"]}, "env must be a mapping"),
        ({"func_args": [1]}, "func_args must be a mapping"),
        ({"resources_per_node": "cpu"}, "resources_per_node must be a mapping"),
        ({"packages_to_install": "torch"}, "packages_to_install must be a list of requirements or None, not 'torch'"),
        ({"pip_index_urls": "https://host"}, "pip_index_urls must be a list of addresses, not 'https://host'"),
        ({"pip_index_urls": None}, "pip_index_urls must be a list of addresses, not None"),
        ({"ca_bundle": 5}, "ca_bundle must be a path or None, not 5"),
        ({"verify_cloud_storage_ssl": "false"}, "verify_cloud_storage_ssl must be True or False, not 'false'"),
        ({"verify_cloud_storage_access": 0}, "verify_cloud_storage_access must be True or False, not 0"),
        ({"metrics_port": True}, "metrics_port must be a whole number, not True"),
        ({"grace_period_seconds": "30"}, "grace_period_seconds must be a positive number of seconds"),
        ({"grace_period_seconds": -1}, "grace_period_seconds must be a positive number of seconds"),
        ({"retention": 5}, "retention must be a string or a mapping or None, not 5"),
        ({"retention": {"local": 5}}, r"retention\['local'\] must be a string or None, not 5"),
        ({"staging_size": 0}, "staging_size 0 must be more than 0"),
        ({"staging_size": 1.5}, "staging_size must be a size in bytes"),
        ({"save_every": 600}, "save_every must be a string such as 10m, or auto or None, not 600"),
        ({"save_every": "0m"}, "save_every 0m must be longer than 0 s"),
        ({"snapshot_steps": 1.5}, "snapshot_steps must be a positive number of steps"),
        (
            {"periodic_checkpoint_config": SimpleNamespace(save_strategy="no", save_steps="2", save_total_limit=1)},
            "save_steps must",
        ),
        ({"snapshot_steps": 0}, "must be a positive number of steps, or auto"),
    ],
)
def test_what_cannot_be_meant_is_a_value_error(values: dict[str, Any], message: str) -> None:
    """It names the field and the value, and no option of a command."""
    with pytest.raises(ValueError, match=message) as caught:
        TransformersTrainer(**{"func": train, **values})
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"save_strategy": "sometimes"}, "save_strategy 'sometimes' must be one of steps, epoch, no"),
        ({"save_strategy": None}, "save_strategy None"),
        ({"save_strategy": "steps"}, "save_steps must be given"),
        ({"save_total_limit": 0}, "save_total_limit 0 must be at least 1"),
        ({"save_total_limit": -1}, "save_total_limit -1"),
        ({"save_total_limit": "3"}, "save_total_limit must be a whole number or None, not '3'"),
        ({"save_total_limit": 2.5}, "save_total_limit must be a whole number or None, not 2.5"),
        ({"save_strategy": "steps", "save_steps": "20"}, "save_steps must be a whole number or None, not '20'"),
        ({"save_strategy": "steps", "save_steps": 1.5}, "save_steps must be a whole number or None, not 1.5"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps 0 must be at least 1"),
    ],
)
def test_a_config_that_cannot_be_meant(values: dict[str, Any], message: str) -> None:
    """Likewise."""
    with pytest.raises(ValueError, match=message):
        PeriodicCheckpointConfig(**values)


@pytest.mark.parametrize(
    ("given", "unified"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("S3://Bucket//a///b//", "s3://Bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("PVC://claim//a", "pvc://claim/a"),
        ("pvc://claim", "pvc://claim"),
        ("s3://bucket/a#b?c", "s3://bucket/a#b?c"),
        ("out//here/", "out//here/"),
        ("/data/a:b", "/data/a:b"),
        ("", ""),
        (None, None),
    ],
)
def test_the_output_folder_is_unified(given: str | None, unified: str | None) -> None:
    """Schemes in lower case, no slash twice or at the end; paths are left alone."""
    keys = "keys" if (given or "").lower().startswith("s3:") else None
    trainer = TransformersTrainer(train, output_dir=given, data_connection_name=keys)
    assert trainer.output_dir == unified
    assert trainer.enable_jit_checkpoint is bool(given)


def settings_of(**values: Any) -> RunSettings:
    return TransformersTrainer(train, **values).run_settings()


def test_settings_of_the_run() -> None:
    """The script decides when to save, unless there is a config."""
    plain = settings_of()
    assert (plain.save_strategy, plain.save_steps, plain.save_total_limit, plain.output_dir) == (
        None,
        None,
        None,
        None,
    )
    assert plain.metrics_port == 28080
    by_default = settings_of(output_dir="out")
    assert (by_default.save_strategy, by_default.save_steps, by_default.save_total_limit) == (None, None, None)
    assert settings_of(enable_jit_checkpoint=True).save_strategy is None
    config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=20, save_total_limit=2)
    by_steps = settings_of(periodic_checkpoint_config=config)
    assert (by_steps.save_strategy, by_steps.save_steps, by_steps.save_total_limit) == ("steps", 20, 2)
    unused = PeriodicCheckpointConfig(save_strategy="epoch", save_steps=20, save_total_limit=None)
    by_epoch = settings_of(periodic_checkpoint_config=unused)
    assert (by_epoch.save_strategy, by_epoch.save_steps, by_epoch.save_total_limit) == ("epoch", None, None)


def test_a_config_of_another_class_counts() -> None:
    """Red Hat's own, for example."""
    config: Any = SimpleNamespace(save_strategy="steps", save_steps=7, save_total_limit=1)
    assert settings_of(periodic_checkpoint_config=config).save_steps == 7


def test_settings_of_what_is_new() -> None:
    """Each has its option."""
    settings = settings_of(
        output_dir="s3://bucket/x",
        data_connection_name="keys",
        grace_period_seconds=120,
        retention="newest=2,every=1000",
        staging_size="8Gi",
        save_every="auto",
        snapshot_steps=5,
        enable_progression_tracking=False,
        verify_cloud_storage_access=False,
    )
    assert settings == RunSettings(
        output_dir="s3://bucket/x",
        grace_s=120.0,
        keep="newest=2,every=1000",
        store_keep="newest=2,every=1000",
        snapshot_memory="8Gi",
        save_every="auto",
        save_total_limit=3,
        snapshot_steps="5",
        verify_access=False,
    )
    assert settings_of(retention="newest=2", output_dir="out").store_keep is None, "it would mean nothing there"
    both = settings_of(retention={"local": "newest=1", "store": "every=100"})
    assert (both.keep, both.store_keep) == ("newest=1", "every=100")
    limited = settings_of(
        save_every="1h", periodic_checkpoint_config=PeriodicCheckpointConfig("no", save_total_limit=5)
    )
    assert (limited.save_every, limited.save_strategy, limited.save_total_limit) == ("1h", None, 5)


def test_what_the_trainer_says_counts_more_than_the_base() -> None:
    """Also where it says that there is none."""
    base = RunSettings(save_steps=3, grace_s=60, output_dir="elsewhere")
    settings = TransformersTrainer(train, periodic_checkpoint_config=PeriodicCheckpointConfig()).run_settings(base)
    assert (settings.save_strategy, settings.save_steps, settings.grace_s) == ("epoch", None, 60)
    assert settings.output_dir == "elsewhere"


def test_how_to_reach_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle in full: the job runs elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert TransformersTrainer(train).storage_environment() == {}
    trainer = TransformersTrainer(train, verify_cloud_storage_ssl=False, ca_bundle="ca.pem")
    assert trainer.storage_environment() == {"SAFEPOINT_VERIFY_TLS": "0", "AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}


def test_what_stands_in_for_the_function_does_the_same() -> None:
    """Callers notice nothing; copies and changed copies have the function, and not a stand-in for a stand-in."""
    trainer = TransformersTrainer(train, {"rate": 0.5})
    assert callable(trainer.func)
    assert trainer.func(rate=3) == 6
    assert trainer.func.__name__ == "train"
    assert trainer.function is train
    changed = dataclasses.replace(trainer, num_nodes=4)
    assert changed.function is train
    assert changed.num_nodes == 4
    assert copy.deepcopy(trainer).function is train
    assert TransformersTrainer(train) == TransformersTrainer(train)
    assert TransformersTrainer(train) != TransformersTrainer(print)
    with pytest.raises(RuntimeError, match="is a script"):
        TransformersTrainer("train.py").func()  # pyright: ignore
