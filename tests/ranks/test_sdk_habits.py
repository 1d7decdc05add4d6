"""What functions written for Red Hat's SDK do beside training: choose their own strategy, stop early, leave files."""

import re
from pathlib import Path

import pytest

from safepoint.sdk import TrainerClient, TrainJob, TransformersTrainer
from tests.ranks.test_sdk import (
    Bucket,
    client,  # noqa: F401  the fixture
    events_of,
    is_at_step,
    wait_until,
)
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def train_and_leave_files(pause_s=0.0):  # type: ignore[no-untyped-def]
    """Evaluates by steps, keeps the best, stops early, and writes into its output folder, before and after."""
    import json
    import os
    import time

    import torch
    from transformers import (
        EarlyStoppingCallback,
        Qwen2Config,
        Qwen2ForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(pause_s)

    rows = torch.randint(0, 60, (64, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir="/placeholder",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
    )
    os.makedirs(os.path.join(args.output_dir, "plots"), exist_ok=True)
    with open(os.path.join(args.output_dir, "plots", "loss.png"), "wb") as file:
        file.write(b"a plot")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    stop = EarlyStoppingCallback(2, early_stopping_threshold=1e6)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=[stop, Pause()])
    trainer.train()
    with open(os.path.join(args.output_dir, "metrics.json"), "w") as file:
        json.dump({"steps": trainer.state.global_step}, file)
    torch.save(model.state_dict(), os.path.join(args.output_dir, "plots", "my-weights.pt"))


def test_a_function_with_habits(
    client: TrainerClient,  # noqa: F811  the fixture
    moto: MotoServer,
    tmp_path: Path,
) -> None:
    """Its strategy stands; its files are uploaded at interruptions and at the end; it stops early at step 12."""
    bucket = Bucket(moto, tmp_path / "config")
    trainer = TransformersTrainer(
        func=train_and_leave_files,
        func_args={"pause_s": 0.5},
        output_dir=bucket.location,
        data_connection_name="s3-storage-connection",
    )
    name = client.train(trainer=trainer)
    wait_until(client, name, is_at_step(5))
    assert client.suspend_job(name).exit_code == 75
    store = bucket.server.store(bucket.prefix)
    assert bytes(store.read("plots/loss.png")) == b"a plot"
    client.resume_job(name)
    job = client.wait_for_job_status(name, timeout=400 * PATIENCE, polling_interval=1)
    assert isinstance(job, TrainJob)
    assert job.progress is not None
    assert (job.status, job.progress.step, job.progress.percent) == ("Complete", 12, 37.5)
    assert job.message == "training stopped early, at step 12 of 32"
    kept = {item.key for item in store.list() if item.key.startswith(("plots/", "metrics"))}
    assert kept == {"plots/loss.png", "plots/my-weights.pt", "metrics.json"}
    assert bytes(store.read("metrics.json")) == b'{"steps": 12}'
    saved = [one.step for one in client.list_checkpoints(name)]
    # The save at the interruption has a step of its own, unless it fell on a periodic one. It may replace the
    # periodic one of step 4 while that still waits, as a slow machine's does; an event records this.
    replaced = events_of(client, name, "SaveSuperseded") + events_of(client, name, "UploadSuperseded")
    assert saved[0] == 12, saved
    assert {8, 12} <= set(saved), saved
    assert 4 in saved or any(re.search(r"\bstep 4\b", message) for message in replaced), (saved, replaced)
    lines = list(client.get_job_logs(name))
    assert sum("other files of the output folder to" in line for line in lines) == 1, lines
