"""A signal or a kill at every point of a run: the exit code, what is left, and the next start."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from safepoint.training.launcher.save_request import request_save
from safepoint.training.outcome.hold import Hold
from safepoint.training.outcome.launcher_folder import running_launchers
from tests.support.equality import logged
from tests.support.jobs import (
    TINY,
    Job,
    committed_steps,
    environment,
    no_orphans,
    read_events,
    safepoint,
    tiny,
    wait_until_gone,
)
from tests.support.moto_server import MotoServer
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TWO = ("--nproc-per-node", "2")


def assert_saved_and_valid(output: Path) -> int:
    """Check that the newest checkpoint is valid; returns its step."""
    newest = list_checkpoints(output)[0]
    verdict = verify(newest)
    assert verdict.is_valid, verdict.faults
    assert not list((output / ".safepoint" / "trash").iterdir())
    assert verdict.manifest is not None
    return verdict.manifest.step


def test_signal_during_model_load_ends_promptly_with_143(tmp_path: Path) -> None:
    """Before anything can be saved, the run exits with 143 at once."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--load-s", "60"))
    with no_orphans(job):
        job.wait_for("both ranks loading", lambda: len(list(output.glob("loading-*"))) == 2)
        job.signal()
        assert job.wait(20) == 143, job.text
    assert not (output / "final").exists()


def test_signal_to_one_rank_during_model_load_ends_all_ranks(tmp_path: Path) -> None:
    """When one rank leaves before the first step, the others end too, without a restart."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--load-s", "60"))
    with no_orphans(job):
        job.wait_for("both ranks loading", lambda: len(list(output.glob("loading-*"))) == 2)
        ranks = [int((output / f"loading-{rank}").read_text()) for rank in (0, 1)]
        os.kill(ranks[1], signal.SIGTERM)
        assert job.wait(20) == 143, job.text
        wait_until_gone(ranks)


def test_signal_before_the_first_step_saves_it(tmp_path: Path) -> None:
    """After a signal in the first step, the step is finished and saved, and the exit code is 75."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "1500", "--grad-accum", "1"))
    with no_orphans(job):
        job.wait_for_mark("train 0")
        job.signal()
        assert job.wait(30) == 75, job.text
    assert assert_saved_and_valid(output) == 1


@pytest.mark.long
def test_signal_during_a_periodic_save_needs_no_further_step(tmp_path: Path) -> None:
    """The run ends with the checkpoint that is being written, or that of the next step."""
    output = tmp_path / "run"
    options = ("--save-strategy", "steps", "--save-steps", "1", "--hidden", "512", "--grad-accum", "1")
    job = safepoint(output, *TWO, program=tiny(output, *options, "--epochs", "10"))
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        job.wait_for(
            "a save under way", lambda: list((output / ".safepoint" / "work").glob("*/*/checkpoint-*/merged/*"))
        )
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(30) == 75, job.text
    assert assert_saved_and_valid(output) == committed_steps(output)[-1]
    saved = [event["step"] for event in read_events(output, "saved")]
    assert len(saved) == len(set(saved))


@pytest.mark.long
def test_signal_in_an_evaluation_leaves_it_and_runs_it_again(tmp_path: Path) -> None:
    """An evaluation does not delay the exit; the next start repeats it first."""
    output = tmp_path / "run"
    options = ("--eval-strategy", "steps", "--eval-steps", "4", "--epochs", "1")
    job = safepoint(output, *TWO, program=tiny(output, *options, "--eval-ms", "2000"))
    with no_orphans(job):
        job.wait_for_mark("eval 4")
        job.signal()
        assert job.wait(15) == 75, job.text
    assert assert_saved_and_valid(output) == 4
    assert "eval_loss" not in job.text
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert "'eval_loss'" in job.text.split("attempt 2")[1].split("'loss'")[0], "the evaluation came too late"


def test_signal_inside_gradient_accumulation_finishes_the_step_when_there_is_time(tmp_path: Path) -> None:
    """With enough time, the running step is finished and saved."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--grad-accum", "8", "--step-ms", "100"))
    with no_orphans(job):
        job.wait_for_mark("train 1", count=2)
        job.signal()
        assert job.wait(20) == 75, job.text
    assert assert_saved_and_valid(output) == 2


def test_a_step_that_would_miss_the_deadline_is_given_up(tmp_path: Path) -> None:
    """With too little time, the step before is saved at once, and the log names the unfinished step."""
    output = tmp_path / "run"
    options = ("--grad-accum", "16", "--step-ms", "500", "--samples", "128")
    job = safepoint(output, *TWO, "--grace", "5", program=tiny(output, *options))
    with no_orphans(job):
        job.wait_for_mark("train 1", count=2)
        started = time.monotonic()
        job.signal()
        assert job.wait(10) == 75, job.text
        assert time.monotonic() - started < 5  # the platform's SIGKILL, not a measure of speed
    assert read_events(output, "step_given_up")[0]["step"] == 2
    assert assert_saved_and_valid(output) == 1


@pytest.mark.long
def test_a_signal_to_the_launcher_after_the_ranks_changes_nothing(tmp_path: Path) -> None:
    """All ranks have saved and ended; the launcher, signalled then, still exits with 75."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(2)
        pids = job.rank_pids()
        os.kill(pids[1], signal.SIGTERM)
        wait_until_gone(pids)
        job.signal()
        assert job.wait(20) == 75, job.text
    assert_saved_and_valid(output)


@pytest.mark.long
def test_signal_during_resume_loses_nothing(tmp_path: Path) -> None:
    """A start that is interrupted before it trains leaves the checkpoint unchanged."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal()
        assert job.wait(30) == 75, job.text
    step = assert_saved_and_valid(output)
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_event("resumed")
        job.signal()
        code = job.wait(30)
    assert code in {75, 143}, job.text
    assert assert_saved_and_valid(output) >= step
    job = safepoint(output, *TWO, program=tiny(output))
    with no_orphans(job):
        assert job.wait() == 0, job.text


@pytest.mark.long
def test_signals_twice_in_a_row_are_one_stop(tmp_path: Path) -> None:
    """A second SIGTERM neither interrupts the save nor starts another one."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal()
        job.signal()
        for pid in job.rank_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert job.wait(30) == 75, job.text
    assert_saved_and_valid(output)
    assert len(read_events(output, "saved")) == 1


def test_one_sigint_saves(tmp_path: Path) -> None:
    """One Ctrl-C to the launcher stops the run like SIGTERM."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal(signal.SIGINT)
        assert job.wait(30) == 75, job.text
    assert_saved_and_valid(output)
    assert [event["signal"] for event in read_events(output, "stop_requested")] == ["SIGINT"]


def test_a_second_sigint_stops_at_once(tmp_path: Path) -> None:
    """After Ctrl-C twice, the exit code is 130 and no rank is left."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--grad-accum", "1", "--step-ms", "20000"))
    with no_orphans(job):
        job.wait_for_mark("train 0", rank=1)
        job.signal(signal.SIGINT)
        time.sleep(0.5)  # long enough to be seen as two, and to see that one alone does not end the job
        assert job.process.poll() is None
        job.signal(signal.SIGINT)
        assert job.wait(10) == 130, job.text
        wait_until_gone(job.rank_pids())
    assert "stopped at once by a second SIGINT" in job.text


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    """SIGUSR1 to the launcher saves one checkpoint on demand, and training finishes.

    If the signal reaches the ranks at different steps, because the machine is busy, there is one more checkpoint.
    """
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50", "--epochs", "3"))
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal(signal.SIGUSR1)
        event = job.wait_for_event("saved")
        assert event["trigger"] == "on-demand"
        assert job.wait() == 0, job.text
    step, last = event["step"], read_events(output, "finished")[0]["step"]
    assert committed_steps(output) in ([step, last], [step, step + 1, last])
    assert {event["trigger"] for event in read_events(output, "saved")[:-1]} == {"on-demand"}


def test_a_requested_save_holds_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt names a checked checkpoint. The ranks wait after it, and a stop then loses no step.

    If no stop comes, and the request is withdrawn, they train on.
    """
    output, folder = tmp_path / "run", tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50", "--epochs", "9"), TMPDIR=str(folder))
    with no_orphans(job):
        job.wait_for_step(3)
        signs: list[str] = []
        receipt = request_save(within_s=60, sign=signs.append)
        assert receipt.is_read
        assert committed_steps(output) == [receipt.step]
        assert signs
        [(launcher, _)] = running_launchers()
        Hold(launcher).withdraw()
        job.wait_for_step(receipt.step + 3)
        second = request_save(within_s=60, sign=signs.append)
        time.sleep(1)  # some twenty steps
        job.signal(signal.SIGTERM)
        assert job.wait(30) == 75, job.text
    assert committed_steps(output) == [receipt.step, second.step]
    assert read_events(output, "interrupted")[0]["step"] == second.step


@pytest.mark.parametrize("slots", ["0", "1"])
def test_a_requested_save_of_two_nodes_is_uploaded_while_the_ranks_wait(
    slots: str, tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a folder of its own. Without memory for a snapshot, the ranks write the files themselves."""
    folder = tmp_path / "temporary"
    location, port = moto.location(f"hold-{uuid.uuid4().hex}"), str(free_port())
    jobs = [
        safepoint(
            output := tmp_path / f"node-{rank}",
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
            *("--output-dir", str(location), "--local-dir", str(output), "--snapshot-slots", slots),
            program=tiny(output, "--step-ms", "50", "--epochs", "9"),
            TMPDIR=str(make(folder / str(rank))),
            **moto.variables,
        )
        for rank in range(2)
    ]
    monkeypatch.setenv("TMPDIR", str(folder / "0"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "0"))
    for name, value in moto.variables.items():
        monkeypatch.setenv(name, value)
    with no_orphans(*jobs):
        jobs[0].wait_for_step(3)
        receipt = request_save(within_s=60, sign=lambda _: None)
        assert receipt.step
        jobs[0].signal(signal.SIGTERM)
        assert [job.wait(30) for job in jobs] == [75, 75], jobs[0].text
    assert read_events(tmp_path / "node-0", "interrupted")[0]["step"] == receipt.step
    # The node whose files arrive last commits the checkpoint.
    events = [event for rank in range(2) for event in read_events(tmp_path / f"node-{rank}", "uploaded")]
    assert {event["step"] for event in events} == {receipt.step}


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """After SIGKILL of one rank, the job resumes from the last checkpoint and finishes."""
    output = tmp_path / "run"
    options = ("--save-strategy", "steps", "--save-steps", "4", "--crash-step", "6", "--crash-rank", "1")
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait(120) == 0, job.text
    assert [event["step"] for event in read_events(output, "resumed_from_memory")] == [4]
    assert read_events(output, "finished")
    restarted = read_events(output, "restarted")[0]
    assert (restarted["restart"], restarted["max_restarts"]) == (1, 3)
    assert restarted["reason"] == "rank 1 was killed by SIGKILL"
    assert restarted["reason"] in job.text


@pytest.mark.long
def test_restarts_are_counted(tmp_path: Path) -> None:
    """With --max-restarts 0, the exit code after SIGKILL of a rank is 128 + 9."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, "--max-restarts", "0", program=tiny(output, "--crash-step", "3"))
    with no_orphans(job):
        assert job.wait() == 137, job.text
    assert "SIGKILL" in job.text


def test_everything_killed_during_a_save_leaves_nothing_torn(tmp_path: Path) -> None:
    """The next start resumes from the step before and deletes what was left."""
    output = tmp_path / "run"
    options = ("--save-strategy", "steps", "--save-steps", "1", "--hidden", "512", "--grad-accum", "1")
    job = safepoint(output, *TWO, program=tiny(output, *options, "--epochs", "10"))
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        job.wait_for(
            "a save under way", lambda: list((output / ".safepoint" / "work").glob("*/*/checkpoint-*/merged/*"))
        )
        job.kill_everything()
    before = committed_steps(output)
    for path in list_checkpoints(output):
        assert verify(path).is_valid
    job = safepoint(output, *TWO, program=tiny(output, *options, "--max-steps", str(before[-1] + 2)))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert read_events(output, "resumed")[-1]["step"] == before[-1]
    assert not list((output / ".safepoint" / "work").iterdir())


def test_dead_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    """After SIGKILL of the launcher alone, the ranks save and end."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--step-ms", "50", "--epochs", "20"))
    with no_orphans(job):
        job.wait_for_step(3)
        pids = job.rank_pids()
        job.process.kill()
        job.process.wait()
        wait_until_gone(pids, 30)
    assert_saved_and_valid(output)


@pytest.mark.long
def test_silent_peer_does_not_hang_the_others(tmp_path: Path) -> None:
    """One rank is stopped: the others end after the timeout with an error, and the job ends."""
    output = tmp_path / "run"
    job = safepoint(
        output,
        *TWO,
        "--max-restarts",
        "0",
        "--grace",
        "4",
        program=tiny(output, "--step-ms", "200", "--epochs", "30", "--grad-accum", "1"),
        SAFEPOINT_PEER_TIMEOUT="3",
    )
    with no_orphans(job):
        job.wait_for_step(2)
        pids = job.rank_pids()
        os.kill(pids[1], signal.SIGSTOP)
        # The Trainer's own all-reduce would wait for half an hour; the stop must not. Whether it has begun cannot
        # be seen from outside: five steps later it has.
        time.sleep(1)
        job.signal()
        code = job.wait(20)
        assert code == 143, job.text
        wait_until_gone(pids)


@pytest.mark.long
def test_an_evaluation_that_is_left_in_its_second_set_counts_once(tmp_path: Path) -> None:
    """The first set is logged once, and early stopping counts it once."""
    output = tmp_path / "run"
    options = (*("--eval-strategy", "steps", "--eval-steps", "4", "--save-strategy", "steps", "--save-steps", "4"),)
    options += (*("--best", "--patience", "2", "--epochs", "8", "--grad-accum", "1", "--eval-sets", "one", "two"),)
    options += ("--settings", '{"metric_for_best_model": "eval_one_loss"}')
    job = safepoint(output, *TWO, program=tiny(output, *options, "--eval-ms", "500"))
    with no_orphans(job):
        job.wait_for_mark("eval 8", 5)  # four of each set
        job.signal()
        assert job.wait(30) == 75, job.text
    assert assert_saved_and_valid(output) == 8
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    # Step 4 (the best so far), 8 and 12: two without improvement.
    assert read_events(output, "finished")[0]["step"] == 12
    for name in ("eval_one_loss", "eval_two_loss"):
        assert [entry["step"] for entry in logged(output) if name in entry] == [4, 8, 12]


@pytest.mark.long
def test_early_stopping_keeps_its_patience(tmp_path: Path) -> None:
    """Evaluations without improvement are counted across an interruption."""
    output = tmp_path / "run"
    options = (*("--eval-strategy", "steps", "--eval-steps", "4", "--save-strategy", "steps", "--save-steps", "4"),)
    options += (*("--best", "--patience", "3", "--epochs", "8", "--step-ms", "40", "--grad-accum", "1"),)
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        job.wait_for_mark("train 10")
        job.signal()
        assert job.wait(30) == 75, job.text
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    # Steps 4 (the best so far), 8, 12 and 16: three without improvement.
    assert read_events(output, "finished")[0]["step"] == 16
    # A third start has nothing to do, and does not train past the decision.
    job = safepoint(output, *TWO, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert read_events(output, "finished")[1]["step"] == 16


@pytest.mark.long
def test_a_finished_run_can_be_given_more_steps(tmp_path: Path) -> None:
    """A finished run continues when the script asks for more steps."""
    output = tmp_path / "run"
    for max_steps in ("4", "7"):
        job = safepoint(output, program=tiny(output, "--max-steps", max_steps))
        with no_orphans(job):
            assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "finished")] == [4, 7]
    # save_strategy is `no`: the end of training is saved all the same, before the script's own code follows.
    assert committed_steps(output) == [4, 7]


@pytest.mark.long
def test_files_of_callbacks_are_in_the_last_checkpoint(tmp_path: Path) -> None:
    """After an interruption the manifest lists the files that callbacks of any rank add."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, program=tiny(output, "--add-file", "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_mark("train 2")
        job.signal()
        assert job.wait(30) == 75, job.text
    step = assert_saved_and_valid(output)
    manifest = verify(output / f"checkpoint-{step}").manifest
    assert manifest is not None
    names = {entry.path for entry in manifest.files}
    assert {"notes-0.txt", "notes-1.txt"} <= names


@pytest.mark.long
def test_one_process_without_any_launcher(tmp_path: Path) -> None:
    """`python -m safepoint.training SCRIPT` alone saves, exits with 75 and resumes."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "safepoint.training", *tiny(output, "--step-ms", "50", "--epochs", "1")]
    job = Job(command, output, log=tmp_path / "log")
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal()
        assert job.wait(30) == 75, job.text
    step = assert_saved_and_valid(output)
    job = Job(command, output, log=tmp_path / "log")
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert read_events(output, "resumed")[0]["step"] == step


@pytest.mark.long
def test_under_plain_torchrun_an_interruption_is_never_a_success(tmp_path: Path) -> None:
    """torchrun exits with 1; the checkpoint exists, and the next start finishes."""
    output = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)),
        *("-m", "safepoint.training", str(TINY), "--out", str(output), "--step-ms", "50", "--epochs", "1"),
    ]
    job = Job(command, output, log=tmp_path / "log", env=environment(SAFEPOINT_SAVE_STEPS="100"))
    with no_orphans(job):
        job.wait_for_step(3)
        job.signal()
        assert job.wait(60) == 1, job.text
    step = assert_saved_and_valid(output)
    job = Job(command, output, log=tmp_path / "log")
    with no_orphans(job):
        assert job.wait(90) == 0, job.text
    assert read_events(output, "resumed")[0]["step"] == step
