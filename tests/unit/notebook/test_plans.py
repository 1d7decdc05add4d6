"""What a job will need, in a cell and as text, for both kinds of backends; nothing is submitted."""

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.lib.pretty import pretty

from safepoint.sdk import PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
from safepoint.sdk.cluster_backend import ClusterBackend
from safepoint.sdk.upstream import types
from tests.unit.notebook.test_results import shown


def tune(model_name_or_path: str) -> None:
    print(model_name_or_path)


def trainer(home: Path, **fields: Any) -> TransformersTrainer:
    """A trainer of an 8 B model, of which only the configuration is here."""
    config = {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    (home / "config.json").write_text(json.dumps(config))
    return TransformersTrainer(func=tune, func_args={"model_name_or_path": str(home / "config.json")}, **fields)


def test_a_plan_is_a_table(home: Path, client: TrainerClient) -> None:
    """With a warning if a save does not fit into the grace period of the trainer."""
    plan = client.plan_job(trainer(home, grace_period_seconds=5, output_dir="out"))
    assert plan.needs.problem == ""
    assert plan.needs.checkpoint_bytes > 40 * 10**9
    text = shown(plan)
    assert (
        "What the job will need A save does not fit into the grace period of 5 s: set grace_period_seconds=" in text
    )
    assert "A checkpoint about " in text
    assert "Model " in text
    assert pretty(plan).splitlines()[0].startswith("Model: ")
    assert "Local folder of a pod" not in text
    assert "does not fit" not in shown(client.plan_job(trainer(home, grace_period_seconds=100_000)))
    assert client.list_jobs() == []


def test_a_plan_without_a_model(home: Path, client: TrainerClient) -> None:
    """The reason takes the place of the table."""
    plan = client.plan_job(TransformersTrainer(func=tune))
    expected = "The needs of the job are not known: neither func_args nor the initializer names a model that is on"
    assert expected in shown(plan)
    assert pretty(plan).startswith(expected)


def test_what_cannot_be_planned(client: TrainerClient) -> None:
    with pytest.raises(ValueError, match="trainer is a CustomTrainer, whose needs are not known"):
        client.plan_job(types.CustomTrainer(func=tune))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trainer must be a trainer, not a function"):
        client.plan_job(tune)  # type: ignore[arg-type]


def test_a_plan_for_a_cluster_sends_no_request(home: Path) -> None:
    """With an object store, it has the local folder of a pod; the model may be that of the initializer."""
    backend = object.__new__(ClusterBackend)  # without a connection
    remote: dict[str, Any] = {"output_dir": "s3://bucket/run", "data_connection_name": "models"}
    remote["periodic_checkpoint_config"] = PeriodicCheckpointConfig()  # keeps three
    plan = backend.plan_job(trainer(home, resources_per_node={"nvidia.com/gpu": 2}, num_nodes=2, **remote), None)
    assert "Local folder of a pod" in shown(plan)
    initializer = types.Initializer(model=types.HuggingFaceModelInitializer(storage_uri=f"file://{home}"))
    assert backend.plan_job(TransformersTrainer(func=tune), initializer).needs.problem.startswith("neither") is False
