"""The checkpoint API of NVIDIA's driver on a real device: what Safepoint relies on, and what its guard repairs.

The figures that the tests print (`pytest -s`) are those of docs/process-images.md.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import FreezeError
from safepoint.transparent.criu.trees import resident_bytes
from safepoint.transparent.cuda.driver import (
    CudaDriver,
    CudaState,
    DriverError,
    DriverLibrary,
    DriverTool,
    find_driver,
)
from safepoint.transparent.cuda.gpus import gpu_uuids, used_bytes
from safepoint.transparent.cuda.host_copy import gpu_memory_in_host
from safepoint.transparent.cuda.resuming import resume
from safepoint.transparent.cuda.users import gpu_users
from tests.support.criu import environment, unavailable
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.timeout(120)

_PROGRAM = Path(__file__).parents[1] / "programs" / "cuda_training.py"
_SETTINGS = {"CUDA_VISIBLE_DEVICES": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


class Training:
    """A training on the device, in the background."""

    def __init__(self, out: Path, *words: str, **environ: str) -> None:
        self.out = out
        with out.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(out), *words],
                env={**os.environ, **_SETTINGS, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    def has_reached(self, step: int) -> None:
        wait_for(lambda: len(self.lines) > step or self.process.poll() is not None, f"step {step}")
        assert len(self.lines) > step, self.out.with_suffix(".log").read_text()

    def end(self) -> list[str]:
        """Wait for its end; what it has written."""
        assert self.process.wait(60 * PATIENCE) == 0, self.out.with_suffix(".log").read_text()
        return self.lines


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings, all of which are killed at the end."""
    found: list[Training] = []

    def begin(name: str, *words: str, **environ: str) -> Training:
        found.append(Training(tmp_path / name, *words, **environ))
        return found[-1]

    yield begin
    for one in found:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a training of 200 steps writes that is never frozen."""
    return Training(tmp_path_factory.mktemp("reference") / "out", "200", "--mb", "1024").end()


@pytest.fixture(params=["library", "tool"])
def driver(request: pytest.FixtureRequest) -> CudaDriver:
    """Both ways to the driver."""
    if request.param == "library":
        found = find_driver()
        assert isinstance(found, DriverLibrary), "the package cuda-bindings is not installed"
        return found
    path = os.environ.get("SAFEPOINT_TEST_CUDA_CHECKPOINT") or shutil.which("cuda-checkpoint")
    if path is None:
        pytest.skip("cuda-checkpoint is not installed")
    return DriverTool(path)


def timed(call: Callable[[], Any]) -> float:
    begun_s = time.monotonic()
    call()
    return time.monotonic() - begun_s


@pytest.mark.parametrize("mb", [1024])
def test_frozen_is_undisturbed(
    start: Callable[..., Training], driver: CudaDriver, expected: list[str], mb: int
) -> None:
    """Locked, checkpointed, its memory given up, restored, unlocked: each loss and all weights are the same."""
    training = start("out", "200", "--mb", str(mb), "--pause-s", "0.02")
    training.has_reached(20)
    pid, seconds = training.pid, {}
    assert driver.state(pid) is CudaState.RUNNING
    before, host = used_bytes([pid]), resident_bytes([pid])
    seconds["lock"] = timed(lambda: driver.lock(pid, 5000))
    assert driver.state(pid) is CudaState.LOCKED
    seconds["checkpoint"] = timed(lambda: driver.checkpoint(pid))
    assert driver.state(pid) is CudaState.CHECKPOINTED
    host_after = resident_bytes([pid])
    assert gpu_users([pid]) == []  # so it has no memory of the device, whatever other programs use
    assert before >= mb << 20
    assert host_after - host >= mb << 20
    written = len(training.lines)
    time.sleep(0.5)  # a step takes 20 ms
    assert len(training.lines) <= written + 1
    seconds["restore"] = timed(lambda: driver.restore(pid, {}))
    assert driver.state(pid) is CudaState.LOCKED
    seconds["unlock"] = timed(lambda: driver.unlock(pid))
    assert driver.state(pid) is CudaState.RUNNING
    assert training.end() == expected
    print(f"FIGURES {driver.name}, {mb} MB:", json.dumps({name: round(value, 4) for name, value in seconds.items()}))
    print(f"FIGURES device {before >> 20} MB, host {host >> 20} MB to {host_after >> 20} MB")


def test_gpus_are_given_by_uuid(start: Callable[..., Training], expected: list[str]) -> None:
    """Here each takes its own place, because the machine has one; the driver compares the list with its GPUs."""
    driver = find_driver()
    training = start("out", "200", "--mb", "1024", "--pause-s", "0.02")
    training.has_reached(20)
    driver.lock(training.pid, 5000)
    driver.checkpoint(training.pid)
    driver.restore(training.pid, {uuid: uuid for uuid in gpu_uuids()})
    driver.unlock(training.pid)
    assert training.end() == expected


def test_a_gpu_that_is_not_there_is_refused(start: Callable[..., Training], expected: list[str]) -> None:
    """The process stays as it was, so that it can be restored on another GPU."""
    driver = find_driver()
    training = start("out", "200", "--mb", "1024", "--pause-s", "0.02")
    training.has_reached(20)
    driver.lock(training.pid, 5000)
    driver.checkpoint(training.pid)
    with pytest.raises(DriverError) as caught:
        driver.restore(training.pid, {gpu_uuids()[0]: "GPU-00000000-0000-0000-0000-000000000000"})
    print("FIGURES a GPU that is not there:", caught.value, "| then", driver.state(training.pid))
    assert driver.state(training.pid) is CudaState.CHECKPOINTED
    driver.restore(training.pid, {})
    driver.unlock(training.pid)
    assert training.end() == expected


def test_processes_without_cuda_have_no_state() -> None:
    """The driver refuses them, and does not wait."""
    driver = find_driver()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        with pytest.raises(DriverError) as caught:
            driver.state(process.pid)
        print("FIGURES state of a process without CUDA:", caught.value)
        assert gpu_users([process.pid]) == []
    finally:
        process.kill()
        process.wait()
    with pytest.raises(DriverError) as caught:
        driver.state(process.pid)
    print("FIGURES state of no process:", caught.value)


def test_a_kernel_that_runs_too_long_is_not_frozen(start: Callable[..., Training], tmp_path: Path) -> None:
    """The lock waits for the call that the process has begun; after the limit, the process runs on, undisturbed."""
    training = start("out", "2", "--kernel-s", "6")
    reference = start("reference", "2")
    training.has_reached(0)
    begun_s = time.monotonic()
    with (
        pytest.raises(FreezeError, match="did not end in") as caught,
        gpu_memory_in_host([training.pid], lock_s=0.2),
    ):
        pytest.fail("the process was locked while its kernel ran")
    print(f"FIGURES lock refused after {time.monotonic() - begun_s:.2f} s:", caught.value)
    assert find_driver().state(training.pid) is CudaState.RUNNING
    assert training.end() == reference.end()


def test_nccl_in_a_world_of_one(start: Callable[..., Training]) -> None:
    """A process that has an NCCL communicator of its own, without its settings: frozen, and equal."""
    reference = start("reference", "100", "--nccl", MASTER_PORT="29611").end()
    training = start("out", "100", "--nccl", "--pause-s", "0.03", MASTER_PORT="29612")
    training.has_reached(20)
    threads = sorted({path.read_text().strip() for path in Path(f"/proc/{training.pid}/task").glob("*/comm")})
    print("FIGURES threads of a process with NCCL:", threads)
    assert any(name.startswith("pt_nccl") for name in threads), threads
    with gpu_memory_in_host([training.pid]) as work:
        work.resume()
    assert training.end() == reference


_CALLER = """
import os, signal, sys, threading, time
from safepoint.transparent.cuda import host_copy
from safepoint.transparent.cuda.driver import find_driver
pid, moment, is_guarded = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "guarded"
class NoGuard:
    def __init__(self, pids, places=None): pass
if not is_guarded:
    host_copy.CudaGuard = NoGuard
driver = find_driver()
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "locked":
    driver.checkpoint = die
elif moment == "copying":
    checkpoint = driver.checkpoint
    def begin(pid):
        threading.Timer(0.2, die).start()
        checkpoint(pid)
    driver.checkpoint = begin
with host_copy.gpu_memory_in_host([pid], driver=driver):
    if moment == "restoring":
        threading.Timer(0.1, die).start()
        for number in range(1000):
            host_copy.resume(driver, [pid])
            time.sleep(1)
    die()
"""


@pytest.mark.parametrize("moment", ["locked", "copying", "checkpointed", "restoring"])
@pytest.mark.parametrize("guarded", ["guarded", "unguarded"])
def test_a_killed_caller(start: Callable[..., Training], expected: list[str], moment: str, guarded: str) -> None:
    """With the guard, the training goes on by itself; without it, it waits, and another process can bring it back."""
    driver = find_driver()
    training = start("out", "200", "--mb", "1024", "--pause-s", "0.02")
    training.has_reached(10)
    killed = subprocess.run(
        [sys.executable, "-c", _CALLER, str(training.pid), moment, guarded], env={**os.environ}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    begun_s = time.monotonic()
    written = len(training.lines)
    if guarded == "unguarded":
        states = []
        for _ in range(10):
            with contextlib.suppress(DriverError):
                states.append(driver.state(training.pid))
            time.sleep(0.3)
        print(f"FIGURES killed when {moment}, without a guard: {[str(state) for state in dict.fromkeys(states)]}")
        wait_for(lambda: resume(driver, [training.pid]) == {}, "another process brings it back")
    training.has_reached(written + 3)
    print(f"FIGURES killed when {moment}, {guarded}: trains again {time.monotonic() - begun_s:.2f} s later")
    assert training.end() == expected


def test_an_image_of_a_training_on_a_device(
    start: Callable[..., Training], expected: list[str], tmp_path: Path
) -> None:
    """Frozen with CRIU while it trains, and ended; thawed; each loss and all weights are those of the reference."""
    if reason := unavailable():
        pytest.skip(reason)

    def safepoint(*words: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "safepoint.cli.main", *map(str, words), "--json"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        logs = {path.name: path.read_text()[-3000:] for path in tmp_path.rglob("criu-*.log")}
        assert done.returncode == 0, f"{done.stderr}{done.stdout}\n{logs}"
        return json.loads(done.stdout)

    training = start("out", "200", "--mb", "1024", "--pause-s", "0.03")
    training.has_reached(20)
    frozen = safepoint("freeze", "--pid", training.pid, "--to", tmp_path / "images", "--leave-running")
    print("FIGURES first image, the training runs on:", frozen)
    training.has_reached(len(training.lines) + 3)
    frozen = safepoint("freeze", "--pid", training.pid, "--to", tmp_path / "images")
    print("FIGURES second image:", frozen)
    training.process.wait(60)
    assert len(training.lines) < 200
    begun_s = time.monotonic()
    restored = safepoint("thaw", tmp_path / "images")
    print(f"FIGURES thawed in {time.monotonic() - begun_s:.2f} s: {restored}")
    try:
        wait_for(lambda: training.lines[-1].startswith("end"), "the end of the restored training")
        assert training.lines == expected
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(restored["pid"], signal.SIGKILL)
