"""Initializers, runtimes and trainers of other SDKs on this machine: what works, and what is refused first."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import SafepointError
from safepoint.jobs.local.history import History
from safepoint.jobs.model.spec import JobSpec
from safepoint.sdk import LocalConfig, TrainerClient, TransformersTrainer
from safepoint.sdk.local import inputs
from safepoint.sdk.local.spec import LocalJob, local_job
from safepoint.sdk.local.training_hub import is_training_hub, training_hub_job
from safepoint.sdk.upstream import trainer as kubeflow
from safepoint.sdk.upstream import types

HUB_DATA, HUB_MODEL = kubeflow.HuggingFaceDatasetInitializer, kubeflow.HuggingFaceModelInitializer
S3_DATA, S3_MODEL = kubeflow.S3DatasetInitializer, kubeflow.S3ModelInitializer


def train() -> None:
    print("trained")


@pytest.fixture(autouse=True)
def workspace(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace of pods, below a folder of the test."""
    targets = {kind: str(machine / "workspace" / kind) for kind in inputs.TARGETS}
    monkeypatch.setattr(inputs, "TARGETS", targets)
    return machine / "workspace"


@pytest.fixture
def client(machine: Path) -> TrainerClient:
    return TrainerClient(LocalConfig())


def job_with(dataset: Any = None, model: Any = None, **config: Any) -> LocalJob:
    initializer = kubeflow.Initializer(dataset=dataset, model=model)
    return local_job(TransformersTrainer(train), LocalConfig(**config), None, initializer)


def test_initializers_become_inputs(machine: Path, workspace: Path) -> None:
    """With the paths of pods; keys and tokens are in files of the job's folder, not in its specification."""
    job = job_with(
        HUB_DATA("hf://somebody/rows", ignore_patterns=["*.csv"], access_token="hf_secret"),
        S3_MODEL(
            "s3://models/tiny",
            endpoint="http://127.0.0.1:9000",
            region="here",
            access_key_id="AKIASECRET",
            secret_access_key="verysecret",
        ),
    )
    dataset, model = job.spec.inputs
    assert (dataset.source, dataset.ignore, dataset.target) == (
        "hf://somebody/rows",
        ("*.csv",),
        str(workspace / "dataset"),
    )
    assert model.env == {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9000", "AWS_REGION": "here"}
    assert "*.bin" in model.ignore, "Kubeflow's default"
    assert json.loads(job.files["dataset-initializer.keys.json"]) == {"HF_TOKEN": "hf_secret"}
    keys = {"AWS_ACCESS_KEY_ID": "AKIASECRET", "AWS_SECRET_ACCESS_KEY": "verysecret"}
    assert json.loads(job.files["model-initializer.keys.json"]) == keys
    assert os.path.realpath(workspace) == str(machine / "cache" / "safepoint" / "workspace")
    assert JobSpec.from_json(job.spec.to_json()) == job.spec


def test_folders_of_this_machine(machine: Path) -> None:
    """As a path, as a URL and in a claim."""
    for name in ("data", "claim/tiny"):
        (machine / name).mkdir(parents=True)
    for text in (str(machine / "data"), "./data", f"file://{machine}/data"):
        assert job_with(HUB_DATA(text)).spec.inputs[0].source == str(machine / "data")
    job = job_with(model=HUB_MODEL("pvc://models/tiny"), pvc={"models": machine / "claim"})
    assert [one.source for one in job.spec.inputs] == [str(machine / "claim" / "tiny")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HUB_DATA("somebody/rows"), r"dataset.storage_uri 'somebody/rows' is not supported.*use 'hf://"),
        (lambda: HUB_DATA("s3://bucket/rows"), "use an initializer for S3"),
        (lambda: HUB_DATA("hf://a/b/c"), "names no repository"),
        (lambda: HUB_DATA("./missing"), "there is no folder .*/missing; nothing was started"),
        (lambda: HUB_DATA("pvc://unknown/rows"), r"LocalConfig\(pvc="),
        (lambda: HUB_DATA(3), "storage_uri is 3; it must be a string"),
        (lambda: HUB_DATA("hf://a/b", ignore_patterns="*.csv"), "dataset.ignore_patterns must be a list of patterns"),
        (lambda: HUB_DATA("hf://a/b", access_token=3), "dataset.access_token must be a string"),
        (lambda: S3_DATA("s3://bucket/x", role_arn="arn:x"), "dataset.role_arn is not supported.*AWS_PROFILE"),
        (lambda: S3_DATA("s3://bucket/x", access_key_id="x"), "only one of access_key_id and secret_access_key"),
        (lambda: S3_DATA("s3://"), "dataset.storage_uri"),
        (lambda: S3_DATA("s3://bucket/x", endpoint="ftp://x"), "dataset: endpoint 'ftp://x' must begin with http://"),
        (
            lambda: kubeflow.DataCacheInitializer("cache://a/b", metadata_loc="s3://x", num_data_nodes=2),
            r"dataset is a DataCacheInitializer, .*nothing was started — read the dataset's table in the training",
        ),
        (lambda: "hf://a/b", "dataset is a str, which is not an initializer of Kubeflow"),
    ],
)
def test_initializers_that_cannot_work(client: TrainerClient, make: Callable[[], Any], message: str) -> None:
    """Each is refused with the argument and the way out, and no job is stored."""
    with pytest.raises(ValueError, match=message):
        client.train(trainer=TransformersTrainer(train), initializer=kubeflow.Initializer(dataset=make()))
    with History() as history:
        assert history.jobs() == []


def test_other_runtimes(client: TrainerClient, caplog: pytest.LogCaptureFixture) -> None:
    """Those for PyTorch work, by name or as an object, with a warning; others are refused."""
    own = client.get_runtime("torch-distributed")
    for name in ("torch-distributed-rocm", "training-hub03-cuda128-torch28-py312", "training-hub"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "safepoint"):
            assert client.get_runtime(name) == own
        assert f"this machine has no runtime '{name}'; 'torch-distributed' is used in its place" in caplog.text
    theirs = dataclasses.replace(own, name="my-team") if hasattr(own, "kind") else own
    caplog.clear()
    with pytest.raises(ValueError, match="trainer is None"):  # the runtime was accepted
        client.train(runtime=theirs)
    assert "this machine has no runtime 'my-team'" in caplog.text
    jax = types.RuntimeTrainer(trainer_type=own.trainer.trainer_type, framework="jax", image="x")
    with pytest.raises(NotImplementedError, match=r"runtime 'jax' is for jax.*leave out the argument runtime"):
        client.train(runtime=dataclasses.replace(own, name="jax", trainer=jax), trainer=TransformersTrainer(train))
    for name in ("torchtune-llama3.2-1b", "mlx-distributed", "my-team"):
        with pytest.raises(RuntimeError, match=f"no runtime '{name}'.*leave out the argument runtime"):
            client.get_runtime(name)


# ---- training-hub ------------------------------------------------------------------------------------------------


def hub_trainer(**fields: Any) -> Any:
    """A trainer as Red Hat's version has it."""
    kind = dataclasses.make_dataclass(
        "TrainingHubTrainer",
        [
            *((name, Any, None) for name in ("func", "func_args", "packages_to_install", "pip_index_urls", "env")),
            *((name, Any, None) for name in ("algorithm", "resources_per_node")),
            ("metrics_port", int, 28080),
        ],
    )
    kind.__module__ = "kubeflow.trainer.rhai.traininghub"
    return kind(**fields)


@pytest.fixture
def library(machine: Path) -> Path:
    (machine / "training_hub.py").write_text("def sft(**arguments):\n    print('sft', arguments)\n")
    return machine


def test_an_algorithm_of_training_hub(library: Path) -> None:
    """One rank calls it, without the rendezvous of that rank."""
    trainer = hub_trainer(algorithm="sft", func_args={"model_path": "tiny", "nproc_per_node": 2})
    assert is_training_hub(trainer)
    job = local_job(training_hub_job(trainer, LocalConfig()), LocalConfig(), None)
    assert (job.spec.ranks_per_node, job.spec.num_nodes, job.spec.cpu_per_node) == (1, 1, 2)
    script = job.files["train.py"].decode()
    assert script.index("del os.environ[name]") < script.index("run_algorithm(**{'algorithm': 'sft'")
    assert "'arguments': {'model_path': 'tiny', 'nproc_per_node': 2}" in script


@pytest.mark.parametrize(("processes", "gpus"), [(2, 2), ("2", 2), ("auto", 4), (None, 1)])
def test_training_hub_has_the_gpus_of_its_processes(
    library: Path, monkeypatch: pytest.MonkeyPatch, processes: Any, gpus: int
) -> None:
    """If the trainer names no resources: without a GPU slot, a job sees no GPU."""
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "4")
    arguments = {} if processes is None else {"nproc_per_node": processes}
    trainer = hub_trainer(algorithm="sft", func_args=arguments)
    spec = local_job(training_hub_job(trainer, LocalConfig()), LocalConfig(), None).spec
    assert (spec.gpu_per_node, spec.ranks_per_node) == (gpus, 1)


def test_a_function_of_training_hub(library: Path) -> None:
    """It receives its arguments as one dict, as in a pod."""

    def mine(values):  # type: ignore[no-untyped-def]
        print(values["lr"])

    job = local_job(training_hub_job(hub_trainer(func=mine, func_args={"lr": 1}), LocalConfig()), LocalConfig(), None)
    assert "mine(**{'values': {'lr': 1}})" in job.files["train.py"].decode()
    job = local_job(training_hub_job(hub_trainer(func=train), LocalConfig()), LocalConfig(), None)
    assert "train(**{})" in job.files["train.py"].decode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"func_args": {}}, "algorithm is None; nothing was started — set algorithm"),
        ({"algorithm": "sft; x"}, "algorithm is 'sft; x'"),
        ({"algorithm": "sft", "func_args": [1]}, "func_args must be"),
        ({"algorithm": "sft", "func_args": {"nnodes": 2}}, "func_args has nnodes=2.*set nproc_per_node"),
        ({"func": train, "func_args": {"lr": 1}}, "func takes no argument"),
    ],
)
def test_what_training_hub_cannot_do_here(library: Path, fields: dict[str, Any], message: str) -> None:
    """Before anything starts."""
    with pytest.raises(SafepointError, match=message):
        training_hub_job(hub_trainer(**fields), LocalConfig())


def test_without_training_hub(client: TrainerClient) -> None:
    """The message says what to install."""
    with pytest.raises(
        NotImplementedError, match=r"needs training-hub, .*nothing was started — pip install training-hub"
    ):
        client.train(trainer=hub_trainer(algorithm="sft"))
