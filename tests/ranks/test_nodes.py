"""Two agents as two nodes with one shared folder, signalled together, one after the other, or one alone."""

import os
import signal
import time
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

_TRIALS = int(os.environ.get("SAFEPOINT_TEST_TRIALS", "1"))
_STEP = ("--step-ms", "70", "--grad-accum", "1", "--epochs", "200")


def two_agents(output: Path, *arguments: str) -> tuple[Job, Job]:
    port = str(free_port())
    first, second = (
        safepoint(
            output,
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
            program=tiny(output, *arguments),
            log=output.parent / f"node-{rank}.log",
        )
        for rank in (0, 1)
    )
    return first, second


def assert_one_agreed_checkpoint(output: Path, attempt: int) -> int:
    event = read_events(output, "saved")[-1]
    newest = list_checkpoints(output)[0]
    verdict = verify(newest)
    assert verdict.is_valid, verdict.faults
    assert verdict.manifest is not None
    assert verdict.manifest.step == event["step"] == int(newest.name.split("-")[1])
    assert verdict.manifest.attempt == attempt
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {entry.path for entry in verdict.manifest.files}
    return event["step"]


_LONG = pytest.mark.long


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("both at once", marks=_LONG),
        pytest.param("0.5 s apart", marks=_LONG),
        pytest.param("2 s apart", marks=_LONG),
        pytest.param("the first only", marks=_LONG),
        "the second only",
    ],
)
def test_two_nodes_leave_one_checkpoint(which: str, tmp_path: Path) -> None:
    """Each trial commits one checkpoint, both agents exit with 75, and the next start resumes."""
    output = tmp_path / "run"
    for trial in range(1, _TRIALS + 1):
        jobs = two_agents(output, *_STEP)
        with no_orphans(*jobs):
            jobs[0].wait_for_event("attempt_started", count=trial)
            if trial > 1:
                assert read_events(output, "resumed")[-1]["step"] == step  # noqa: F821  set by the trial before
            reached = (committed_steps(output) or [0])[-1]
            jobs[0].wait_for_step(reached + 3)
            _signal(jobs, which)
            assert [job.wait(40) for job in jobs] == [75, 75], jobs[0].text + jobs[1].text
        step = assert_one_agreed_checkpoint(output, trial)
        assert step > reached
        print(f"{which}: trial {trial}: step {step}")
    jobs = two_agents(output, *_STEP, "--max-steps", str(step + 2))
    with no_orphans(*jobs):
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
    assert read_events(output, "resumed")[-1]["step"] == step


def _signal(jobs: tuple[Job, Job], which: str) -> None:
    if which == "the second only":
        jobs[1].signal()
        return
    jobs[0].signal()
    if which == "the first only":
        return
    delay_s = {"both at once": 0.0, "0.5 s apart": 0.5, "2 s apart": 2.0}[which]
    deadline = time.monotonic() + delay_s
    while time.monotonic() < deadline and jobs[1].process.poll() is None:
        time.sleep(0.01)
    if jobs[1].process.poll() is None:
        jobs[1].signal()


def test_one_agent_with_two_ranks_one_rank_signalled(tmp_path: Path) -> None:
    """SIGTERM to one of two ranks of one agent: one checkpoint, exit code 75, resumed."""
    output = tmp_path / "run"
    step = 0
    for trial in range(1, _TRIALS + 1):
        job = safepoint(output, "--nproc-per-node", "2", program=tiny(output, *_STEP))
        with no_orphans(job):
            job.wait_for_event("attempt_started", count=trial)
            if trial > 1:
                assert read_events(output, "resumed")[-1]["step"] == step
            job.wait_for_step(step + 3)
            os.kill(job.rank_pids()[trial % 2], signal.SIGTERM)
            assert job.wait(40) == 75, job.text
        step = assert_one_agreed_checkpoint(output, trial)


@pytest.mark.long
def test_signal_to_one_node_while_models_load_ends_both(tmp_path: Path) -> None:
    """Before anything can be saved, both agents exit with 143."""
    output = tmp_path / "run"
    jobs = two_agents(output, "--load-s", "60")
    with no_orphans(*jobs):
        jobs[0].wait_for("both ranks loading", lambda: len(list(output.glob("loading-*"))) == 2)
        jobs[1].signal()
        assert [job.wait(30) for job in jobs] == [143, 143], jobs[0].text + jobs[1].text


@pytest.mark.long
def test_a_script_that_saves_on_each_node(tmp_path: Path) -> None:
    """There is one checkpoint for both nodes, which resume from it; the script gets a warning."""
    output = tmp_path / "run"
    arguments = ("--settings", '{"save_on_each_node": true}', "--save-strategy", "steps", "--save-steps", "4")
    jobs = two_agents(output, *arguments, "--step-ms", "70")
    with no_orphans(*jobs):
        jobs[0].wait_for_event("saved", step=4)
        jobs[1].signal()
        assert [job.wait(40) for job in jobs] == [75, 75], jobs[0].text + jobs[1].text
    step = assert_one_agreed_checkpoint(output, 1)
    jobs = two_agents(output, *arguments)
    with no_orphans(*jobs):
        assert [job.wait(90) for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
    assert read_events(output, "resumed")[0]["step"] == step
    assert not read_events(output, "save_failed")
    assert "save_on_each_node=True" in jobs[0].text
