"""Folders of jobs as their processes leave them, for tests of the dashboard; no process is started."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import METRICS_NAME, MetricPoint
from safepoint.progress.record import PROGRESS_NAME, Progress, SaveStatistics, SpaceRecord, State
from safepoint.settings.run_settings import RunSettings
from tests.support.checkpoints import commit, prepared

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a job in a sample looks like.

    Args:
        name: of the job.
        state: its state.
        message: why it is in this state.
        step: steps done; 0 for a job that has not begun.
        steps: checkpoints in its output folder.
        attempts: how often it was started.
        num_points: points of its metrics.
        num_events: further events.
        save_s: how long a save takes.
        error: the last line of its output.
    """

    name: str
    state: JobState
    message: str = ""
    step: int = 0
    steps: tuple[int, ...] = ()
    attempts: int = 1
    num_points: int = 0
    num_events: int = 0
    save_s: float = 4.0
    num_nodes: int = 1
    error: str = ""
    low: bool = False


SAMPLES = (
    Sample(
        name="llama-sft-8b",
        state=JobState.RUNNING,
        step=1240,
        steps=(1000, 1100, 1200),
        attempts=3,
        num_points=1240,
        num_nodes=2,
        save_s=48.0,
    ),
    Sample(name="digits-baseline", state=JobState.COMPLETE, step=500, steps=(500,), num_points=120),
    Sample(
        name="dpo-beta-01",
        state=JobState.FAILED,
        message="rank 0 has ended with RuntimeError: CUDA out of memory",
        step=310,
        steps=(300,),
        num_points=310,
        error="RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    Sample(name="reward-model", state=JobState.SUSPENDED, step=820, steps=(800, 820), attempts=2, num_points=200),
    Sample(name="sweep-lr-3e-4", state=JobState.QUEUED, message="waits for 2 of 8 CPU slots", attempts=0),
    Sample(name="nightly-eval", state=JobState.PREEMPTED, message="in favour of llama-sft-8b", step=90, steps=(90,)),
    Sample(name="tokenizer-ablation", state=JobState.RUNNING, step=64, num_points=64, low=True),
)


def at(seconds_ago: float) -> str:
    """A time in the past, RFC 3339 UTC."""
    return clock.as_utc(clock.wall_s() - seconds_ago)


def write_sample(root: Path, sample: Sample, *, age_s: float = 2 * HOUR_S) -> Path:
    """Write a job; returns its output folder.

    Args:
        root: a folder for outputs.
        sample: what it looks like.
        age_s: how long ago it was submitted.
    """
    output = root / "out" / sample.name
    settings = RunSettings(output_dir=str(output), save_steps=100)
    spec = JobSpec(
        name=sample.name,
        program=("train.py", "--lr", "1e-4"),
        python=sys.executable,
        working_dir=str(root),
        num_nodes=sample.num_nodes,
        ranks_per_node=2,
        cpu_per_node=2,
        settings=settings,
    )
    folder = job_folder(sample.name)
    with History() as history:
        history.add(spec, actor="ada@workbench")
        for number in range(1, sample.attempts + 1):
            history.begin_attempt(sample.name, number, sample.num_nodes)
            if number < sample.attempts or not sample.state.holds_slots:
                outcome = str(sample.state) if number == sample.attempts else "Preempted: a machine was reclaimed"
                code = 1 if sample.state is JobState.FAILED and number == sample.attempts else 75
                history.end_attempt(sample.name, number, outcome=outcome, exit_code=code)
        columns: dict[str, Any] = {"attempt": sample.attempts, "safe_step": max(sample.steps, default=None)}
        if sample.attempts and not sample.state.holds_slots:
            columns["exit_code"] = {JobState.COMPLETE: 0, JobState.FAILED: 1}.get(sample.state, 75)
        if sample.state is JobState.SUSPENDED:
            columns["wanted"] = "suspend"
        history.become(sample.name, sample.state, actor="supervisor", message=sample.message, **columns)
        _spread(history, sample, age_s)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lines = [f"step {step}: loss {_loss(step):.4f}" for step in range(1, min(sample.step, 400) + 1)]
    (folder / "logs" / "rank-0.log").write_text("\n".join([*lines, sample.error, ""]))
    (folder / "logs" / "node-0.log").write_text("safepoint: 2 ranks started\n")
    if sample.step:
        (folder / PROGRESS_NAME).write_bytes(_progress(sample, output).to_bytes())
    gap = max(1, sample.step // max(1, sample.num_points))
    points = [_point(sample, step, age_s) for step in range(1, sample.step + 1, gap)] if sample.num_points else []
    (folder / METRICS_NAME).write_bytes(b"".join(point.to_line() for point in points))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in _events(sample, age_s)))
    if sample.steps:
        prepared(output)
        for step in sample.steps:
            commit(prepared(output), step)
    return output


def _spread(history: History, sample: Sample, age_s: float) -> None:
    """Spread the attempts over the age of the job."""
    database = history._db  # pyright: ignore[reportPrivateUsage]
    part_s = age_s / max(1, sample.attempts)
    with history.transaction():
        database.execute("UPDATE job SET created = ? WHERE name = ?", (at(age_s), sample.name))
        database.execute("UPDATE job SET changed = ? WHERE name = ?", (at(part_s * 0.9), sample.name))
        database.execute("UPDATE event SET time = ? WHERE job = ? AND name = 'submitted'", (at(age_s), sample.name))
        for number in range(1, sample.attempts + 1):
            began_s = age_s - (number - 1) * part_s - 30
            database.execute(
                "UPDATE attempt SET started = ? WHERE job = ? AND number = ?", (at(began_s), sample.name, number)
            )
            database.execute(
                "UPDATE attempt SET ended = ? WHERE job = ? AND number = ? AND ended IS NOT NULL",
                (at(began_s - part_s * 0.9), sample.name, number),
            )


def _loss(step: int) -> float:
    return 0.6 + 2.2 * math.exp(-step / 400) + 0.08 * math.sin(step * 1.7)


def _point(sample: Sample, step: int, age_s: float) -> MetricPoint:
    attempt = 1 + (step - 1) * max(1, sample.attempts) // max(1, sample.step)
    values = {
        "loss": _loss(step),
        "learning_rate": 1e-4 * min(1.0, step / 100) * (1 - step / 4000),
        "steps_per_s": 0.9 + 0.05 * math.sin(step / 30),
        "grad_norm": 1.0 + 0.3 * math.cos(step / 17),
        "samples_per_s": 58 + 2 * math.sin(step / 30),
    }
    time = at(age_s * (1 - step / max(1, sample.step)))
    return MetricPoint(time=time, attempt=attempt, step=step, values=values)


def _progress(sample: Sample, output: Path) -> Progress:
    states = {JobState.COMPLETE: State.FINISHED, JobState.FAILED: State.FAILED, JobState.RUNNING: State.TRAINING}
    safe = max(sample.steps, default=None)
    space = SpaceRecord(
        place="output folder",
        path=str(output),
        free_bytes=9_000_000_000,
        needed_bytes=4_000_000_000,
        saves_left=2 if sample.low else 40,
        remaining_s=1200.0 if sample.low else 90_000.0,
        is_low=sample.low,
    )
    return Progress(
        time=at(1.0),
        state=states.get(sample.state, State.INTERRUPTED),
        step=sample.step,
        max_steps=2000 if sample.state is not JobState.COMPLETE else sample.step,
        epoch=sample.step / 1000,
        num_epochs=2.0,
        loss=_loss(sample.step),
        train_metrics={"learning_rate": 1e-4, "grad_norm": 1.1},
        step_s=1.1,
        samples_per_step=64,
        world_size=2 * sample.num_nodes,
        run_id="run",
        attempt=sample.attempts,
        started=at(HOUR_S),
        output_dir=str(output),
        safe_step=safe,
        safe_time=None if safe is None else at(130.0),
        resumed_step=None if sample.attempts < 2 else 800,
        saves=SaveStatistics(
            count=4,
            last_stall_s=0.2,
            mean_stall_s=0.21,
            last_durable_s=sample.save_s,
            last_bytes=4_000_000_000,
            expected_s=sample.save_s,
            is_measured=True,
        ),
        space=(space,),
        grace_s=30.0,
    )


def _events(sample: Sample, age_s: float) -> list[dict[str, Any]]:
    if not sample.step:
        return []
    found: list[dict[str, Any]] = []
    part_s = age_s / max(1, sample.attempts)
    for number in range(1, sample.attempts + 1):
        began_s = age_s - (number - 1) * part_s - 30
        ranks = [{"rank": rank, "pid": 4000 + rank, "host": f"node-{rank // 2}"} for rank in range(2)]
        found.append({"time": at(began_s), "event": "attempt_started", "actor": "rank 0", "attempt": number,
                      "run_id": "run", "world_size": 2, "global_batch": 8, "ranks": ranks})  # fmt: skip
        if number > 1:
            step = 800 if number == sample.attempts else sample.step * (number - 1) // sample.attempts
            found.append({"time": at(began_s - 1), "event": "resumed", "actor": "rank 0", "step": step,
                          "path": "out", "num_files": 4, "size_bytes": 4000, "duration_s": 0.3})  # fmt: skip
        for index in range(4):
            step = sample.step * (number * 4 + index) // (4 * sample.attempts + 4)
            found.append({"time": at(began_s - part_s * 0.2 * (index + 1)), "event": "saved", "actor": "keeper",
                          "cause": "periodic", "trigger": "periodic", "step": step, "path": "out", "num_files": 4,
                          "size_bytes": 4000, "duration_s": 1.0})  # fmt: skip
        if number < sample.attempts:
            found.append({"time": at(began_s - part_s * 0.9), "event": "interrupted", "actor": "rank 0",
                          "cause": "SIGTERM", "step": sample.step * number // sample.attempts, "saved": True,
                          "reason": "SIGTERM"})  # fmt: skip
    for index in range(sample.num_events):
        found.append({"time": at(age_s * (1 - index / sample.num_events)), "event": "saved", "actor": "keeper",
                      "cause": "periodic", "step": index, "path": "out"})  # fmt: skip
    return found


def sample_jobs(root: Path) -> dict[str, str]:
    """Write all samples below a folder.

    Returns:
        The variables of a dashboard that shows them. Their jobs do not start, because no supervisor can.
    """
    variables = {name: str(root / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    variables |= {"SAFEPOINT_CPU_SLOTS": "8", "SAFEPOINT_GPU_SLOTS": "0"}
    # `safepoint dashboard` in a process whose supervisors do nothing.
    site = root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "from safepoint.jobs.local import local_jobs\n"
        "local_jobs.start_missing_supervisors = lambda history: []\n"
        "local_jobs.start_supervisor = lambda name: None\n"
    )
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, variables):
        for index, sample in enumerate(SAMPLES):
            write_sample(root, sample, age_s=5400 * (index + 1) ** 1.5)
    return variables
