"""SIGKILL at random moments: at most one step is lost each time, and the result is the same."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.equality import assert_same_run
from tests.support.jobs import Job, environment, no_orphans, read_events, safepoint, tiny, wait_until_gone
from tests.support.keepers import (
    assert_nothing_left,
    expect_saves_beside_training,
    keepers_of,
    kill,
    last_mark,
    memory_of,
    stop_while_writing,
)
from tests.support.patience import PATIENCE

_NUM_KILLS = int(os.environ.get("SAFEPOINT_TEST_SNAPSHOT_KILLS", "0"))
_NUM_TRAINER_KILLS = max(2, _NUM_KILLS // 8)
"""A start of the Trainer takes as long as four of a plain program."""
_STEPS = 40 + 10 * _NUM_TRAINER_KILLS
_PLAIN = Path(__file__).parent.parent / "programs" / "plain.py"
_TWO = ("--nproc-per-node", "2")
_NUM_CONTROL_BLOCKS = 2
"""What ranks lend before they take a snapshot: their marks."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400 + 60 * _NUM_TRAINER_KILLS)]


def _dice() -> random.Random:
    seed = int(os.environ.get("SAFEPOINT_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"SAFEPOINT_TEST_SEED={seed}")
    return random.Random(seed)


def _program(output: Path, *arguments: str) -> list[str]:
    shape = ("--max-steps", str(_STEPS), "--grad-accum", "1", "--hidden", "256")
    return tiny(
        output, *shape, "--save-strategy", "steps", "--save-steps", "1", "--save-total-limit", "3", *arguments
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruptions and without saves."""
    output = tmp_path_factory.mktemp("reference") / "run"
    job = safepoint(output, *_TWO, program=_program(output, "--save-strategy", "no"))
    with no_orphans(job):
        assert job.wait(180) == 0, job.text
    return output


def _resumed(output: Path, start: int) -> int:
    """The step from which the job's `start`th start resumed."""
    step = num_started = 0
    for event in read_events(output):
        if event["event"] in {"resumed", "resumed_from_memory"}:
            step = event["step"]
        elif event["event"] == "attempt_started":
            num_started += 1
            if num_started == start:
                return step
    raise AssertionError(f"there was no start {start}")


def assert_all_valid(output: Path) -> None:
    checkpoints = list_checkpoints(output)
    assert checkpoints
    for path in checkpoints:
        verdict = verify(path)
        assert verdict.is_valid, (path, verdict.faults)
    control = output / ".safepoint"
    assert not list((control / "work").iterdir())
    assert not list((control / "trash").iterdir())


def _kill_some(job: Job, start: int, dice: random.Random) -> int:
    """Kill all ranks, or one, within a second after the `start`th start has begun; returns their step."""
    job.wait_for_event("attempt_started", count=start)
    begun = _num_marks(job.output)
    if dice.random() < 0.8:
        job.wait_for("first step of the start", lambda: _num_marks(job.output) > begun)
    time.sleep(dice.uniform(0, 1))  # the moment is the test's subject; nothing is waited for
    pids = job.rank_pids()
    kill(*(pids if start % 2 else [dice.choice(pids)]))
    wait_until_gone(pids)
    return last_mark(job.output, 2) if _num_marks(job.output) > begun else _resumed(job.output, start)


def _num_marks(output: Path) -> int:
    return sum(path.read_text().count("\n") for path in output.glob("marks-*"))


def test_killed_ranks_lose_one_step_at_most(reference: Path, tmp_path: Path) -> None:
    """Any process is killed at any time: at most one step is lost, and the result is the same."""
    dice = _dice()
    output = tmp_path / "run"
    job = safepoint(output, *_TWO, "--max-restarts", "1000", program=_program(output, "--step-ms", "60"))
    lost: list[int] = []
    with no_orphans(job):
        for start in range(1, _NUM_TRAINER_KILLS + 1):
            at = _kill_some(job, start, dice)
            job.wait_for_event("attempt_started", count=start + 1)
            before, now = _resumed(output, start), _resumed(output, start + 1)
            assert max(before, at - 1) <= now <= at + 1, f"killed at step {at}, resumed from {now}\n{job.text}"
            lost.append(max(0, at - now))
        assert job.wait(180) == 0, job.text
    print(f"{len(lost)} kills, {sum(lost)} steps lost")
    assert_same_run(output, reference)
    assert_all_valid(output)
    assert not read_events(output, "save_failed")


# ---- a plain loop -----------------------------------------------------------------------------------------------


def _plain(folder: Path, steps: int, log: Path, *options: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, str(_PLAIN), str(folder), str(steps), *options],
            stdout=stream,
            stderr=stream,
            env=environment(TMPDIR=str(log.parent)),
        )


def _said(folder: Path) -> list[tuple[str, int]]:
    path = folder / "said"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


@pytest.mark.timeout(120 + 20 * max(_NUM_KILLS, 6))
@pytest.mark.long
def test_killed_plain_loop_loses_one_step_at_most(tmp_path: Path) -> None:
    """A `Checkpointer` saves every step: the next process begins at most one step back."""
    dice = _dice()
    folder, log = tmp_path / "run", tmp_path / "log"
    expected = num_lines = lost = 0
    for _ in range(_NUM_KILLS or 6):
        process = _plain(folder, 1 << 30, log)
        moment = dice.random()
        deadline = time.monotonic() + 60 * PATIENCE
        while moment < 0.85 and len(_said(folder)) == num_lines:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.6) if moment < 0.85 else dice.uniform(0, 2))  # the moment is the test's subject
        assert process.poll() is None, log.read_text()
        process.kill()
        process.wait()
        new, num_lines = _said(folder)[num_lines:], len(_said(folder))
        if new:
            [(_, began), *saved] = new
            assert expected - 1 <= began <= expected + 1, f"{expected} was saved, {began} loaded\n{log.read_text()}"
            lost += max(0, expected - began)
            expected = saved[-1][1] if saved else began
    steps = expected + 20
    assert _plain(folder, steps, log).wait(120) == 0, log.read_text()
    began = _said(folder)[num_lines][1]
    assert expected - 1 <= began <= expected + 1
    uninterrupted = tmp_path / "reference"
    assert _plain(uninterrupted, steps, log, "--unsaved").wait(300) == 0, log.read_text()
    ours, theirs = (torch.load(path / "final.pt", weights_only=True) for path in (folder, uninterrupted))
    assert_equal(ours, theirs)
    assert_all_valid(folder / "checkpoints")
    print(f"{_NUM_KILLS or 6} kills, {lost} of {steps} steps lost")


def assert_equal(ours: object, theirs: object, path: str = "state") -> None:
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), f"{path} differs"  # pyright: ignore[reportArgumentType]
    else:
        assert ours == theirs, f"{path} differs"


# ---- the keeper -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["writing", pytest.param("idle", marks=pytest.mark.long)])
def test_killed_keeper_is_replaced(reference: Path, when: str, tmp_path: Path) -> None:
    """Without its keeper, training saves synchronously; a new keeper takes the later saves."""
    output, temp = tmp_path / "run", tmp_path / "temp"
    temp.mkdir()
    every = () if when == "writing" else ("--save-steps", "8")
    program = _program(output, "--step-ms", "80", "--save-total-limit", "40", *every)
    job = safepoint(output, *_TWO, program=program, TMPDIR=str(temp))
    with no_orphans(job):
        job.wait_for_event("saved", count=2 if when == "writing" else 1)
        first = stop_while_writing(job) if when == "writing" else keepers_of(job.process.pid)[0]
        step = last_mark(output, 2)
        kill(first)
        wait_until_gone([first])
        job.wait_for("another keeper", lambda: set(keepers_of(job.process.pid)) - {first})
        job.wait_for("a save by the rank itself", lambda: "the keeper died: this save is synchronous" in job.text)
        job.wait_for("a later save", lambda: [e for e in job.events("saved") if e["step"] > step + 1])
        second = keepers_of(job.process.pid)
        if when == "writing":
            job.wait_for("a snapshot at the new keeper", lambda: len(memory_of(second[0])) > _NUM_CONTROL_BLOCKS)
            expect_saves_beside_training(job)
        assert job.wait(120) == 0, job.text
    assert_same_run(output, reference)
    assert_all_valid(output)
    failed = [event["reason"] for event in read_events(output, "save_failed")]
    assert failed == (["the keeper died while it was writing the snapshot"] if when == "writing" else [])
    assert len(read_events(output, "attempt_started")) == 1
    assert_nothing_left(job, temp, [first, *second])
