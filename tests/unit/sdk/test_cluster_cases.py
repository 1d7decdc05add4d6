"""Red Hat's public cases of the SDK on a cluster: what a trainer becomes (docs/notebooks.md has the table)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.sdk import PeriodicCheckpointConfig, TransformersTrainer
from safepoint.sdk.cluster_backend import cluster_spec, job_needs
from safepoint.sdk.options import SetByOptions, apply_options
from safepoint.sdk.upstream import KubernetesBackend, kubernetes_options
from safepoint.sdk.values import states_of
from tests.support.cluster.workspace import runtime

NOTHING: dict[str, Any] = {"name": None, "labels": {}, "annotations": {}, "patches": (), "deadline_s": None}
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_S3_ENDPOINT", "AWS_SECRET_ACCESS_KEY", "OTHER")


def train(lr: float = 0.1, batch_size: int = 1) -> None:
    print(lr, batch_size)


def job(*, keys: tuple[str, ...] | None = None, options: SetByOptions | None = None, **fields: Any) -> Any:
    """The TrainJob of a trainer."""
    spec = cluster_spec(TransformersTrainer(func=train, **fields), "torch", options or SetByOptions(**NOTHING))
    return manifests_for(spec, Runtime(document=runtime()), secret_keys=keys).trainjob


def environment(trainjob: Any) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in trainjob["spec"]["trainer"]["env"]}


def pod(trainjob: Any) -> Any:
    *_, own = trainjob["spec"]["runtimePatches"]
    (replicated,) = own["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    return replicated["template"]["spec"]["template"]["spec"]


def tracking(trainjob: Any) -> dict[str, str]:
    annotations = trainjob["metadata"]["annotations"]
    return {name.partition("/")[2]: text for name, text in annotations.items() if "opendatahub" in name}


# ---- volumes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_dir", "claim"),
    [("pvc://data", "data"), ("pvc://data/run", "data"), ("PVC://data//a/b/c/", "data")],
)
def test_a_claim(output_dir: str, claim: str) -> None:
    """Its root is mounted where users expect it, whatever the path."""
    found = pod(job(output_dir=output_dir))
    assert {"name": "checkpoint-storage", "persistentVolumeClaim": {"claimName": claim}} in found["volumes"]
    (container,) = found["containers"]
    assert container["name"] == "node"
    assert {"name": "checkpoint-storage", "mountPath": "/mnt/kubeflow-checkpoints"} in container["volumeMounts"]


def test_a_bucket_has_a_local_folder() -> None:
    found = pod(job(output_dir="s3://bucket/prefix", data_connection_name="models"))
    assert {"name": "checkpoint-storage", "emptyDir": {}} in found["volumes"]


@pytest.mark.parametrize("output_dir", [None, "/workspace/checkpoints", "checkpoints"])
def test_no_volume_for_other_places(output_dir: str | None) -> None:
    assert "checkpoint-storage" not in json.dumps(pod(job(output_dir=output_dir)))


def test_a_path_of_several_pods_is_refused() -> None:
    """Unlike Red Hat's: each pod would have a folder of its own, and no checkpoint would be complete."""
    with pytest.raises(UsageError, match="a separate folder in each of the 2 pods"):
        job(output_dir="/workspace/checkpoints", num_nodes=2)


# ---- keys -----------------------------------------------------------------------------------------------------


def test_every_key_of_the_connection_is_a_reference() -> None:
    found = environment(job(output_dir="s3://bucket/prefix", data_connection_name="models", keys=KEYS))
    for key in KEYS:
        assert found[key] == {"secretKeyRef": {"name": "models", "key": key}}


def test_no_references_for_a_claim() -> None:
    assert "secretKeyRef" not in json.dumps(job(output_dir="pvc://data/run"))


def test_a_key_in_env_is_refused() -> None:
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID, which all readers"):
        job(output_dir="s3://b/p", data_connection_name="models", keys=KEYS, env={"AWS_ACCESS_KEY_ID": "key"})


def test_another_variable_of_the_connection_may_be_set_in_env() -> None:
    """Unlike Red Hat's, which refuses it: the value in `env` counts."""
    trainjob = job(
        output_dir="s3://b/p", data_connection_name="models", keys=KEYS, env={"AWS_DEFAULT_REGION": "eu-1"}
    )
    assert environment(trainjob)["AWS_DEFAULT_REGION"] == "eu-1"
    assert [one["name"] for one in trainjob["spec"]["trainer"]["env"]].count("AWS_DEFAULT_REGION") == 1


def test_a_bucket_needs_a_connection() -> None:
    with pytest.raises(ValueError, match="requires data_connection_name"):
        job(output_dir="s3://bucket/prefix")


# ---- annotations ----------------------------------------------------------------------------------------------


def test_progress_is_tracked() -> None:
    expected = {"progression-tracking": "true", "metrics-port": "28080", "metrics-poll-interval": "30"}
    assert tracking(job()) == expected


def test_another_port_and_interval() -> None:
    found = tracking(job(metrics_port=8888, metrics_poll_interval_seconds=60))
    assert (found["metrics-port"], found["metrics-poll-interval"]) == ("8888", "60")


def test_progress_is_not_tracked() -> None:
    assert tracking(job(enable_progression_tracking=False)) == {}


def test_annotations_of_the_user_count() -> None:
    options = SetByOptions(**{**NOTHING, "annotations": {"trainer.opendatahub.io/metrics-port": "1", "a": "b"}})
    trainjob = job(options=options)
    assert tracking(trainjob)["metrics-port"] == "1"
    assert trainjob["metadata"]["annotations"]["a"] == "b"


# ---- the trainer ----------------------------------------------------------------------------------------------


def test_nodes_resources_and_variables() -> None:
    trainjob = job(
        num_nodes=4,
        resources_per_node={"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 1},
        env={"HF_HOME": "/data", "UNSET": None},
        output_dir="pvc://data/run",
    )
    trainer = trainjob["spec"]["trainer"]
    assert trainer["numNodes"] == 4
    wanted = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert trainer["resourcesPerNode"] == {"requests": wanted, "limits": wanted}
    assert environment(trainjob)["HF_HOME"] == "/data"
    assert "UNSET" not in environment(trainjob)


def test_arguments_of_the_function() -> None:
    trainer = TransformersTrainer(func=train, func_args={"lr": 0.001, "batch_size": 32})
    script = cluster_spec(trainer, "torch", SetByOptions(**NOTHING)).files["train.py"].decode()
    assert "train(**{'lr': 0.001, 'batch_size': 32})" in script


def test_packages() -> None:
    found = environment(job(packages_to_install=["datasets"], pip_index_urls=["https://a/simple"]))
    assert json.loads(found["SAFEPOINT_PACKAGES"]) == ["--index-url=https://a/simple", "datasets"]


def test_when_to_save() -> None:
    config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=20, save_total_limit=2)
    found = environment(job(output_dir="pvc://data/run", periodic_checkpoint_config=config))
    names = ("SAFEPOINT_SAVE_STRATEGY", "SAFEPOINT_SAVE_STEPS", "SAFEPOINT_SAVE_TOTAL_LIMIT")
    assert [found[name] for name in names] == ["steps", "20", "2"]


# ---- options --------------------------------------------------------------------------------------------------


def test_labels_and_a_patch() -> None:
    """A queue becomes the job's queue, so it is looked for before anything is created."""
    patch = kubernetes_options.RuntimePatch(
        training_runtime_spec=kubernetes_options.TrainingRuntimeSpecPatch(
            template=kubernetes_options.JobSetTemplatePatch(metadata={"labels": {"a": "b"}})
        )
    )
    labels = kubernetes_options.Labels({"kueue.x-k8s.io/queue-name": "gpus", "team": "a"})
    options = apply_options([labels, patch], None, object.__new__(KubernetesBackend))
    trainjob = job(options=options)
    assert {"kueue.x-k8s.io/queue-name": "gpus", "team": "a"}.items() <= trainjob["metadata"]["labels"].items()
    managers = [one["manager"] for one in trainjob["spec"]["runtimePatches"]]
    assert managers == ["trainer.kubeflow.org/kubeflow-sdk", "safepoint.dev/job"]
    assert cluster_spec(TransformersTrainer(func=train), "torch", options).queue == "gpus"


# ---- certificates, which Red Hat's SDK does not have ----------------------------------------------------------


def test_certificates_are_brought_along(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----")
    fields = {"output_dir": "s3://b/p", "data_connection_name": "models"}
    assert environment(job(ca_bundle=bundle, **fields))["AWS_CA_BUNDLE"] == "/opt/safepoint/ca-bundle.pem"
    assert environment(job(ca_bundle="/etc/ca.pem", **fields))["AWS_CA_BUNDLE"] == "/etc/ca.pem"
    bundle.write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(UsageError, match="contains a private key"):
        job(ca_bundle=bundle, **fields)


@pytest.mark.parametrize("interval", [0, -1])
def test_intervals_of_a_wait(interval: int) -> None:
    with pytest.raises(UsageError, match="must be more than 0"):
        states_of({"Complete"}, interval)


# ---- sizes of the plan, which Red Hat's SDK does not have -----------------------------------------------------


def test_the_plan_of_a_model_that_the_arguments_name(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 1, "num_attention_heads": 2}))

    def tune(model_name_or_path: str, bf16: bool, labels: list[str | None]) -> None:
        print(model_name_or_path, bf16, labels)

    trainer = TransformersTrainer(
        func=tune,
        func_args={"model_name_or_path": str(tmp_path / "config.json"), "bf16": True, "labels": [None]},
        output_dir="s3://bucket/run",
        data_connection_name="models",
        periodic_checkpoint_config=PeriodicCheckpointConfig(),
        resources_per_node={"nvidia.com/gpu": 1},
    )
    spec = cluster_spec(trainer, "torch", SetByOptions(**NOTHING))
    needs = job_needs(trainer, spec)
    assert needs is not None
    assert (needs.problem, needs.unlimited) == ("", "")
    found = pod(manifests_for(replace(spec, needs=needs), Runtime(document=runtime())).trainjob)
    (limit,) = [one["emptyDir"] for one in found["volumes"] if one["name"] == "checkpoint-storage"]
    assert limit == {"sizeLimit": str(needs.local_bytes)}


def test_the_plan_of_a_model_that_the_initializer_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    fields = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16}
    (snapshot / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 1, "num_attention_heads": 2}))
    trainer = TransformersTrainer(func=train, output_dir="pvc://claim/run")
    spec = cluster_spec(trainer, "torch", SetByOptions(**NOTHING))
    named = replace(spec, initializer={"model": {"storageUri": "hf://org/tiny"}})
    needs = job_needs(trainer, named)
    assert needs is not None
    assert "hf://org/tiny" in needs.model
    assert job_needs(trainer, spec) is None


@pytest.mark.parametrize(("limit", "expected"), [("8Gi", 8 << 30), (8 << 30, 8 << 30), ("none", None)])
def test_a_limit_of_the_local_folder(limit: int | str, expected: int | None) -> None:
    trainer = TransformersTrainer(
        func=train, output_dir="s3://bucket/run", data_connection_name="models", local_limit=limit
    )
    spec = cluster_spec(trainer, "torch", SetByOptions(**NOTHING))
    assert (spec.staging_bytes, spec.is_staging_given) == (expected, True)


@pytest.mark.parametrize("limit", ["8Gi", 8 << 30])
def test_a_limit_of_shared_memory(limit: int | str) -> None:
    trainer = TransformersTrainer(func=train, shared_memory=limit)
    assert cluster_spec(trainer, "torch", SetByOptions(**NOTHING)).shared_memory_bytes == 8 << 30
