"""EIO, EDQUOT and ENOSPC in any call that writes to the output folder: one failed call, or all from one on."""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SafepointError
from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from tests.support.checkpoints import commit, prepared
from tests.support.folder_scenario import FILES, attempt
from tests.support.job_values import job_spec

_NEVER = 1 << 30


class Faults(ctypes.Structure):
    """What `faults.c` shares with this process."""

    _fields_ = [
        ("left", ctypes.c_int),
        ("code", ctypes.c_int),
        ("is_sticky", ctypes.c_int),
        ("count", ctypes.c_int),
        ("name", ctypes.c_char * 32),
    ]


@pytest.mark.parametrize("what", ["folder", "history"])
def test_every_call_fails_once(what: str, tmp_path: Path) -> None:
    """No earlier checkpoint or job is lost, nothing incomplete counts, and the next start goes on."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here: failing calls are NOT tested")
    library, control = tmp_path / "faults.so", tmp_path / "control"
    source = Path(__file__).parents[1] / "support/faults.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    control.write_bytes(bytes(mmap.PAGESIZE))
    root = Path(__file__).parents[2]
    in_memory = Path("/dev/shm")  # the calls are the same, and a disk takes a minute for them
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as below:
        done = subprocess.run(
            [sys.executable, "-m", "tests.attacks.test_failing_calls", what, control, below],
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "FAULTS_CONTROL": str(control),
                "FAULTS_BELOW": below,
                "XDG_STATE_HOME": f"{below}/state",
                "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root))),
            },
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls failed" in done.stdout


def sweep(faults: Faults, root: Path) -> int:
    """Fail every call of a start that commits step 3, which is there already or not; returns how many there were."""
    faults.left = _NEVER
    build(root, [1, 2])
    faults.count = 0
    attempt(root)
    num_calls, codes = faults.count, (errno.EIO, errno.EDQUOT, errno.ENOSPC)
    assert num_calls > 50, "the calls are intercepted"
    num_failed = 0
    for steps in ([1, 2], [1, 2, 3]):
        for is_sticky in (0, 1):
            for number in range(1, num_calls + 1):
                build(root, steps)
                faults.code, faults.is_sticky, faults.name = codes[number % 3], is_sticky, b""
                faults.left = number
                error: Exception | None = None
                try:
                    attempt(root)
                except (SafepointError, OSError) as caught:
                    error = caught
                num_failed += faults.left < 1
                what = f"call {number}, {faults.name!r}: {error!r}"
                faults.left = _NEVER
                examine(root, steps, error, what)
    return num_failed


def build(root: Path, steps: list[int]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    output = prepared(root)
    for step in steps:
        commit(output, step, FILES)


def examine(root: Path, before: list[int], error: Exception | None, what: str) -> None:
    after = OutputFolder(root).steps()
    assert all(verify(root / f"checkpoint-{step}").is_valid for step in after), what
    assert set(after) >= {step for step in before if step > 1}, f"{what}: {after}"
    assert error is not None or 3 in after, what
    assert 3 in after or after == [2, 1], f"{what}: {after}"
    attempt(root)
    assert OutputFolder(root).steps()[:2] == [3, 2], what


def sweep_history(faults: Faults, state: Path) -> int:
    """Fail every call of the history of one job; returns how many there were."""
    faults.left = _NEVER
    begin_history(state)
    faults.count = 0
    run_job()
    num_calls, codes = faults.count, (errno.EIO, errno.EDQUOT, errno.ENOSPC)
    for is_sticky in (0, 1):
        for number in range(1, num_calls + 1):
            begin_history(state)
            faults.code, faults.is_sticky = codes[number % 3], is_sticky
            faults.left = number
            error: Exception | None = None
            try:
                run_job()
            except SafepointError as caught:
                error = caught
            faults.left = _NEVER
            with History() as history:
                jobs = {job.name: job for job in history.jobs()}
                assert "old" in jobs, number
                assert error is not None or jobs["new"].state is JobState.COMPLETE, number
                assert "new" not in jobs or jobs["new"].attempt == len(history.attempts("new")), number
    return 2 * num_calls


def begin_history(state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)
    with History() as history:
        history.add(job_spec("old"), actor="me")


def run_job() -> None:
    with History() as history:
        history.add(job_spec("new"), actor="me")
        with history.transaction():
            history.become("new", JobState.RUNNING, actor="me", attempt=1)
            history.begin_attempt("new", 1, 1)
        history.end_attempt("new", 1, outcome="", exit_code=0)
        history.become("new", JobState.COMPLETE, actor="me")


if __name__ == "__main__":
    with Path(sys.argv[2]).open("r+b") as file:
        shared = Faults.from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    folder = Path(sys.argv[3])
    is_folder = sys.argv[1] == "folder"
    print(sweep(shared, folder / "out") if is_folder else sweep_history(shared, folder / "state"), "calls failed")
