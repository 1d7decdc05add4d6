"""The keeper in ordinary jobs: which processes wait for it, the order in which they end, and what is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.equality import assert_same_run
from tests.support.jobs import (
    Job,
    committed_steps,
    environment,
    no_orphans,
    read_events,
    safepoint,
    tiny,
    wait_until_gone,
)
from tests.support.keepers import (
    assert_nothing_left,
    expect_saves_beside_training,
    keepers_of,
    kill,
    last_mark,
    sockets_of,
    stopped,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TWO = ("--nproc-per-node", "2")
EVERY_STEP = ("--save-strategy", "steps", "--save-steps", "1", "--grad-accum", "1")


def _temp(tmp_path: Path) -> Path:
    folder = tmp_path / "temp"
    folder.mkdir(exist_ok=True)
    return folder


def names_in(path: Path) -> set[str]:
    """The files that a checkpoint's manifest lists."""
    verdict = verify(path)
    assert verdict.is_valid, verdict.faults
    assert verdict.manifest is not None
    return {entry.path for entry in verdict.manifest.files}


# ---- the keeper outlives the others -----------------------------------------------------------------------------


def test_keeper_alone_commits_the_newest_snapshot_and_ends(tmp_path: Path) -> None:
    """After SIGKILL of launcher and ranks, the keeper saves the snapshot; nothing else is left."""
    output, temp = tmp_path / "run", _temp(tmp_path)
    program = tiny(output, "--grad-accum", "1", "--step-ms", "100", "--epochs", "20")
    job = safepoint(output, *TWO, "--snapshot-steps", "1", program=program, TMPDIR=str(temp))
    with no_orphans(job):
        job.wait_for_mark("train 4", rank=1)
        keepers = keepers_of(job.process.pid)
        assert len(keepers) == 1
        assert sockets_of(job.process.pid)
        kill(job.process.pid, *job.rank_pids())
        job.process.wait()
    at = last_mark(output, 2)
    assert_nothing_left(job, temp, keepers)
    [saved] = read_events(output, "saved")
    assert saved["trigger"] == "failure"
    assert at - 1 <= saved["step"] <= at + 1
    last = str(saved["step"] + 2)
    job = safepoint(output, *TWO, program=tiny(output, "--grad-accum", "1", "--max-steps", last), TMPDIR=str(temp))
    with no_orphans(job):
        job.wait_for_event("resumed", step=saved["step"])
        keepers = keepers_of(job.process.pid)
        assert job.wait() == 0, job.text
    assert_nothing_left(job, temp, keepers)


@pytest.mark.long
def test_everything_killed_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """The keeper is killed too: the next start uses the newest checkpoint, and leaves nothing."""
    output, temp = tmp_path / "run", _temp(tmp_path)
    program = tiny(output, *EVERY_STEP, "--step-ms", "100", "--epochs", "20")
    job = safepoint(output, *TWO, program=program, TMPDIR=str(temp))
    with no_orphans(job):
        job.wait_for_event("saved", count=3)
        keepers = keepers_of(job.process.pid)
        kill(*keepers, job.process.pid, *job.rank_pids())
        job.process.wait()
        wait_until_gone([*keepers, *job.rank_pids()])
    assert not sockets_of(job.process.pid)
    newest = committed_steps(output)[-1]
    job = safepoint(output, *TWO, program=tiny(output, *EVERY_STEP, "--max-steps", str(newest + 3)), TMPDIR=str(temp))
    with no_orphans(job):
        job.wait_for_event("resumed", step=newest)
        keepers = keepers_of(job.process.pid)
        assert job.wait() == 0, job.text
    assert_nothing_left(job, temp, keepers)
    assert not list((output / ".safepoint" / "work").iterdir())


# ---- what waits for the keeper ----------------------------------------------------------------------------------


def test_callbacks_that_look_at_checkpoints_find_them(tmp_path: Path) -> None:
    """With an `on_save` callback each save waits; manifests list the files that it adds."""
    output = tmp_path / "run"
    program = tiny(output, *EVERY_STEP, "--add-file", "--max-steps", "4")
    job = safepoint(output, *TWO, program=program)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert "AddFile may read every checkpoint, so training waits until each checkpoint is written" in job.text
    assert committed_steps(output) == [1, 2, 3, 4]
    for path in list_checkpoints(output):
        assert {"notes-0.txt", "notes-1.txt"} <= names_in(path)


@pytest.mark.long
def test_retention_and_best_model_are_those_of_synchronous_saves(tmp_path: Path) -> None:
    """`save_total_limit` and `load_best_model_at_end` work as without the keeper."""
    options = ("--max-steps", "12", "--grad-accum", "1", "--save-strategy", "steps", "--save-steps", "2")
    options += ("--eval-strategy", "steps", "--eval-steps", "2", "--best", "--save-total-limit", "2")
    kept: dict[str, list[int]] = {}
    for name, slots in (("keeper", ()), ("without", ("--snapshot-slots", "0"))):
        output = tmp_path / name
        job = safepoint(output, *slots, program=tiny(output, *options, "--step-ms", "100"))
        with no_orphans(job):
            job.wait_for_event("saved")
            assert bool(keepers_of(job.process.pid)) == (name == "keeper")
            assert job.wait() == 0, job.text
        kept[name] = committed_steps(output)
        for path in list_checkpoints(output):
            names_in(path)
        assert read_events(output, "pruned")
    assert kept["keeper"] == kept["without"]
    assert_same_run(tmp_path / "keeper", tmp_path / "without")


def test_signal_while_the_keeper_writes_saves_the_last_step(tmp_path: Path) -> None:
    """SIGTERM during a periodic save: both checkpoints are committed, exit code 75."""
    output = tmp_path / "run"
    program = tiny(output, *EVERY_STEP, "--step-ms", "100", "--epochs", "20")
    job = safepoint(output, *TWO, program=program)
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        with stopped(keepers_of(job.process.pid)[0]):
            saved = job.events("saved")[-1]["step"]
            job.wait_for_mark(f"train {max(last_mark(output), saved) + 1}")
            os.kill(job.rank_pids()[1], signal.SIGTERM)
            stop = job.wait_for_event("stop_requested")
        assert job.wait(40) == 75, job.text
    assert committed_steps(output)[-1] == stop["step"]
    for path in list_checkpoints(output):
        names_in(path)
    assert read_events(output, "interrupted")[0]["saved"]


# ---- other launchers --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_under_plain_torchrun_the_first_rank_starts_the_keeper(tmp_path: Path) -> None:
    """Saves run beside training, a killed rank's job resumes from memory, nothing is left."""
    output, temp = tmp_path / "run", _temp(tmp_path)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", "--monitor-interval", "0.1", "-m", "safepoint.training"),
        *tiny(output, "--grad-accum", "1", "--step-ms", "100", "--max-steps", "40"),
    ]
    changes = {"SAFEPOINT_SAVE_STEPS": "1", "TMPDIR": str(temp)}
    job = Job(command, output, log=tmp_path / "log", env=environment(**changes))
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        keepers = keepers_of(job.process.pid)
        expect_saves_beside_training(job)
        job.wait_for_event("saved", count=len(job.events("saved")) + 1)
        kill(job.rank_pids()[0])  # the one that has started the keeper
        job.wait_for_event("attempt_started", count=2)
        at = last_mark(output, 2)
        assert keepers_of(job.process.pid) == keepers
        assert job.wait(120) == 0, job.text
    assert_nothing_left(job, temp, keepers)
    [resumed] = read_events(output, "resumed_from_memory")
    assert resumed["step"] >= at - 1
    assert read_events(output, "finished")[0]["step"] == 40


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_no_slots_means_no_keeper(tmp_path: Path) -> None:
    """With --snapshot-slots 0 the ranks save synchronously."""
    output = tmp_path / "run"
    program = tiny(output, *EVERY_STEP, "--max-steps", "6", "--step-ms", "50")
    job = safepoint(output, *TWO, "--snapshot-slots", "0", program=program)
    with no_orphans(job):
        job.wait_for_mark("train 3")
        # Training has waited for it.
        assert {1, 2, 3} <= {event["step"] for event in job.events("saved")}
        assert not keepers_of(job.process.pid)
        assert not sockets_of(job.process.pid)
        assert job.wait() == 0, job.text
    assert committed_steps(output) == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_automatic_snapshots_are_taken_without_saves(tmp_path: Path) -> None:
    """With --snapshot-steps auto, a job resumes from a step that no save was requested for."""
    output = tmp_path / "run"
    program = tiny(output, "--grad-accum", "1", "--step-ms", "100", "--max-steps", "30")
    job = safepoint(output, *TWO, "--snapshot-steps", "auto", program=program)
    with no_orphans(job):
        job.wait_for_mark("train 8")
        assert not job.events("saved")
        kill(job.rank_pids()[1])
        resumed = job.wait_for_event("resumed_from_memory")
        assert job.wait(120) == 0, job.text
    assert 0 < resumed["step"] <= 10
    assert [event["trigger"] for event in read_events(output, "saved")] == ["failure", "periodic"]
    assert read_events(output, "finished")[0]["step"] == 30


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--snapshot-steps", "0"), "positive number of steps, or auto"),
        (("--snapshot-steps", "often"), "positive number of steps, or auto"),
        (("--snapshot-slots", "-1"), "must be from 0 to 8"),
        (("--snapshot-slots", "9"), "must be from 0 to 8"),
        (("--snapshot-slots", "few"), "must be a whole number"),
        (("--snapshot-slots", "0", "--snapshot-steps", "5"), "contradicts"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: tuple[str, ...], text: str, tmp_path: Path) -> None:
    """Exit code 2 and a message, before anything is started."""
    command = [sys.executable, "-m", "safepoint.cli.main", "run", *options, *tiny(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert result.returncode == 2, result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
