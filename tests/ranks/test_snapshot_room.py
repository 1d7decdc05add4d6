"""Snapshots with too little memory or disk: training continues, and reports what is different."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from safepoint.progress.record import State, read_progress
from tests.support.jobs import Job, committed_steps, environment, no_orphans, read_events, tiny, wait_until_gone
from tests.support.keepers import expect_saves_beside_training, keepers_of, last_mark, memory_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_GROUPS = Path("/sys/fs/cgroup/memory")
_RUN = (sys.executable, "-m", "safepoint.cli.main", "run")
EVERY_STEP = ("--save-strategy", "steps", "--save-steps", "1", "--grad-accum", "1")


def _wrapped(shell: str, output: Path, *options: str, program: list[str], **changes: str) -> Job:
    """A job that a shell starts after it has prepared something."""
    command = ["sh", "-c", f'{shell} && exec "$@"', "sh", *_RUN, *options, *program]
    return Job(command, output, log=output.parent / "log", env=environment(**changes))


def _assert_valid(output: Path) -> None:
    for path in list_checkpoints(output):
        verdict = verify(path)
        assert verdict.is_valid, verdict.faults


# ---- memory -----------------------------------------------------------------------------------------------------


def test_a_pods_small_shm_is_not_needed(tmp_path: Path) -> None:
    """With 64 MB of /dev/shm and a state of 110 MB, no file of a snapshot is in /dev/shm or /tmp."""
    mount = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64m tmpfs /dev/shm"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: /dev/shm of 64 MB is NOT tested")
    output, temp = tmp_path / "run", tmp_path / "temp"
    temp.mkdir()
    program = tiny(output, *EVERY_STEP, "--hidden", "1024", "--step-ms", "300", "--max-steps", "30")
    command = ["unshare", "--mount", "sh", "-c", f'{mount[-1]} && exec "$@"', "sh", *_RUN]
    command += ["--save-total-limit", "2", *program]
    job = Job(command, output, log=tmp_path / "log", env=environment(TMPDIR=str(temp)))
    with no_orphans(job):
        job.wait_for_event("saved")
        [keeper] = keepers_of(job.process.pid)
        blocks = memory_of(keeper)
        assert blocks
        assert all(block.endswith("(deleted)") for block in blocks), blocks
        # What has no name cannot be removed by anybody who tidies up.
        for pid in (job.process.pid, keeper, *job.rank_pids()):
            assert not list(Path(f"/proc/{pid}/root/dev/shm").iterdir())
        sizes = [path.stat().st_size for path in temp.rglob("*") if path.is_file()]
        assert sum(sizes) < 1 << 20
        expect_saves_beside_training(job)
        assert job.wait(120) == 0, job.text
    assert "synchronous" not in job.text
    assert read_events(output, "saved")[-1]["size_bytes"] > 100_000_000
    assert committed_steps(output)[-1] == 30
    _assert_valid(output)


@contextlib.contextmanager
def _memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with a limit."""
    group = _GROUPS / f"safepoint-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: a memory limit is NOT tested: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.long
def test_a_memory_limit_makes_saves_synchronous(tmp_path: Path) -> None:
    """With too little memory for a snapshot, saves are synchronous, and a warning has the sizes."""
    output = tmp_path / "run"
    # Weights, gradients twice and moments, 750 MB, fit beside the programs; a snapshot of 450 MB does not, too.
    with _memory_group(1500 << 20) as group:
        program = tiny(output, "--hidden", "2048", "--grad-accum", "1", "--max-steps", "4")
        options = ("--save-steps", "2", "--save-total-limit", "1")
        job = _wrapped(f"echo $$ > {group}/cgroup.procs", output, *options, program=program)
        with no_orphans(job):
            assert job.wait(200) == 0, job.text
        killed = (group / "memory.oom_control").read_text()
        print(killed, (group / "memory.max_usage_in_bytes").read_text())
    assert "oom_kill 0" in killed
    assert "saves are synchronous, training waits for them: a snapshot needs" in job.text
    assert f"are available ({group}/memory.limit_in_bytes)" in job.text
    assert [event["step"] for event in read_events(output, "saved")] == [2, 4]
    assert job.text.count("saves are synchronous") == 1
    assert not read_events(output, "save_failed")
    assert not read_events(output, "restarted")
    _assert_valid(output)


# ---- disk -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: a full disk is NOT tested: {mounted.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_saves_and_not_the_training(tmp_path: Path) -> None:
    """An event reports the full disk, the older checkpoint stays, and later saves succeed."""
    output, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    with _small_disk(output, "64m"):
        options = ("--save-total-limit", "2", "--step-ms", "150", "--epochs", "20", "--hidden", "256")
        program = tiny(output, *EVERY_STEP, *options, "--marks", str(marks))
        job = _wrapped("true", output, program=program)
        with no_orphans(job):
            job.wait_for_event("saved", count=2)
            filler = output / "filler"
            failed = _fill_until_a_save_fails(job, filler)
            assert "No space left on device" in failed["reason"]
            stood = committed_steps(output)
            assert stood
            assert stood[-1] < failed["step"]
            job.wait_for("training to go on", lambda: last_mark(marks) > failed["step"] + 2)
            assert set(stood) & set(committed_steps(output)), "the checkpoint that stood is gone"
            filler.unlink()
            last = job.events("save_failed")[-1]["step"]
            job.wait_for("a save again", lambda: [e for e in job.events("saved") if e["step"] > last])
            job.signal()
            assert job.wait(40) == 75, job.text
        assert read_events(output, "interrupted")[0]["saved"]
        assert len(read_events(output, "attempt_started")) == 1
        _assert_valid(output)
        assert not list((output / ".safepoint" / "work").iterdir())


def test_an_end_that_cannot_be_saved_is_no_success(tmp_path: Path) -> None:
    """The disk stays full: training ends with a message and an exit code other than 0."""
    output, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    with _small_disk(output, "64m"):
        options = ("--save-total-limit", "2", "--step-ms", "150", "--max-steps", "24", "--hidden", "256")
        options = (*options, "--end", str(tmp_path / "end"))
        job = _wrapped("true", output, program=tiny(output, *EVERY_STEP, *options, "--marks", str(marks)))
        with no_orphans(job):
            job.wait_for_event("saved", count=2)
            # The disk is then full, so that the event of the save may be missing.
            _wait_filling(job, output / "filler", lambda: "could not be saved" in job.text)
            assert job.wait() == 13, job.text
        assert "the training ended at step 24, and this step could not be saved" in job.text


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_loop_without_a_launcher_does_not_end_well_either(num_ranks: int, tmp_path: Path) -> None:
    """The script's own process reports it; of several ranks, the first."""
    output, script = tmp_path / "run", tmp_path / "script.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if num_ranks == 2 else ()
    script.write_text(
        "import os, torch, safepoint\n"
        "model = torch.nn.Linear(1024, 1024)\n"
        "if 'RANK' in os.environ:\n"
        "    torch.distributed.init_process_group('gloo')\n"
        "    model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.DataLoader(torch.randn(8, 1024))\n"
        f"with safepoint.session(model=model, optimizer=optimizer, data=data, output_dir={str(output)!r}) as run:\n"
        "    for batch in run.batches():\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
        "        run.step()\n"
        "print('the session has ended')\n"
    )
    with _small_disk(output, "64m"):
        _fill(output / "filler", leave_bytes=2 << 20)
        job = Job([sys.executable, *torchrun, str(script)], output, log=tmp_path / "log", env=environment())
        with no_orphans(job):
            assert job.wait() == 1, job.text
        assert job.text.count("StorageError: the training ended at step 8, and this step could not be saved") == 1
        assert job.text.count("the session has ended") == num_ranks - 1
        progress = read_progress(output / ".safepoint" / "progress.json")
        assert progress is not None
        assert progress.state is State.FAILED
        wait_until_gone(keepers_of(job.process.pid))  # it ends a moment after its last rank, and has the disk open


def _fill_until_a_save_fails(job: Job, path: Path) -> dict[str, Any]:
    """Fill the disk until a save fails, and return its event."""
    return _wait_filling(job, path, lambda: next(iter(job.events("save_failed")), None))


def _wait_filling(job: Job, path: Path, found: Callable[[], Any]) -> Any:
    """Fill the disk again and again until a save fails."""

    def failed() -> Any:
        _fill(path, leave_bytes=2 << 20)
        return found()

    return job.wait_for("a save that fails", failed)


def _fill(path: Path, *, leave_bytes: int) -> None:
    """Write until so many bytes are left; a save may take some of them meanwhile."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            disk = os.statvfs(path.parent)
            excess = disk.f_bavail * disk.f_frsize - leave_bytes
            if excess <= 0:
                return
            file.write(bytes(min(excess, 1 << 20)))
