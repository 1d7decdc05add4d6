"""Jobs of this machine that need a data set and a model first, and jobs of training-hub."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation.files import delete_tree
from safepoint.jobs.local.paths import cache_folder, job_folder
from safepoint.sdk import PeriodicCheckpointConfig, TrainerClient, TrainJob, TransformersTrainer
from safepoint.sdk.local import inputs
from safepoint.sdk.upstream import trainer as kubeflow
from tests.ranks.test_sdk import (
    client,  # noqa: F401  the fixture
    is_at_step,
    wait_until,
)
from tests.support.hub import cached_repository
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE
from tests.support.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def train_on_inputs(workspace, pause_s=0.0):  # type: ignore[no-untyped-def]
    """Reads its rows and its model where a pod has them."""
    import json
    import time
    from pathlib import Path

    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(pause_s)

    rows = [json.loads(line) for line in (Path(workspace) / "dataset" / "rows.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(Path(workspace) / "model")
    args = TrainingArguments("/placeholder", num_train_epochs=1, per_device_train_batch_size=2, report_to="none")
    Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[Pause()]
    ).train()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace of pods, below a folder of the test."""
    targets = {kind: str(tmp_path / "workspace" / kind) for kind in inputs.TARGETS}
    monkeypatch.setattr(inputs, "TARGETS", targets)
    return tmp_path / "workspace"


def test_a_job_with_initializers(
    client: TrainerClient,  # noqa: F811  the fixture
    moto: MotoServer,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bucket and the cache of the Hub; a resume fetches nothing; a fetch that fails is the failure of the job."""
    store = moto.store("job-inputs")
    row = json.dumps(list(range(8)))
    store.write("rows.jsonl", "\n".join([row] * 40).encode())
    save_tiny_model(tmp_path / "tiny", ["a line"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    cached_repository(tmp_path / "huggingface", "somebody/tiny", files, kind="model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    initializer = kubeflow.Initializer(
        dataset=kubeflow.S3DatasetInitializer(
            f"s3://{moto.bucket}/job-inputs",
            endpoint=moto.endpoint,
            region="us-east-1",
            access_key_id=moto.keys[0],
            secret_access_key=moto.keys[1],
        ),
        model=kubeflow.HuggingFaceModelInitializer("hf://somebody/tiny"),
    )
    trainer = TransformersTrainer(
        train_on_inputs,
        {"workspace": str(workspace), "pause_s": 0.4},
        output_dir=str(tmp_path / "out"),
        periodic_checkpoint_config=PeriodicCheckpointConfig("no"),
    )
    name = client.train(trainer=trainer, initializer=initializer, runtime="torch-distributed-rocm")
    lines = list(client.get_job_logs(name, step="dataset-initializer", follow=True))
    assert any("fetching 1 files" in line for line in lines), lines
    wait_until(client, name, is_at_step(4))
    assert any("complete: " in line for line in client.get_job_logs(name, step="model-initializer"))
    assert not any("complete: " in line for line in client.get_job_logs(name))
    assert client.suspend_job(name).exit_code == 75
    store.delete("rows.jsonl")
    client.resume_job(name)
    job = client.wait_for_job_status(name, timeout=400 * PATIENCE, polling_interval=1)
    assert isinstance(job, TrainJob)
    assert [(step.name, step.status) for step in job.steps] == [
        ("dataset-initializer", "Succeeded"),
        ("model-initializer", "Succeeded"),
        ("node-0", "Succeeded"),
    ]
    assert list(client.get_job_logs(name, step="dataset-initializer")) == lines, "nothing is fetched twice"
    assert not list(job_folder(name).glob("*.keys.json"))

    delete_tree(cache_folder() / "inputs")
    name = client.train(trainer=dataclasses.replace(trainer, output_dir=None), initializer=initializer)
    with pytest.raises(RuntimeError):
        client.wait_for_job_status(name, timeout=200 * PATIENCE, polling_interval=1)
    job = client.get_job(name)
    assert (
        "the dataset s3://checkpoints/job-inputs was not fetched: there are no objects at this location"
        in job.message
    )
    assert any("safepoint: error: " in line for line in client.get_job_logs(name, step="dataset-initializer"))
    assert list(client.get_job_logs(name)) == [], "no rank was started"


def test_training_hub(
    client: TrainerClient,  # noqa: F811  the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own function is called, once, and finds no rendezvous that is not its own; its error fails the job."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "training_hub.py").write_text(
        "import os\n"
        "def sft(model_path, nproc_per_node):\n"
        "    left = [name for name in os.environ if name.startswith(('MASTER_', 'PET_')) or name == 'RANK']\n"
        "    print('sft of', model_path, 'finds', left)\n"
        "def osft():\n"
        "    raise ValueError('no such data')\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2] / 'src'}")
    fields = ("func", "func_args", "packages_to_install", "algorithm", "resources_per_node")
    kind: Any = dataclasses.make_dataclass("TrainingHubTrainer", [(name, Any, None) for name in fields])
    kind.__module__ = "kubeflow.trainer.rhai.traininghub"
    name = client.train(trainer=kind(algorithm="sft", func_args={"model_path": "tiny", "nproc_per_node": 2}))
    client.wait_for_job_status(name, timeout=200 * PATIENCE, polling_interval=1)
    assert [line for line in client.get_job_logs(name) if "sft of" in line] == ["sft of tiny finds []"]
    name = client.train(trainer=kind(algorithm="osft"))
    with pytest.raises(RuntimeError):
        client.wait_for_job_status(name, timeout=400 * PATIENCE, polling_interval=1)
    assert any("no such data" in line for line in client.get_job_logs(name))
