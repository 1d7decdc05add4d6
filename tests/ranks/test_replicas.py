"""DDP with ranks that copy each snapshot together: the files are the first rank's, or there are none."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import read_manifest, verify
from tests.support.equality import assert_same_run, finals, same
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny, wait_until_gone
from tests.support.keepers import keepers_of, kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

REPLICAS = Path(__file__).parent.parent / "programs" / "replicas.py"
ALL = ("--keep", "newest=100")
HANG = 6
"""The step whose snapshot is never whole."""


def _start(output: Path, sharing: str, *arguments: str, num_ranks: int = 2, options: Iterable[str] = ALL) -> Job:
    launch = ["-v", "--nproc-per-node", str(num_ranks), "--snapshot-sharing", sharing, *options]
    return safepoint(output, *launch, program=[str(REPLICAS), "--out", str(output), *arguments])


def _run(output: Path, sharing: str, *arguments: str, num_ranks: int = 2, options: Iterable[str] = ALL) -> Job:
    job = _start(output, sharing, *arguments, num_ranks=num_ranks, options=options)
    with no_orphans(job):
        assert job.wait(120) == 0, job.text
    return job


def _assert_same_files(output: Path, reference: Path, *, but: tuple[str, ...] = ()) -> None:
    """Every checkpoint that both have, and there are some, byte for byte."""
    common = set(committed_steps(output)) & set(committed_steps(reference))
    assert len(common) > 1, (committed_steps(output), committed_steps(reference))
    for step in common:
        ours, theirs = (
            {entry.path: entry for entry in read_manifest(folder / f"checkpoint-{step}").files}
            for folder in (output, reference)
        )
        assert ours.keys() == theirs.keys()
        for path in ours.keys() - set(but):
            assert ours[path] == theirs[path], f"{path} of step {step}"
        assert verify(output / f"checkpoint-{step}").is_valid


def _num_shared(job: Job, num_ranks: int = 2) -> int:
    return job.text.count(f"is copied by {num_ranks} ranks")


SPACED = ("--step-ms", "60", "--save-steps", "3")


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_files_are_those_of_the_first_rank_alone(num_ranks: int, tmp_path: Path) -> None:
    """Buffers that differ from rank to rank, everything: as if nobody had helped."""
    job = _run(tmp_path / "shared", "on", *SPACED, num_ranks=num_ranks)
    alone = _run(tmp_path / "alone", "off", *SPACED, num_ranks=num_ranks)
    assert _num_shared(job, num_ranks) > 1, job.text
    assert "is copied by" not in alone.text
    _assert_same_files(tmp_path / "shared", tmp_path / "alone")
    assert not read_events(tmp_path / "shared", "save_failed")


@pytest.mark.long
def test_on_processors_nobody_helps_unasked(tmp_path: Path) -> None:
    """Without the option it is as it was."""
    job = _run(tmp_path / "run", "auto", *SPACED, "--epochs", "1")
    assert "is copied by" not in job.text
    assert len(committed_steps(tmp_path / "run")) > 1


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("swapped", "rank 1 holds other parameters or optimizer states than the first rank"),
        ("reversed", "rank 1: it does not have parameter"),
    ],
)
@pytest.mark.long
def test_replicas_in_another_order_do_not_help(order: str, why: str, tmp_path: Path) -> None:
    """It is found out before anything depends on it: no snapshot is lost."""
    job = _run(tmp_path / "shared", "on", *SPACED, "--order", order)
    _run(tmp_path / "alone", "off", *SPACED, "--order", order)
    assert f"snapshots are copied by the first rank alone: {why}" in job.text
    assert _num_shared(job) == 0
    _assert_same_files(tmp_path / "shared", tmp_path / "alone")
    assert not read_events(tmp_path / "shared", "save_failed")


@pytest.mark.long
def test_a_replica_that_drifts_away_costs_one_snapshot(tmp_path: Path) -> None:
    """It is given up and said; those after it are the first rank's."""
    output = tmp_path / "shared"
    _run(output, "on", *SPACED, "--drift", "8")
    _run(tmp_path / "alone", "off", *SPACED, "--drift", "8")
    [failed] = read_events(output, "save_failed")
    assert failed["step"] == 9
    assert "rank 1 holds other parameters or optimizer states" in failed["reason"]
    assert committed_steps(output) == [step for step in committed_steps(tmp_path / "alone") if step != 9]
    assert {6, 12} <= set(committed_steps(output))
    _assert_same_files(output, tmp_path / "alone")


def test_a_stop_is_saved_all_the_same(tmp_path: Path) -> None:
    """A last snapshot in which ranks differ is saved by the first rank, while all wait."""
    output = tmp_path / "run"
    job = _start(output, "on", *SPACED, "--drift", "7", "--signal", "7")
    with no_orphans(job):
        assert job.wait() == 75, job.text
    [stop] = read_events(output, "stop_requested")
    assert stop["step"] in {7, 8}
    assert committed_steps(output)[-1] == stop["step"]
    [failed] = read_events(output, "save_failed")
    assert failed["step"] == stop["step"]
    assert verify(output / f"checkpoint-{stop['step']}").is_valid


# ---- killed in the middle of a shared copy ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to, of which nobody shares anything."""
    output = tmp_path_factory.mktemp("reference") / "run"
    _run(output, "off", "--save-steps", "1", "--step-ms", "100")
    return output


def _hanging(output: Path) -> Job:
    """Snapshots in memory only; the one of `HANG` is copied for ever."""
    memory = ("--snapshot-steps", "1", *ALL)
    arguments = ("--save-steps", "1000", "--hang", str(HANG), "--step-ms", "60")
    return _start(output, "on", *arguments, options=memory)


def _assert_same_end(output: Path, reference: Path) -> None:
    for mine, expected in zip(finals(output, 2), finals(reference, 2), strict=True):
        assert same(mine, expected)


def test_a_killed_helper_takes_its_snapshot_with_it(reference: Path, tmp_path: Path) -> None:
    """The ranks go on from the one before, which all had completed, and end as if nothing had been."""
    output = tmp_path / "run"
    job = _hanging(output)
    with no_orphans(job):
        job.wait_for("a copy that hangs", (output / "hangs").exists)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        assert job.wait(120) == 0, job.text
    [resumed] = read_events(output, "resumed_from_memory")
    assert resumed["step"] == HANG - 1
    assert _num_shared(job) > 1
    _assert_same_end(output, reference)


def test_what_was_whole_is_committed_when_ranks_and_launcher_are_killed(reference: Path, tmp_path: Path) -> None:
    """By the keeper: the newest snapshot that was complete, not the one that was being copied."""
    output = tmp_path / "run"
    job = _hanging(output)
    with no_orphans(job):
        job.wait_for("a copy that hangs", (output / "hangs").exists)
        keepers = keepers_of(job.process.pid)
        pids = [job.process.pid, *job.rank_pids()]
        kill(*pids)
        job.process.wait()
        wait_until_gone([*pids, *keepers])
    assert committed_steps(output) == [HANG - 1]
    name = f"checkpoint-{HANG - 1}"
    assert verify(output / name).is_valid
    ours, theirs = (read_manifest(folder / name).files for folder in (output, reference))
    assert ours == theirs
    _run(output, "on", "--save-steps", "1000")
    assert read_events(output, "resumed")[0]["step"] == HANG - 1
    _assert_same_end(output, reference)


@pytest.mark.long
def test_stopped_and_killed_it_ends_with_the_same_bits(reference: Path, tmp_path: Path) -> None:
    """SIGTERM, then SIGKILL of everything in the middle of shared copies; the same command each time."""
    output = tmp_path / "run"
    arguments = ("--save-steps", "1", "--step-ms", "30")
    stopped = _start(output, "on", *arguments)
    with no_orphans(stopped):
        stopped.wait_for_mark("train 5")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 75, stopped.text
    [stop] = read_events(output, "stop_requested")
    assert committed_steps(output)[-1] == stop["step"]
    killed = _start(output, "on", *arguments, "--hang", "12")
    with no_orphans(killed):
        killed.wait_for("a copy that hangs", (output / "hangs").exists)
        killed.kill_everything()
    assert _num_shared(stopped) > 0
    assert _num_shared(killed) > 0
    last = _run(output, "on", *arguments)
    assert read_events(output, "resumed")[0]["step"] == stop["step"]
    assert stop["step"] < read_events(output, "resumed")[1]["step"] <= 11
    assert _num_shared(last) > 0
    _assert_same_end(output, reference)
    _assert_same_files(output, reference)


@pytest.mark.long
def test_with_another_keeper_all_goes_on(reference: Path, tmp_path: Path) -> None:
    """The ranks have new memory then, which is rehearsed and shared as the first was."""
    output = tmp_path / "run"
    job = _start(output, "on", "--save-steps", "1", "--step-ms", "150")
    with no_orphans(job):
        job.wait_for("a shared snapshot", lambda: _num_shared(job) > 0)
        [first] = keepers_of(job.process.pid)
        kill(first)
        job.wait_for("a save by the ranks", lambda: "the keeper died; this save is synchronous" in job.text)
        before = _num_shared(job)
        assert job.wait(120) == 0, job.text
    assert _num_shared(job) > before
    _assert_same_end(output, reference)


# ---- the Trainer --------------------------------------------------------------------------------------------------


def _trainer(output: Path, sharing: str) -> Job:
    saves = ("--save-strategy", "steps", "--save-steps", "4", "--step-ms", "40")
    shape = ("--max-steps", "24", "--grad-accum", "1", "--hidden", "256")
    launch = ("-v", "--nproc-per-node", "2", "--snapshot-sharing", sharing, *ALL)
    return safepoint(output, *launch, program=tiny(output, *shape, *saves))


@pytest.mark.long
def test_the_trainer_s_files_are_those_of_its_first_rank(tmp_path: Path) -> None:
    """Stopped in the middle and resumed, it ends as it does alone, with the same files on the way."""
    alone = _trainer(tmp_path / "alone", "off")
    with no_orphans(alone):
        assert alone.wait(180) == 0, alone.text
    output = tmp_path / "shared"
    stopped = _trainer(output, "on")
    with no_orphans(stopped):
        stopped.wait_for_mark("train 14")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait(120) == 75, stopped.text
    assert _num_shared(stopped) > 0, stopped.text
    last = _trainer(output, "on")
    with no_orphans(last):
        assert last.wait(180) == 0, last.text
    assert_same_run(output, tmp_path / "alone")
    times = tuple(f"safepoint_state_{rank}.pt" for rank in range(2))  # they tell for how long it has trained
    _assert_same_files(output, tmp_path / "alone", but=("trainer_state.json", "training_args.bin", *times))
