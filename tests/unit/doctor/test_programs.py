"""What is asked of other programs, with and without an answer."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.doctor import programs as programs_module
from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.programs import (
    Answer,
    Gpus,
    Torch,
    ask,
    judge_checkpoint_api,
    judge_gpus,
    judge_torch,
    look_at_gpus,
    look_at_torch,
)
from safepoint.foundation.bounded import Work

TORCH = Torch(version="2.13.0", cuda="13.0", devices=2, has_gloo=True, import_s=2.0)
_CARD = "NVIDIA H100, 85.5 GB"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_program_is_waited_for_so_long() -> None:
    """One that hangs is ended; one that fails tells its last line."""
    begun = time.monotonic()
    hanging = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    assert ask(hanging, limit_s=0.5) == Answer(code=None)
    assert time.monotonic() - begun < 60
    failing = [sys.executable, "-c", "import sys; print('out'); sys.stderr.write('one\\ntwo\\n'); sys.exit(3)"]
    assert ask(failing, limit_s=30) == Answer(code=3, output="out\n", last_error="two")
    with pytest.raises(FileNotFoundError):
        ask(["no-such-program"], limit_s=1)


def test_work_that_hangs_is_left_alone() -> None:
    """And what fails beside, fails where the result is asked for."""
    reader, writer = os.pipe()
    hanging = Work(lambda: os.read(reader, 1))
    assert hanging.result(0.05) is None
    os.write(writer, b"x")
    assert hanging.result(30) == b"x"
    with pytest.raises(ZeroDivisionError):
        Work(lambda: 1 // 0).result(30)
    os.close(reader)
    os.close(writer)


def test_torch_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that cannot be imported is reported with its error."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = look_at_torch()
    assert found == "ImportError: libcudart.so.13: cannot open"
    assert judge_torch(found).status is Status.FAILURE


@pytest.mark.parametrize(
    ("torch", "status", "word"),
    [
        (TORCH, Status.OK, "2.13.0, CUDA 13.0"),
        (Torch(version="2.13.0", cuda=None, devices=0, has_gloo=False, import_s=1.0), Status.FAILURE, "without gloo"),
        (Torch(version="2.13.0", cuda=None, devices=0, has_gloo=True, import_s=60.0), Status.WARNING, "60.0 s"),
        (None, Status.WARNING, "longer than"),
    ],
)
def test_torch_is_judged(torch: Torch | None, status: Status, word: str) -> None:
    finding = judge_torch(torch)
    assert (finding.status, word in finding.found) == (status, True)


def test_no_gpu_is_no_fault(programs: Path, tmp_path: Path) -> None:
    found = look_at_gpus(tmp_path / "no-driver")
    assert found.has_driver is False
    assert judge_gpus(found, TORCH).status is Status.OK


def test_gpus_are_counted(programs: Path, tmp_path: Path) -> None:
    write(programs, "nvidia-smi", "echo 'NVIDIA H100, 81559, 580.1'; echo 'NVIDIA H100, 81559, 580.1'")
    found = look_at_gpus(tmp_path / "version")
    assert found == Gpus(has_driver=True, devices=(_CARD, _CARD), driver="580.1")
    assert judge_gpus(found, TORCH).found == f"2 x {_CARD}, driver 580.1"


def test_a_broken_driver_is_a_failure(programs: Path, tmp_path: Path) -> None:
    """The driver's own words, and what to look at."""
    (tmp_path / "version").touch()
    write(programs, "nvidia-smi", "echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    finding = judge_gpus(look_at_gpus(tmp_path / "version"), TORCH)
    assert finding.status is Status.FAILURE
    assert "Failed to initialize NVML" in finding.found
    (programs / "nvidia-smi").unlink()
    assert judge_gpus(look_at_gpus(tmp_path / "version"), TORCH).status is Status.WARNING


@pytest.mark.parametrize(
    ("torch", "word"),
    [
        (Torch(version="2", cuda=None, devices=0, has_gloo=True, import_s=1), "built with CUDA"),
        (Torch(version="2", cuda="13.0", devices=0, has_gloo=True, import_s=1), "too old for CUDA 13.0"),
        (Torch(version="2", cuda="13.0", devices=1, has_gloo=True, import_s=1), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_torch_does_not_see_are_said(torch: Torch, word: str) -> None:
    finding = judge_gpus(Gpus(has_driver=True, devices=(_CARD, _CARD), driver="580.1"), torch)
    assert (finding.status, word in finding.fix) == (Status.WARNING, True)


def test_the_checkpoint_api_is_needed_for_gpus_only(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the package cuda-bindings or the program; without both, the reason and what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # pyright: ignore[reportArgumentType]
    monkeypatch.delenv("SAFEPOINT_CUDA_CHECKPOINT", raising=False)
    assert judge_checkpoint_api(Gpus(has_driver=False)).status is Status.OK
    gpus = Gpus(has_driver=True, devices=(_CARD,), driver="580.1")
    assert judge_checkpoint_api(gpus).status is Status.WARNING
    assert "cuda-bindings is not installed" in judge_checkpoint_api(gpus).found
    write(programs, "cuda-checkpoint", "exit 0")
    assert judge_checkpoint_api(gpus).status is Status.OK


def test_whatever_is_not_ok_says_what_to_do() -> None:
    for status, fix in ((Status.WARNING, ""), (Status.OK, "something")):
        with pytest.raises(ValueError, match="fix="):
            Finding(check="x", status=status, found="y", why="z", fix=fix)


@pytest.mark.parametrize(
    ("file_system", "load", "advice"),
    [
        ("nfs4", 0.1, "is on a network file system (nfs4)"),
        ("fuse.sshfs", 9.0, "install the packages in a virtual environment on a local disk"),
        (
            "ext4",
            9.0,
            "other programs use this machine (load 9.0 on 2 cores); run `safepoint doctor` again",
        ),
        ("ext4", 0.1, "run `safepoint doctor` again: the first import after a start of the machine"),
    ],
)
def test_the_advice_for_a_slow_import_fits_its_cause(
    file_system: str, load: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages on a local disk are not to be installed on a local disk."""
    monkeypatch.setattr(programs_module, "file_system_of", lambda folder: file_system)
    monkeypatch.setattr(programs_module.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(programs_module.os, "sched_getaffinity", lambda pid: {0, 1})
    for torch in (None, replace(TORCH, import_s=60.0)):
        finding = judge_torch(torch)
        assert finding.status is Status.WARNING
        assert advice in finding.fix
        assert ("local disk" in finding.fix) == file_system.startswith(("nfs", "fuse"))
