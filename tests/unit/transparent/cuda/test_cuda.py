"""The checkpoint API of the driver, with a stand-in for it: what is called when, and what happens after failures."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import FreezeError, UnsupportedError
from safepoint.transparent.cuda import driver as driver_module
from safepoint.transparent.cuda import gpus, guard, host_copy
from safepoint.transparent.cuda.driver import CudaState, DriverError, DriverLibrary, DriverTool, find_driver
from safepoint.transparent.cuda.guard import bring_back
from safepoint.transparent.cuda.host_copy import gpu_memory_in_host, resume_restored
from safepoint.transparent.cuda.users import NCCL_SETTINGS, gpu_users
from tests.support.cuda_stand_in import STATES, StandInDriver, install_tool
from tests.support.patience import PATIENCE

_OLD, _NEW = ("GPU-" + digit * 8 + "-0000-0000-0000-" + digit * 12 for digit in "ab")


@pytest.fixture(autouse=True)
def _no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's driver nor its programs are found; failures are not waited for."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(driver_module.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # pyright: ignore[reportArgumentType]
    write_nvidia_smi(tmp_path / "bin")
    for module, name in ((host_copy, "_PAUSE_S"), (guard, "_AGAIN_S"), (guard, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.0)


def write_nvidia_smi(folder: Path) -> None:
    path = folder / "nvidia-smi"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in\n*query-gpu=uuid*) echo {_OLD}; echo {_NEW};;\n'
        "*query-gpu=memory.used*) echo 500; echo 70;;\n"
        "*query-compute-apps*) echo '11, 300'; echo '12, [N/A]'; echo '13, 40'; echo '13, 50';;\nesac\n"
    )
    path.chmod(0o755)


class Guards:
    """Takes the place of the guard's process."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, pids: Any, places: Any = None) -> "Guards":
        self.seen.append("start")
        return self

    def release(self) -> None:
        self.seen.append("release")

    def take_over(self) -> None:
        self.seen.append("take over")


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Guards:
    found = Guards()
    monkeypatch.setattr(host_copy, "CudaGuard", found)
    return found


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


def failing(action: str, *pids: int, times: int = 1000) -> Callable[[str, int], None]:
    left = dict.fromkeys(pids, times)

    def fail(what: str, pid: int) -> None:
        if what == action and left.get(pid, 0) > 0:
            left[pid] -= 1
            raise DriverError("CUDA_ERROR_NOT_READY")

    return fail


# ---- To host memory and back -----------------------------------------------------------------------------------


def test_all_are_locked_before_one_is_checkpointed(tmp_path: Path, guards: Guards) -> None:
    """Only processes that have a GPU open are touched; after `resume` they run."""
    driver = StandInDriver(tmp_path)
    for pid in (11, 12):
        driver.open_gpu(pid)
    with gpu_memory_in_host([10, 11, 12], driver=driver, proc=tmp_path) as work:
        assert [action for action, _ in driver.actions] == ["lock", "lock", "checkpoint", "checkpoint"]
        assert list(work.pids) == [11, 12]
        assert gpu_users([11, 12], tmp_path) == []
        work.resume()
        assert driver.states == {11: "running", 12: "running"}
    assert guards.seen == ["start", "release"]


def test_processes_that_were_ended_are_left_alone(tmp_path: Path, guards: Guards) -> None:
    """The block ends without an exception: their image is committed."""
    driver = StandInDriver(tmp_path)
    driver.open_gpu(11)
    with gpu_memory_in_host([11], driver=driver, proc=tmp_path):
        pass
    assert [action for action, _ in driver.actions] == ["lock", "checkpoint"]
    assert guards.seen == ["start", "release"]


def test_without_a_gpu_nothing_is_needed(tmp_path: Path, guards: Guards) -> None:
    """Neither a driver nor a guard."""
    with gpu_memory_in_host([10], proc=tmp_path) as work:
        work.resume()
        assert work.gpus == ()
    assert guards.seen == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_after_a_failure_the_processes_run_on(tmp_path: Path, guards: Guards, error: BaseException) -> None:
    driver = StandInDriver(tmp_path)
    driver.open_gpu(11)
    with pytest.raises(type(error)), gpu_memory_in_host([11], driver=driver, proc=tmp_path):
        raise error
    assert driver.states == {11: "running"}
    assert guards.seen == ["start", "release"]


def test_one_that_cannot_be_locked_unlocks_all(tmp_path: Path, guards: Guards) -> None:
    driver = StandInDriver(tmp_path, failing("lock", 12))
    for pid in (11, 12):
        driver.open_gpu(pid)
    with (
        pytest.raises(FreezeError, match=r"process 12 .*3 attempts.*nothing was frozen"),
        gpu_memory_in_host([11, 12], driver=driver, proc=tmp_path),
    ):
        pytest.fail("the block must not be entered")
    assert driver.states == {11: "running", 12: "running"}
    assert driver.actions == [("lock", 11), ("unlock", 11)] * 3


def test_a_lock_is_tried_again(tmp_path: Path, guards: Guards) -> None:
    """A rank may have waited for another one that was locked first."""
    driver = StandInDriver(tmp_path, failing("lock", 12, times=1))
    for pid in (11, 12):
        driver.open_gpu(pid)
    with gpu_memory_in_host([11, 12], driver=driver, proc=tmp_path) as work:
        assert driver.states == {11: "checkpointed", 12: "checkpointed"}
        work.resume()


def test_one_that_cannot_be_checkpointed_restores_all(tmp_path: Path, guards: Guards) -> None:
    driver = StandInDriver(tmp_path, failing("checkpoint", 12))
    for pid in (11, 12):
        driver.open_gpu(pid)
    with (
        pytest.raises(FreezeError, match="CUDA_ERROR_NOT_READY"),
        gpu_memory_in_host([11, 12], driver=driver, proc=tmp_path),
    ):
        pytest.fail("the block must not be entered")
    assert driver.states == {11: "running", 12: "running"}


def test_memory_that_cannot_be_restored_is_left_to_the_guard(tmp_path: Path, guards: Guards) -> None:
    """Another program may use the memory of the GPU now."""
    driver = StandInDriver(tmp_path, failing("restore", 11))
    driver.open_gpu(11)
    with (
        pytest.raises(FreezeError, match="tries again every second"),
        gpu_memory_in_host([11], driver=driver, proc=tmp_path) as work,
    ):
        work.resume()
    assert guards.seen == ["start", "take over"]


def test_a_device_that_stays_open_is_refused(tmp_path: Path, guards: Guards) -> None:
    """CRIU could not dump it."""
    driver = StandInDriver(tmp_path)
    driver.open_gpu(11)
    (tmp_path / "11" / "fd" / "10").symlink_to("/dev/nvidiactl")
    with (
        pytest.raises(FreezeError, match="without CUDA"),
        gpu_memory_in_host([11], driver=driver, proc=tmp_path),
    ):
        pytest.fail("the block must not be entered")
    assert driver.states == {11: "running"}


@pytest.mark.parametrize("state", [None, "locked", "checkpointed", "failed"])
def test_what_the_driver_cannot_do_is_refused_before(tmp_path: Path, guards: Guards, state: str | None) -> None:
    """A process without CUDA, and one that another program has locked."""
    driver = StandInDriver(tmp_path)
    driver.open_gpu(11)
    driver.states = {11: state} if state else {}
    with (
        pytest.raises(FreezeError, match="nothing was frozen"),
        gpu_memory_in_host([11], driver=driver, proc=tmp_path),
    ):
        pytest.fail("the block must not be entered")
    assert driver.actions == []
    assert guards.seen == []


@pytest.mark.parametrize(
    ("threads", "environment", "is_refused"),
    [
        ("pt_nccl_watchdg", {}, True),
        ("pt_nccl_watchdg", NCCL_SETTINGS | {"NCCL_NVLS_ENABLE": "1"}, True),
        ("pt_nccl_watchdg", NCCL_SETTINGS, False),
        ("python3", {}, False),
    ],
)
def test_ranks_that_use_nccl_need_its_settings(
    tmp_path: Path, guards: Guards, threads: str, environment: dict[str, str], is_refused: bool
) -> None:
    """Two of them; a process alone is connected to none."""
    driver = StandInDriver(tmp_path)
    driver.open_gpu(100, threads=("python3", threads), **environment)
    with gpu_memory_in_host([100], driver=driver, proc=tmp_path) as work:
        work.resume()
    driver.open_gpu(200, threads=("python3", threads), **environment)
    driver.actions.clear()
    if is_refused:
        with (
            pytest.raises(FreezeError, match=r"NCCL_NVLS_ENABLE=0.*nothing was frozen"),
            gpu_memory_in_host([100, 200], driver=driver, proc=tmp_path),
        ):
            pytest.fail("the block must not be entered")
        assert driver.actions == []
    else:
        with gpu_memory_in_host([100, 200], driver=driver, proc=tmp_path) as work:
            work.resume()


# ---- After CRIU has restored the processes ---------------------------------------------------------------------


def test_restored_processes_get_their_memory_back(tmp_path: Path, guards: Guards) -> None:
    """Those that are checkpointed, on the GPUs that take the place of the old ones."""
    driver = StandInDriver(tmp_path)
    for pid in (11, 12):
        driver.open_gpu(pid)
        driver.states[pid] = "checkpointed"
        (tmp_path / str(pid) / "fd" / "9").unlink()
    resume_restored([10, 11, 12], {_OLD: _NEW}, driver=driver)
    assert driver.states == {11: "running", 12: "running"}
    assert driver.gpus == {11: {_OLD: _NEW}, 12: {_OLD: _NEW}}
    assert guards.seen == ["start", "release"]


@pytest.mark.parametrize("state", ["checkpointed", "failed", None])
def test_restored_processes_without_their_memory_are_an_error(
    tmp_path: Path, guards: Guards, state: str | None
) -> None:
    """Also if the driver does not know them."""
    driver = StandInDriver(tmp_path, failing("restore", 11))
    driver.open_gpu(11)
    driver.states = {11: state} if state else {}
    with pytest.raises(FreezeError, match="could not be restored"):
        resume_restored([11], {}, driver=driver)
    assert guards.seen == ["start", "release"]


def test_gpus_take_the_place_of_others() -> None:
    """The driver needs an entry for all of them as soon as one is another one."""
    third = _OLD.replace("a", "c")
    assert gpus.places_for([_OLD, _NEW], [_NEW, third, _OLD]) == {}
    assert gpus.places_for([_OLD, _NEW], [_NEW, third]) == {_NEW: _NEW, _OLD: third}
    with pytest.raises(FreezeError, match=r"2 GPUs, and this machine has 1.*nothing was restored"):
        gpus.places_for([_OLD, _NEW], [third])


def test_what_nvidia_smi_reports(tmp_path: Path) -> None:
    """The GPUs, and the memory of processes; in a container the driver knows other numbers, and all memory counts."""
    assert gpus.gpu_uuids() == (_OLD, _NEW)
    assert gpus.used_bytes([11]) == 300 << 20
    assert gpus.used_bytes([11, 13]) == 390 << 20  # process 13 has memory on two GPUs
    assert gpus.used_bytes([11, 12]) == 570 << 20


def test_gpus_that_cannot_be_recorded_are_not_frozen(tmp_path: Path, guards: Guards) -> None:
    """Without `nvidia-smi`, the image could not say to which GPUs the memory belongs."""
    (tmp_path / "bin" / "nvidia-smi").unlink()
    driver = StandInDriver(tmp_path / "proc")
    driver.open_gpu(11)
    with (
        pytest.raises(FreezeError, match=r"nvidia-smi .*nothing was frozen"),
        gpu_memory_in_host([11], driver=driver, proc=tmp_path / "proc"),
    ):
        pytest.fail("the block must not be entered")
    assert driver.actions == []


# ---- The two ways to the driver --------------------------------------------------------------------------------


class Bindings(SimpleNamespace):
    """`cuda.bindings.driver`, as far as it is used."""

    def __init__(self, version: int = 13000, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for action, value in (("GetState", (2,)), ("Lock", ()), ("Checkpoint", ()), ("Restore", ()), ("Unlock", ())):
            setattr(
                self,
                f"cuCheckpointProcess{action}",
                lambda *given, action=action, value=value: self.calls.append((action, *given)) or (code, *value),
            )
        self.cuDriverGetVersion = lambda: (0, version)
        self.CUcheckpointLockArgs = self.CUcheckpointRestoreArgs = self.CUcheckpointGpuPair = SimpleNamespace
        self.CUuuid = lambda address: __import__("ctypes").string_at(address, 16).hex()


def test_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used where it and the driver are new enough; its arguments are those of the driver."""
    bindings = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)  # pyright: ignore[reportArgumentType]
    driver = find_driver()
    assert isinstance(driver, DriverLibrary)
    assert driver.state(11) is CudaState.CHECKPOINTED
    driver.lock(11, 250)
    driver.checkpoint(11)
    driver.restore(11, {_OLD: _NEW})
    driver.unlock(11)
    assert [call[:2] for call in bindings.calls] == [
        *(("GetState", 11), ("Lock", 11), ("Checkpoint", 11), ("Restore", 11), ("Unlock", 11))
    ]
    assert bindings.calls[1][2].timeoutMs == 250
    (pair,) = bindings.calls[3][2].gpuPairs
    assert bindings.calls[3][2].gpuPairsCount == 1
    assert (pair.oldUuid, pair.newUuid) == tuple(uuid[4:].replace("-", "") for uuid in (_OLD, _NEW))
    with pytest.raises(DriverError, match="cuCheckpointProcessUnlock: 801"):
        DriverLibrary(Bindings(code=801)).unlock(11)


def test_a_machine_without_the_api_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 16, why, and what to install."""
    with pytest.raises(UnsupportedError, match="cuda-bindings is not installed") as caught:
        find_driver()
    assert "pip install" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Bindings(version=12040))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match=r"CUDA 12\.4, and CUDA 12\.8"):
        find_driver()
    driver = StandInDriver(tmp_path / "proc")
    driver.open_gpu(11)
    with pytest.raises(UnsupportedError, match="nothing was done"), gpu_memory_in_host([11], proc=tmp_path / "proc"):
        pytest.fail("the block must not be entered")


def test_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states and its failures are those of the driver."""
    monkeypatch.setenv(STATES, str(tmp_path))
    (tmp_path / "11").write_text("running")
    install_tool(tmp_path / "bin")
    driver = find_driver()
    assert isinstance(driver, DriverTool)
    assert driver.state(11) is CudaState.RUNNING
    driver.lock(11, 1000)
    driver.checkpoint(11)
    assert driver.state(11) is CudaState.CHECKPOINTED
    with pytest.raises(DriverError, match="cannot lock a process that is checkpointed"):
        driver.lock(11, 1000)
    with pytest.raises(DriverError, match="cuda-bindings"):
        driver.restore(11, {_OLD: _NEW})
    driver.restore(11, {})
    driver.unlock(11)
    assert (tmp_path / "11").read_text() == "running"
    with pytest.raises(DriverError, match="Could not find CUDA"):
        driver.state(12)


# ---- The guard -------------------------------------------------------------------------------------------------


def test_the_guard_tries_until_it_succeeds(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    driver = StandInDriver(tmp_path, failing("restore", sleeper.pid, times=3))
    driver.open_gpu(sleeper.pid)
    driver.states[sleeper.pid] = "checkpointed"
    (tmp_path / str(sleeper.pid) / "fd" / "9").unlink()
    bring_back(driver, [sleeper.pid], {})
    assert driver.states == {sleeper.pid: "running"}


def test_the_guard_gives_up_ended_processes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Otherwise it would run for ever."""

    def fail(action: str, pid: int) -> None:
        sleeper.kill()
        sleeper.wait()
        raise DriverError("no such process")

    driver = StandInDriver(tmp_path, fail)
    driver.open_gpu(sleeper.pid)
    driver.states[sleeper.pid] = "checkpointed"
    bring_back(driver, [sleeper.pid], {})
    assert driver.actions == []


_CALLER = """
import os, signal, sys
from pathlib import Path
from safepoint.transparent.cuda.host_copy import gpu_memory_in_host
with gpu_memory_in_host([int(sys.argv[1])], proc=Path(sys.argv[2])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_caller_leaves_no_process_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    """The guard brings it back as soon as it is not stopped any more."""
    states, proc = tmp_path / "states", tmp_path / "proc"
    states.mkdir()
    StandInDriver(proc).open_gpu(sleeper.pid)
    (states / str(sleeper.pid)).write_text("running")
    # The stand-in tool cannot close the device in `proc`, so the link goes when the process is checkpointed.
    tool = tmp_path / "bin" / "tool"
    tool.write_text(
        f'#!/bin/sh\n[ "$2" = checkpoint ] && /bin/rm -f {proc}/*/fd/9\nexec {install_tool(tool.parent)} "$@"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv(driver_module.VARIABLE, str(tool))
    monkeypatch.setenv(STATES, str(states))
    sleeper.send_signal(signal.SIGSTOP)
    done = subprocess.run([sys.executable, "-c", _CALLER, str(sleeper.pid), str(proc)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (states / str(sleeper.pid)).read_text() == "checkpointed"
    sleeper.send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 30 * PATIENCE
    while (states / str(sleeper.pid)).read_text() != "running":
        assert time.monotonic() < deadline_s, "the process waits"
        time.sleep(0.02)
