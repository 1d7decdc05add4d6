"""What happens to the other ranks when one has died."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs import Job, is_alive, no_orphans, read_events, safepoint, tiny
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

TWO = ("--nproc-per-node", "2")
STEPS = ("--step-ms", "100", "--grad-accum", "1", "--max-steps", "20")


def test_ranks_with_nothing_to_save_are_killed_at_once(tmp_path: Path) -> None:
    """A rank that cannot react to SIGTERM does not delay the restart until the grace period ends."""
    output = tmp_path / "run"
    grace_s = 10_000
    job = safepoint(output, *TWO, "--grace", str(grace_s), "--save-steps", "1", program=tiny(output, *STEPS))
    with no_orphans(job):
        job.wait_for_event("saved")
        first, second = job.rank_pids()
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        event = job.wait_for_event("start_timed", count=2)
        assert job.wait(100) == 0, job.text
    assert next(one["at_s"] for one in event["phases"] if one["phase"] == "survivors ended") < grace_s / 10
    assert [one["reason"] for one in read_events(output, "restarted")] == ["rank 1 was killed by SIGKILL"]
    assert read_events(output, "resumed_from_memory")


def test_ranks_that_save_by_themselves_get_their_grace_period(tmp_path: Path) -> None:
    """Without the keeper, a rank may be writing a checkpoint: it gets SIGTERM, and ends by itself.

    After a stop, gloo sometimes does not notice that the other rank has died (docs/resume.md). Then the rank is killed
    when the grace period has ended.
    """
    output = tmp_path / "run"
    options = (*TWO, "--snapshot-slots", "0", "--grace", "40", "--save-steps", "1")
    job = safepoint(output, *options, program=tiny(output, *STEPS))
    with no_orphans(job):
        job.wait_for_event("saved")
        first, second = job.rank_pids()
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        job.wait_for("SIGTERM", lambda: _has_sigterm(first))
        assert is_alive(first)
        os.kill(first, signal.SIGCONT)
        job.wait_for_event("restarted")
        assert job.wait(100) == 0, job.text


def _has_sigterm(pid: int) -> bool:
    """Whether a process has received a SIGTERM that it has not handled yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in pending)


def test_a_rank_of_another_node_has_died(tmp_path: Path) -> None:
    """Both nodes restart their ranks, over the store that they have, and resume; with copied ranks too."""
    output, port = tmp_path / "run", str(free_port())
    first, second = (
        safepoint(
            output,
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
            *("--preload", "--save-steps", "1"),
            program=tiny(output, *STEPS),
            log=tmp_path / f"node-{rank}.log",
        )
        for rank in (0, 1)
    )
    with no_orphans(first, second):
        for count in (1, 2):
            first.wait_for_event("attempt_started", count=count)
            first.wait_for_event("saved", count=len(first.events("saved")) + 1)
            os.kill(first.rank_pids()[1], signal.SIGKILL)
        assert [job.wait(200) for job in (first, second)] == [0, 0], first.text + second.text
    assert {event["restart"] for event in read_events(output, "start_timed")} == {0, 1, 2}
    assert read_events(output, "finished")
    assert "import everything by themselves" not in first.text + second.text


@pytest.mark.usefixtures("both_ways")
def test_an_error_of_both_ranks_is_printed_by_both(tmp_path: Path) -> None:
    """A rank that ends with an error of its own is not killed while it prints the error."""
    output, script = tmp_path / "run", tmp_path / "raises.py"
    script.write_text(_RAISES.format(folder=str(output)))
    job: Job = safepoint(output, *TWO, "--max-restarts", "1", program=[str(script)])
    with no_orphans(job):
        assert job.wait(100) == 1, job.text
    assert job.text.count("ValueError: from rank 0") == 2, job.text
    assert job.text.count("ValueError: from rank 1") == 2, job.text


_RAISES = """
import os, torch
import safepoint
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.distributed.init_process_group("gloo")
with safepoint.session(model=model, optimizer=optimizer, output_dir={folder!r}) as run:
    for step in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        run.step()
    raise ValueError("from rank " + os.environ["RANK"])
"""
