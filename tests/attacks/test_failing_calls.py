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
from tests.support.checkpoints import commit, prepared
from tests.support.folder_scenario import FILES, attempt

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


def test_every_call_of_a_save_fails_once(tmp_path: Path) -> None:
    """No earlier checkpoint is lost, no incomplete one counts, and the next start goes on."""
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
            [sys.executable, "-m", "tests.attacks.test_failing_calls", control, below],
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "FAULTS_CONTROL": str(control),
                "FAULTS_BELOW": below,
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


if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    print(sweep(Faults.from_buffer(shared), Path(sys.argv[2]) / "out"), "calls failed")
