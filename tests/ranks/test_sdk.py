"""Jobs from Python: the examples of Red Hat's articles and documentation, with another import and a tiny model."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.verify import verify
from safepoint.foundation.processes import kill, processes_of
from safepoint.jobs.local.paths import job_folder, state_folder
from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TrainJob, TransformersTrainer
from safepoint.sdk.upstream import trainer as kubeflow
from tests.support.jobs import environment, wait_until_gone
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server
from tests.support.supervisors import supervisor_pid
from tests.support.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def train_func(model_path, dataset_path, pause_s=0.0):  # type: ignore[no-untyped-def]
    """The function of the article, with its paths as arguments; each step can be made longer."""
    import time

    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
    from trl import SFTTrainer

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(pause_s)

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    dataset = load_from_disk(dataset_path)
    training_args = TrainingArguments(
        output_dir="/placeholder",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        logging_steps=5,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Pause()],
    )
    trainer.train()
    print("the end of the training function")


def train_fn(model_path, accumulation=1, pause_s=0.0):  # type: ignore[no-untyped-def]
    """The documentation shows only the function's name; a plain Trainer starts sooner than TRL's."""
    import time

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(pause_s)

    rows = torch.randint(0, 250, (64, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(output_dir="/placeholder", num_train_epochs=3, logging_steps=5, report_to="none", seed=3)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = 2, accumulation
    model = AutoModelForCausalLM.from_pretrained(model_path)
    Trainer(model, args, train_dataset=data, callbacks=[Pause()]).train()


def fails() -> None:
    raise RuntimeError("this function fails on purpose")


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the article downloads first: a model, and 96 rows of text."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("sdk")
    texts = [f"line {number}: {Path(__file__).read_text()[number * 20 : number * 20 + 60]}" for number in range(96)]
    save_tiny_model(folder / "model", texts)
    Dataset.from_dict({"text": texts}).save_to_disk(folder / "data")
    return folder


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    """A client for a machine of its own; no process is left behind."""
    for name, text in environment().items():
        monkeypatch.setenv(name, text)
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    client = TrainerClient(LocalConfig(pvc={"my-checkpoints-pvc": tmp_path / "claim"}))
    try:
        yield client
    finally:
        for job in client.list_jobs():
            supervisor = supervisor_pid(job.name)
            kill([supervisor] if supervisor is not None else [])
            pids = processes_of(job_folder(job.name))
            kill(pids)
            wait_until_gone(pids)


def wait_until(
    client: TrainerClient, name: str, is_there: Callable[[TrainJob], bool], timeout_s: float = 240
) -> TrainJob:
    deadline = time.monotonic() + timeout_s * PATIENCE
    while True:
        job = client.get_job(name)
        assert isinstance(job, TrainJob)
        if is_there(job):
            return job
        assert job.status not in {"Failed", "Complete"}, (job, list(client.get_job_logs(name)))
        assert time.monotonic() < deadline, (job, list(client.get_job_logs(name)))
        time.sleep(0.05)


def is_at_step(step: int, **more: Any) -> Callable[[TrainJob], bool]:
    def is_there(job: TrainJob) -> bool:
        progress = job.progress
        return (
            progress is not None
            and progress.step >= step
            and all(getattr(progress, name) == value for name, value in more.items())
        )

    return is_there


def events_of(client: TrainerClient, name: str, reason: str) -> list[str]:
    return [event.message for event in client.get_job_events(name) if event.reason == reason]


def test_the_article_on_a_claim(client: TrainerClient, ingredients: Path, tmp_path: Path) -> None:
    """Two nodes, a checkpoint every 10 steps, paused and resumed as in the dashboard."""
    checkpoint_config = PeriodicCheckpointConfig(
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
    )
    trainer = TransformersTrainer(
        func=train_func,
        func_args={
            "model_path": str(ingredients / "model"),
            "dataset_path": str(ingredients / "data"),
            "pause_s": 0.3,
        },
        num_nodes=2,
        resources_per_node={"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"},
        output_dir="pvc://my-checkpoints-pvc/llama3-fine-tune",
        enable_jit_checkpoint=True,
        periodic_checkpoint_config=checkpoint_config,
    )
    name = client.train(trainer=trainer)
    assert (
        client.wait_for_job_status(name, {"Running"}, timeout=120 * PATIENCE, polling_interval=1).status == "Running"
    )
    wait_until(client, name, is_at_step(12))
    job = client.suspend_job(name)
    assert (job.status, job.exit_code, job.steps) == ("Suspended", 75, [])
    assert job.safe_step is not None
    assert job.safe_step >= 12
    newest = client.list_checkpoints(name)[0]
    assert (newest.step, newest.trigger, newest.is_complete) == (job.safe_step, "jit", True)
    assert Path(newest.path).parent == tmp_path / "claim" / "llama3-fine-tune"
    client.resume_job(name)
    wait_until(client, name, lambda job: job.status == "Running")
    job = client.wait_for_job_status(name, timeout=400 * PATIENCE, polling_interval=1)
    assert (job.status, job.num_nodes, [step.status for step in job.steps]) == ("Complete", 2, ["Succeeded"] * 2)
    assert isinstance(job, TrainJob)
    assert job.progress is not None
    assert (job.progress.step, job.progress.percent, job.progress.world_size) == (36, 100.0, 2)
    assert any(f"step {newest.step}" in message for message in events_of(client, name, "Resumed"))
    assert [one.step for one in client.list_checkpoints(name)] == [36, 30]
    lines = list(client.get_job_logs(name, step="rank-0"))
    assert lines.count("the end of the training function") == 1, "it runs after the training and not after a pause"
    assert any("the end of the training function" in line for line in client.get_job_logs(name, step="node-1"))


class Bucket:
    """A server whose keys are in a connection; no other file contains the secret."""

    def __init__(self, server: S3Server, config: Path) -> None:
        self.server = server
        self.prefix = f"sdk-{uuid.uuid4().hex[:8]}"
        self.variables = dict(server.variables)
        if isinstance(server, MotoServer):  # which lets anybody in
            self.variables |= {
                "AWS_ACCESS_KEY_ID": f"id-{uuid.uuid4()}",
                "AWS_SECRET_ACCESS_KEY": f"key-{uuid.uuid4()}",
            }
        path = config / "safepoint" / "connections.toml"
        path.parent.mkdir(parents=True)
        path.touch(mode=0o600)
        lines = [f'{name} = "{text}"' for name, text in self.variables.items()]
        path.write_text("\n".join(["[s3-storage-connection]", *lines]))

    @property
    def location(self) -> str:
        return str(self.server.location(self.prefix))

    def places_of_keys(self, folder: Path) -> list[str]:
        """The files below a folder and the command lines of processes that contain a key."""
        keys = [self.variables[name].encode() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        titles = [Path(f"/proc/{process}/cmdline") for process in processes_in_all()]
        found: list[str] = []
        for path in [*folder.rglob("*"), *titles]:
            try:
                data = path.read_bytes() if path.is_file() else b""
            except OSError:
                continue
            if any(key in data for key in keys):
                found.append(str(path))
        return found


def processes_in_all() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.long), pytest.param("rgw", marks=pytest.mark.s3)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, client: TrainerClient) -> Bucket:
    return Bucket(request.getfixturevalue(request.param), tmp_path / "config")


def test_the_article_in_an_object_store(
    client: TrainerClient, bucket: Bucket, ingredients: Path, tmp_path: Path
) -> None:
    """Checkpoints and the model are uploaded; keys are only in the environment of processes."""
    trainer = TransformersTrainer(
        func=train_func,
        func_args={
            "model_path": str(ingredients / "model"),
            "dataset_path": str(ingredients / "data"),
            "pause_s": 0.1,
        },
        num_nodes=2,
        resources_per_node={"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"},
        output_dir=bucket.location,
        data_connection_name="s3-storage-connection",
        enable_jit_checkpoint=True,
        verify_cloud_storage_ssl=False,
        verify_cloud_storage_access=True,
        periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=20, save_total_limit=2),
    )
    name = client.train(trainer=trainer)
    job = wait_until(client, name, is_at_step(10))
    assert job.output_dir == bucket.location
    assert processes_of(job_folder(name)), "there is something to look at"
    assert bucket.places_of_keys(tmp_path) == [str(tmp_path / "config" / "safepoint" / "connections.toml")]
    lines = list(client.get_job_logs(name, follow=True))
    assert "the end of the training function" in lines
    job = client.wait_for_job_status(name, timeout=100 * PATIENCE, polling_interval=1)
    found = client.list_checkpoints(name)
    assert [one.name for one in found] == ["checkpoint-36", "checkpoint-20", "final"]
    assert all(one.is_complete and one.path.startswith(bucket.location) for one in found)
    assert bucket.places_of_keys(tmp_path) == [str(tmp_path / "config" / "safepoint" / "connections.toml")]
    assert list(state_folder().glob("jobs.sqlite3*"))
    client.delete_job(name, with_checkpoints=True)
    left = [item.key for item in bucket.server.store(bucket.prefix).list()]
    assert all(key.startswith(".safepoint/") or key == "README.md" for key in left), left  # TRL's model card


@pytest.mark.long
def test_chapter_6_with_only_an_output_folder(client: TrainerClient, ingredients: Path) -> None:
    """Two nodes, a rank for each requested GPU; the script's own arguments decide when to save."""
    trainer = TransformersTrainer(
        func=train_fn,
        func_args={"model_path": str(ingredients / "model")},
        num_nodes=2,
        resources_per_node={
            "nvidia.com/gpu": 2,
            "memory": "128Gi",
            "cpu": "8",
        },
        output_dir="pvc://my-checkpoints-pvc/llama3-fine-tune",
    )
    name = client.train(trainer=trainer)
    job = client.wait_for_job_status(name, timeout=500 * PATIENCE, polling_interval=1)
    assert isinstance(job, TrainJob)
    assert job.progress is not None
    assert job.progress.world_size == 4
    assert [one.step for one in client.list_checkpoints(name)] == [24], "64 samples, 8 in each step"


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (PeriodicCheckpointConfig(save_strategy="steps", save_steps=10, save_total_limit=2), [24, 20, 10]),
        (PeriodicCheckpointConfig(save_strategy="epoch", save_total_limit=2), [24, 16, 8]),
    ],
    ids=["steps", "epoch"],
)
def test_chapter_6_in_an_object_store(
    client: TrainerClient, bucket: Bucket, ingredients: Path, config: PeriodicCheckpointConfig, steps: list[int]
) -> None:
    """Both strategies, suspended once; a waiting older upload is replaced by the newer one."""
    trainer = TransformersTrainer(
        func=train_fn,
        func_args={"model_path": str(ingredients / "model"), "pause_s": 0.3},
        num_nodes=2,
        resources_per_node={"nvidia.com/gpu": 2},
        output_dir=bucket.location,
        data_connection_name="s3-storage-connection",
        periodic_checkpoint_config=config,
    )
    name = client.train(trainer=trainer)
    wait_until(client, name, is_at_step(12))
    job = client.suspend_job(name)
    stopped_at = job.safe_step
    assert job.status == "Suspended"
    assert stopped_at is not None
    client.resume_job(name)
    job = client.wait_for_job_status(name, timeout=500 * PATIENCE, polling_interval=1)
    assert isinstance(job, TrainJob)
    assert job.progress is not None
    assert (job.progress.step, job.progress.world_size) == (24, 4)
    found = {one.step for one in client.list_checkpoints(name) if one.name != "final"}
    assert {steps[0], stopped_at} <= found <= {*steps, stopped_at}
    saved = {event.message for event in client.get_job_events(name) if event.reason == "Saved"}
    assert all(any(f"step {step}" in message for message in saved) for step in steps), saved
    assert all(one.is_complete and one.path.startswith(bucket.location) for one in client.list_checkpoints(name))


@pytest.mark.long
def test_scaled_up_and_down(client: TrainerClient, ingredients: Path, tmp_path: Path) -> None:
    """1 → 2 → 1 nodes: each time it resumes where it stopped, and each step sees the same samples."""
    trainer = TransformersTrainer(
        train_fn,
        {"model_path": str(ingredients / "model"), "accumulation": 2, "pause_s": 0.3},
        output_dir="pvc://my-checkpoints-pvc/scaled",
        periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="no"),
    )
    name = client.train(trainer=trainer)
    for world_size, step in ((1, 8), (2, 20), (1, 30)):
        job = wait_until(client, name, is_at_step(step, world_size=world_size))
        assert job.num_nodes == world_size
        if step < 30:
            job = client.scale_job(name, 3 - world_size)
            assert job.num_nodes == 3 - world_size
    job = client.wait_for_job_status(name, timeout=300 * PATIENCE, polling_interval=1)
    assert isinstance(job, TrainJob)
    assert job.progress is not None
    assert (job.attempts, job.progress.step, job.progress.samples_per_step) == (3, 48, 4)
    newest = verify(Path(client.list_checkpoints(name)[0].path))
    assert newest.is_valid
    assert newest.manifest is not None
    assert newest.manifest.samples_seen == 192


@pytest.mark.long
def test_a_function_that_fails(client: TrainerClient) -> None:
    """A failing function raises both kinds of error, also with Kubeflow's trainer; logs have the traceback."""
    name = client.train(trainer=kubeflow.CustomTrainer(func=fails))
    with pytest.raises(RuntimeError, match=f"job {name} is Failed: exit code 1"):
        client.wait_for_job_status(name, timeout=300 * PATIENCE, polling_interval=1)
    assert "RuntimeError: this function fails on purpose" in list(client.get_job_logs(name))
    assert client.get_job(name).steps[0].status == "Failed"
    assert dataclasses.is_dataclass(client.get_job_events(name)[0])
