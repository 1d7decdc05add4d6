"""Arguments that users of Kubeflow's and Red Hat's SDK get wrong: each message names the argument and the fix."""

import copy
import dataclasses
import inspect
import logging
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest

import safepoint
from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TrainJob, TransformersTrainer
from safepoint.sdk.upstream import KubernetesBackendConfig, common_options, types
from safepoint.sdk.upstream import trainer as kubeflow
from safepoint.settings import wording


def train(rate: float = 0.1) -> float:
    return 2 * rate


def other(rate: float = 0.1) -> float:
    return 3 * rate


@pytest.fixture
def client(machine: Path) -> TrainerClient:
    return TrainerClient(LocalConfig())


TRAINER = TransformersTrainer(train)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.wait_for_job_status("x", "Complete"), r"use status=\{'Complete'\}"),
        (lambda client: client.wait_for_job_status("x", None), "status must be a set of states, not None"),
        (lambda client: client.wait_for_job_status("x", {1}), "status must be a set of states"),
        (lambda client: client.wait_for_job_status("x", timeout="10"), "timeout must be a number of seconds"),
        (lambda client: client.wait_for_job_status("x", polling_interval=None), "polling_interval must be a number"),
        (lambda client: TrainerClient(LocalConfig), r"the class LocalConfig.*use TrainerClient\(LocalConfig\(\)\)"),
        (lambda client: TrainerClient(KubernetesBackendConfig), r"use TrainerClient\(KubernetesBackendConfig\(\)\)"),
        (lambda client: TrainerClient("local"), "backend_config must be a configuration of a backend, not 'local'"),
        (lambda client: client.train(TRAINER), r"first argument .* must be the runtime.*train\(trainer=…\)"),
        (
            lambda client: client.train(kubeflow.CustomTrainer(func=train)),
            "first argument of train must be the runtime",
        ),
        (lambda client: client.train(runtime=3), "runtime must be the name of a runtime"),
        (lambda client: client.train(trainer=train), "trainer must be a trainer, not a function"),
        (lambda client: client.train(trainer=TransformersTrainer), "not the class TransformersTrainer"),
        (lambda client: client.train(trainer="train.py"), "trainer must be a TransformersTrainer"),
        (
            lambda client: client.train(trainer=TRAINER, options=common_options.Name("x")),
            r"options must be a list, not a Name.*options=\[Name\(…\)\]",
        ),
        (lambda client: client.train(trainer=TRAINER, options=[common_options.Name]), "options has the class Name"),
        (lambda client: client.train(trainer=TRAINER, options=["x"]), "options has 'x', which is not an option"),
        (
            lambda client: client.train(
                initializer=kubeflow.HuggingFaceModelInitializer("hf://a/b"), trainer=TRAINER
            ),
            r"initializer must be an Initializer\(",
        ),
        (lambda client: client.get_job(None), "name must be the name of a job, not None"),
        (lambda client: client.delete_job(3), "name must be the name of a job, not 3"),
        (lambda client: client.suspend_job(""), "name must be the name of a job"),
    ],
)
def test_calls_that_cannot_be_meant(client: TrainerClient, call: Any, message: str) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match=message) as caught:
        call(client)
    assert "--" not in str(caught.value)
    assert client.list_jobs() == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"output_dir": "s3:/bucket/x"}, "must begin with s3://, as in s3://bucket/x"),
        ({"output_dir": "s3:bucket/x"}, "must begin with s3://, as in s3://bucket/x"),
        ({"output_dir": "S3//bucket/x"}, "must begin with s3://"),
        ({"output_dir": "pvc//claim/x"}, "must begin with pvc://, as in pvc://claim/x"),
        ({"output_dir": "pvc:/claim/x"}, "must begin with pvc://"),
        ({"output_dir": " "}, "begins or ends with white space"),
        ({"output_dir": "pvc://claim/x "}, "begins or ends with white space"),
        ({"output_dir": "pvc:// /x"}, "has no claim"),
        ({"resources_per_node": {"cpu": 0}}, r"resources_per_node\['cpu'\] is 0, which is less than 1"),
        ({"resources_per_node": {"CPU": "0"}}, "less than 1"),
        ({"resources_per_node": {"cpu": None}}, "'cpu'.*None"),
        ({"resources_per_node": {"cpu": -1}}, "'cpu'.*-1"),
        ({"resources_per_node": {"memory": "lots"}}, r"resources_per_node\['memory'\]: 'lots' is not a size"),
        ({"resources_per_node": {"memory": "16GB"}}, "'16GB' is not a size"),
        ({"resources_per_node": {"memory": 16}}, "memory.* is 16, which is less than .* bytes.*16Gi"),
        ({"resources_per_node": {"memory": 0}}, "less than"),
        ({"resources_per_node": {"nvidia.com/gpu": "one"}}, "'one' is not a quantity"),
        ({"data_connection_name": "keys"}, "data_connection_name 'keys' has no effect, because output_dir is None"),
        ({"data_connection_name": "keys", "output_dir": "pvc://claim"}, "data_connection_name 'keys' has no effect"),
        ({"data_connection_name": " ", "output_dir": "s3://bucket"}, "requires data_connection_name"),
        (
            {"periodic_checkpoint_config": PeriodicCheckpointConfig},
            r"is the class .*: use PeriodicCheckpointConfig\(\)",
        ),
        (
            {"from_scratch": True, "resume": "out/checkpoint-1"},
            "from_scratch=True contradicts resume out/checkpoint-1",
        ),
        ({"on_upload_failure": "wait"}, "on_upload_failure 'wait' is unknown"),
        ({"extra_files_limit": "much"}, "extra_files_limit: 'much' is not a size"),
    ],
)
def test_fields_that_cannot_be_meant(values: dict[str, Any], message: str) -> None:
    """When the trainer is made, and, for a value that is assigned later, when it is submitted."""
    with pytest.raises(ValueError, match=message) as caught:
        TransformersTrainer(train, **values)
    assert "--" not in str(caught.value)


def test_a_field_that_was_assigned_is_checked_at_submission(client: TrainerClient) -> None:
    """And unified, as in the constructor."""
    trainer = TransformersTrainer(train)
    trainer.output_dir = "s3:/bucket/x"
    with pytest.raises(ValueError, match="must begin with s3://"):
        client.train(trainer=trainer)
    with pytest.raises(ValueError, match="'lots' is not a size"):
        client.train(trainer=kubeflow.CustomTrainer(func=train, resources_per_node={"memory": "lots"}))
    assert client.list_jobs() == []


@pytest.mark.parametrize("kind", [TransformersTrainer, kubeflow.CustomTrainer])
def test_keys_in_env(client: TrainerClient, kind: Any) -> None:
    """The advice can be followed with this trainer."""
    trainer = kind(func=train, env={"AWS_SECRET_ACCESS_KEY": "hidden", "AWS_ACCESS_KEY_ID": "id"})
    with pytest.raises(ValueError, match="env has AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY") as caught:
        client.train(trainer=trainer)
    text = str(caught.value)
    assert "hidden" not in text
    assert "--" not in text
    assert "set them in the environment of this program (os.environ)" in text
    assert ("data_connection_name of a TransformersTrainer" in text) is (kind is not TransformersTrainer)


@pytest.mark.parametrize("name", ["AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "aws_session_token"])
def test_keys_of_other_stores_in_env(client: TrainerClient, name: str) -> None:
    with pytest.raises(ValueError, match=f"env has {name}, and env is stored") as caught:
        client.train(trainer=TransformersTrainer(train, env={name: "hidden"}))
    assert "hidden" not in str(caught.value)
    assert client.list_jobs() == []


def test_the_function_that_was_assigned_runs() -> None:
    """Wherever the trainer is used: called, read as source, compared, copied."""
    trainer = TransformersTrainer(train)
    trainer.func = other
    assert trainer.function is other
    assert trainer.func(1.0) == 3
    assert "def other(" in inspect.getsource(trainer.func)
    assert trainer == TransformersTrainer(other)
    trainer.func = TransformersTrainer(train).func
    assert trainer.function is train
    trainer.func = "train.py"
    assert trainer.function == "train.py"
    trainer.func = 3
    with pytest.raises(ValueError, match="func must be a function"):
        trainer.check()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_copies_are_independent(duplicate: Any) -> None:
    """Also pickled ones: the function of a copy has the settings of the copy."""
    trainer = TransformersTrainer(train, {"rate": 0.5}, output_dir="out")
    copied = duplicate(trainer)
    assert copied == trainer
    assert copied.function is train
    copied.output_dir = "elsewhere"
    assert inspect.getsource(copied.func) != inspect.getsource(trainer.func)
    assert copied.func(rate=1.0) == 2


def test_the_scripts_own_strategy_stands() -> None:
    """Unless a PeriodicCheckpointConfig is given."""
    for settings in (
        TransformersTrainer(train, output_dir="out").run_settings(),
        TransformersTrainer(train, enable_jit_checkpoint=True).run_settings(),
    ):
        assert (settings.save_strategy, settings.save_steps, settings.save_total_limit) == (None, None, None)
    config = PeriodicCheckpointConfig()
    given = TransformersTrainer(train, output_dir="out", periodic_checkpoint_config=config).run_settings()
    assert (given.save_strategy, given.save_total_limit) == ("epoch", 3)


def test_types_of_kubeflow_can_be_imported_from_safepoint() -> None:
    """All that `kubeflow.trainer` exports; a name of Safepoint's own is Safepoint's."""
    for name in kubeflow.__all__:
        found = getattr(safepoint, name)
        assert found is (TrainerClient if name == "TrainerClient" else getattr(kubeflow, name)), name
    from safepoint.sdk import options

    assert options.Labels is kubeflow.options.Labels  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = safepoint.NoSuchName


def test_the_clients_methods_return_safepoints_jobs() -> None:
    """Their annotations say so."""
    for method, kind in (("get_job", TrainJob), ("wait_for_job_status", TrainJob), ("list_jobs", list[TrainJob])):
        assert typing.get_type_hints(getattr(TrainerClient, method))["return"] == kind, method


def test_every_field_in_the_words_of_the_sdk_exists() -> None:
    """A message in these words can be followed."""
    fields = {
        field.name for kind in (TransformersTrainer, PeriodicCheckpointConfig) for field in dataclasses.fields(kind)
    }
    for words in wording._FIELDS.values():
        assert words.partition("=")[0].split(" ")[0] in fields, words


def test_hints_of_errors_name_fields(client: TrainerClient, caplog: pytest.LogCaptureFixture) -> None:
    """Also those of modules that serve the command line as well."""
    assert wording.in_sdk_words("give --output-dir or --from-scratch, see --yes") == (
        "give output_dir or from_scratch=True, see --yes"
    )
    with caplog.at_level(logging.WARNING, "safepoint"), pytest.raises(RuntimeError):
        client.resume_job("none")
    assert types.TrainJob is not TrainJob
