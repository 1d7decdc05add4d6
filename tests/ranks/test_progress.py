"""The progress of real runs in the file, the job folder, the port and the platform, for every kind of end."""

import contextlib
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.progress.record import Progress, State, read_progress
from tests.support.jobs import Job, environment, no_orphans, read_events, safepoint, tiny
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TWO = ("--nproc-per-node", "2")
LOOP = Path(__file__).parent.parent / "programs" / "loop.py"


def served(port: int) -> dict[str, Any] | None:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
    ):
        return json.load(answer)
    return None


@contextlib.contextmanager
def polled(port: int, last_file: Path) -> Iterator[list[dict[str, Any]]]:
    """The answers to a client that polls, as the controller does.

    Args:
        port: of the metrics.
        last_file: what the program writes last; an answer says in `has_last_file` whether it was there by then.
    """
    answers: list[dict[str, Any]] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(0.05):
            answer = served(port)
            if answer is not None:
                answers.append(answer | {"has_last_file": last_file.exists()})

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def final(output: Path) -> Progress:
    progress = read_progress(output / ".safepoint" / "progress.json")
    assert progress is not None
    return progress


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_interrupted_and_resumed_progress_never_falls(tmp_path: Path) -> None:
    """Below 100 % until the job has ended well; after a resume the time left is of the new pace."""
    output, job_dir, said = tmp_path / "run", tmp_path / "job", tmp_path / "termination-log"
    job_dir.mkdir()
    said.touch()
    port = free_port()
    env = {"SAFEPOINT_JOB_DIR": str(job_dir), "SAFEPOINT_TERMINATION_LOG": str(said)}
    options = (*TWO, "--metrics-port", str(port))
    # The second attempt is five times as fast as the first.
    slow, fast = ("--step-ms", "500"), ("--step-ms", "100")
    common = ("--samples", "256", "--batch-size", "4", "--grad-accum", "1", "--epochs", "1")
    with polled(port, output / "final" / "log.json") as answers:
        job = safepoint(output, *options, program=tiny(output, *common, *slow), **env)
        with no_orphans(job):
            job.wait_for_mark("train 6")
            job.signal()
            assert job.wait() == 75, job.text
        interrupted = final(output)
        assert (interrupted.state, interrupted.step) == (State.INTERRUPTED, interrupted.safe_step)
        assert json.loads(said.read_text())["currentStep"] == interrupted.step
        assert json.loads(said.read_text())["progressPercentage"] == interrupted.step * 100 // 32
        num_before = len(answers)
        job = safepoint(output, *options, program=tiny(output, *common, *fast, "--logging-steps", "1"), **env)
        with no_orphans(job):
            assert job.wait() == 0, job.text
    percentages = [answer["progressPercentage"] for answer in answers]
    assert percentages == sorted(percentages)
    # Only a request after the program has ended, while the launcher still serves, is answered with success.
    assert all(answer["progressPercentage"] <= 99 or answer["has_last_file"] for answer in answers)
    # Eight samples a step: 32 steps in all, on a pace of the second attempt only.
    resumed = [answer for answer in answers[num_before:] if answer["currentStep"] > interrupted.step]
    left = {answer["currentStep"]: answer["estimatedRemainingSeconds"] for answer in resumed}
    left = {step: left_s for step, left_s in left.items() if left_s is not None}
    assert left
    # No step is faster than 0.1 s; this attempt's time divided by the steps of all attempts would be.
    assert all(left_s >= 0.1 * (32 - step) for step, left_s in left.items()), left
    assert all(left_s <= 2 + 0.5 * (32 - step) for step, left_s in left.items()), left
    assert interrupted.step_s is not None
    assert interrupted.step_s > 0.5
    finished = final(output)
    assert (finished.state, finished.percent, finished.attempt) == (State.FINISHED, 100.0, 2)
    assert finished.resumed_step == interrupted.step
    assert finished.step_s is not None
    assert 0.1 < finished.step_s < interrupted.step_s
    assert finished.loss is not None
    assert {"grad_norm", "learning_rate"} <= set(finished.train_metrics)
    last = json.loads(said.read_text())
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    # The job's folder has the same record, and every event.
    assert read_progress(job_dir / "progress.json") == finished
    assert sorted(map(json.dumps, events_of(job_dir / "events.jsonl"))) == sorted(
        map(json.dumps, read_events(output))
    )
    events = [(event["event"], event["actor"]) for event in events_of(job_dir / "events.jsonl")]
    for expected in [
        ("started", "launcher"),
        ("attempt_started", "rank 0"),
        ("signal_received", "launcher"),
        ("deadline_choice", "rank 0"),
        ("snapshot_taken", "rank 0"),
        ("saved", "keeper"),
        ("resumed", "rank 0"),
        ("finished", "rank 0"),
    ]:
        assert expected in events, events
    assert not [event for event in events if event[0] == "failed"]


@pytest.mark.long
def test_a_rank_that_dies_is_told_and_so_is_the_end(tmp_path: Path) -> None:
    """A killed rank is reported and restarted; a program that fails is reported with its error."""
    output, job_dir = tmp_path / "run", tmp_path / "job"
    job_dir.mkdir()
    job = safepoint(
        output,
        *TWO,
        *("--snapshot-steps", "1", "--max-restarts", "1"),
        program=tiny(output, "--step-ms", "100", "--crash-step", "4", "--crash-rank", "1"),
        SAFEPOINT_JOB_DIR=str(job_dir),
    )
    with no_orphans(job):
        job.wait_for_event("restarted")
        job.wait_for_event("resumed_from_memory")
        job.wait_for_event("attempt_started", count=2)
        os.kill(job.rank_pids()[0], signal.SIGKILL)
        assert job.wait() == 137, job.text
    progress = final(output)
    assert (progress.state, progress.restart) == (State.FAILED, 1)
    assert "rank 0 was killed by SIGKILL" in progress.message
    assert progress == read_progress(job_dir / "progress.json")
    failed = read_events(output, "failed")
    assert [(event["rank"], event["actor"]) for event in failed] == [(1, "launcher"), (0, "launcher")]
    assert [event["restart"] for event in read_events(output, "restarted")] == [1]
    # The keeper has committed what was in memory after the ranks had gone.
    assert progress.safe_step == read_events(output, "saved")[-1]["step"]


@pytest.mark.long
def test_ranks_that_overstay_the_grace_period_are_told_by_the_launcher(tmp_path: Path) -> None:
    """All threads of the ranks are stopped, so the launcher reports the end."""
    output = tmp_path / "run"
    job = safepoint(output, "--grace", "2", program=tiny(output, "--step-ms", "100"))
    with no_orphans(job):
        job.wait_for_step(2)
        os.kill(job.rank_pids()[0], signal.SIGSTOP)
        job.signal()
        assert job.wait() == 143, job.text
    assert final(output).state is State.INTERRUPTED
    [event] = read_events(output, "interrupted")
    assert (event["actor"], event["saved"]) == ("launcher", False)


@pytest.mark.long
@pytest.mark.parametrize("way", ["fails", "is stopped"])
def test_a_loop_under_plain_python_tells_its_end_itself(way: str, tmp_path: Path) -> None:
    """Without a launcher the rank itself writes the end."""
    output, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(
        "import sys, torch, safepoint\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.DataLoader(torch.randn(64, 4))\n"
        f"with safepoint.session(model=model, optimizer=optimizer, data=data, output_dir={str(output)!r}) as run:\n"
        "    for batch in run.batches():\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
        "        run.step(loss=torch.tensor(2.0), metrics={'val_acc': 0.5, 'size': 3})\n"
        f"        if run.step_number == 8 and {way == 'fails'}:\n"
        "            raise RuntimeError('this loop fails on purpose')\n"
        "        if run.step_number == 8:\n"
        "            import os, signal\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    job = Job([sys.executable, str(script)], output, log=tmp_path / "log", env=environment())
    with no_orphans(job):
        assert job.wait() == (1 if way == "fails" else 75), job.text
    progress = final(output)
    assert (progress.loss, dict(progress.train_metrics), dict(progress.eval_metrics)) == (
        2.0,
        {"size": 3.0},
        {"val_acc": 0.5},
    )
    assert progress.max_steps == 64
    if way == "fails":
        assert (progress.state, progress.message) == (State.FAILED, "RuntimeError: this loop fails on purpose")
        assert [event["actor"] for event in read_events(output, "failed")] == ["rank 0"]
    else:
        assert progress.state is State.INTERRUPTED
        assert [event["rank"] for event in read_events(output, "signal_received")] == [0]
