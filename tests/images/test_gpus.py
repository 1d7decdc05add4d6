"""Images of processes that use a GPU, with a stand-in for NVIDIA's driver: CRIU dumps what the driver has given."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.transparent.cuda.driver import VARIABLE
from tests.images.test_one_tree import Trainings, reference, safepoint, wait_for
from tests.support.criu import environment
from tests.support.cuda_stand_in import STATES, install_tool

_PROGRAM = Path(__file__).parents[1] / "programs" / "frozen_training.py"
_DEVICE = Path("/dev/nvidia-stand-in")
_UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
_ON_A_GPU = f"""
import os, runpy, signal, sys
def take():
    global device
    device = os.open({str(_DEVICE)!r}, os.O_RDWR)
def give(*_):
    os.close(device)
    signal.sigwait([signal.SIGUSR2])  # as a CUDA call would wait
    take()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signal.signal(signal.SIGUSR1, give)
take()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[Trainings]:
    found = Trainings(tmp_path)
    yield found
    found.end()


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the states of processes; the stand-in and its GPU are installed."""
    folder, programs = tmp_path / "states", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (folder / "signals").touch()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in *=uuid) echo {_UUID};; esac\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv(VARIABLE, str(install_tool(programs)))
    monkeypatch.setenv(STATES, str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    _DEVICE.touch()
    yield folder
    _DEVICE.unlink()


def start(trainings: Trainings, states: Path, steps: int, pause_s: float) -> int:
    words = [str(_PROGRAM), str(trainings.folder / "out"), str(steps), str(pause_s)]
    pid = trainings.run("out", [sys.executable, "-c", _ON_A_GPU, *words])
    (states / str(pid)).write_text("running")
    trainings.has_reached("out", 5)
    return pid


def test_a_training_on_a_gpu_goes_on_bit_for_bit(trainings: Trainings, tmp_path: Path, states: Path) -> None:
    """Once while it runs on, and once ended and restored."""
    expected = reference(trainings, "400")
    pid = start(trainings, states, 400, 0.1)
    frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", "--leave-running")
    assert (states / str(pid)).read_text() == "running"
    trainings.has_reached("out", len(trainings.output("out")) + 3)
    frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    assert not frozen["is_running"]
    trainings.reap()
    shown = safepoint("images", "show", tmp_path / "images" / "image-2")
    assert shown["manifest"]["machine"]["gpus"] == [_UUID]
    assert (states / str(pid)).read_text() == "checkpointed"
    safepoint("thaw", tmp_path / "images")
    assert (states / str(pid)).read_text() == "running"
    assert trainings.has_ended("out") == expected


def test_memory_that_cannot_be_restored_ends_the_processes(
    trainings: Trainings, tmp_path: Path, states: Path
) -> None:
    """They could only wait for ever; the image is there."""
    pid = start(trainings, states, 2000, 0.05)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    (states / str(pid)).write_text("failed")
    error = safepoint("thaw", tmp_path / "images", code=1)
    assert "the restored processes were ended" in error["message"]
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["dump", "store"])
def test_a_killed_command_lets_the_processes_run_on(
    trainings: Trainings, tmp_path: Path, states: Path, moment: str, number: signal.Signals
) -> None:
    """On their GPUs, too: the guard of these waits until that of CRIU has let them run."""
    images = tmp_path / "images"
    pid = start(trainings, states, 2000, 0.02)
    command = [sys.executable, "-m", "safepoint.cli.main", "freeze", "--pid", str(pid), "--to", str(images)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    name = "criu-dump*.log" if moment == "dump" else "work-*/image/part-0/*.regions"
    wait_for(lambda: any((images / ".safepoint" / "images").glob(name)), moment)
    process.send_signal(number)
    process.wait()
    wait_for(lambda: (states / str(pid)).read_text() == "running", "the state of the process")
    trainings.has_reached("out", len(trainings.output("out")) + 5)
    assert list(images.glob("image-*")) == []
    safepoint("freeze", "--pid", pid, "--to", images)
    assert [path.name for path in images.glob("image-*")] == ["image-1"]
