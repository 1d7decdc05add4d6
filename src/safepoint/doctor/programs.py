"""Checks of PyTorch and the NVIDIA driver. Each check runs another program.

The programs have a time limit, because a broken driver or a dead file server can block them.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.doctor.finding import Finding, Status
from safepoint.foundation.units import format_bytes, plural
from safepoint.foundation.volumes.mounts import file_system_of
from safepoint.transparent.cuda.driver import INSTALL, TOOL, load_bindings
from safepoint.transparent.cuda.driver import VARIABLE as TOOL_VARIABLE

_TORCH_LIMIT_S, _LIMIT_S = 12.0, 5.0
_SLOW_IMPORT_S = 8.0
_NETWORKS = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|9p|fuse|afs|virtiofs")
"""The file systems of other machines, by the beginnings of their names."""
_TORCH_QUESTION = """
import json, time
begun = time.monotonic()
import torch, torch.distributed as distributed
is_available = distributed.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": torch.cuda.device_count(),
    "has_gloo": is_available and distributed.is_gloo_available(),
    "import_s": time.monotonic() - begun,
}))
"""
_DRIVER = Path("/proc/driver/nvidia/version")
_GPU_QUESTION = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a program.

    Args:
        code: the exit code; None if the program had not ended in time.
        output: the program's stdout.
        last_error: the last line of the program's stderr.
    """

    code: int | None
    output: str = ""
    last_error: str = ""


def ask(command: Sequence[str], *, limit_s: float) -> Answer:
    """Run `command`, and kill it after `limit_s` seconds.

    Raises:
        OSError: the command cannot be started.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, last_error = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a device ignores even SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return Answer(code=None)
    lines = last_error.strip().splitlines()
    return Answer(code=process.returncode, output=output, last_error=lines[-1] if lines else "")


# ---- PyTorch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The PyTorch that a training would import.

    Args:
        version: its version.
        cuda: the CUDA version that it was built for; None if it was built without CUDA.
        devices: the number of CUDA devices that it finds.
        has_gloo: whether it has the gloo backend, which the votes of ranks use.
        import_s: the duration of its import.
    """

    version: str
    cuda: str | None
    devices: int
    has_gloo: bool
    import_s: float


def look_at_torch() -> Torch | str | None:
    """Import PyTorch in another process.

    Returns:
        The PyTorch, or why it cannot be imported; None if the import takes too long.
    """
    answer = ask([sys.executable, "-P", "-c", _TORCH_QUESTION], limit_s=_TORCH_LIMIT_S)
    if answer.code is None:
        return None
    if answer.code != 0:
        return answer.last_error or f"its import ends with exit code {answer.code}"
    return Torch(**json.loads(answer.output.splitlines()[-1]))


def slow_import_advice() -> str:
    """What to do about a slow import of PyTorch: the first of the possible causes that is found on this machine."""
    effect = "each start of a run waits for this import"
    spec = importlib.util.find_spec("torch")
    folder = Path((spec.origin if spec is not None else None) or sys.executable).parent
    file_system = file_system_of(folder)
    if _NETWORKS.match(file_system):
        return (
            f"{folder} is on a network file system ({file_system}), and an import reads thousands of files; install "
            f"the packages in a virtual environment on a local disk; until then, {effect}"
        )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        return (
            f"other programs use this machine (load {load:.1f} on {plural(cores, 'core')}); run `safepoint doctor` "
            f"again when they have ended, or give the run fewer ranks than free cores"
        )
    return (
        "run `safepoint doctor` again: the first import after a start of the machine reads all files from the disk, "
        f"and a second one should be faster; if it is not, the disk of {folder} is slow, and {effect}: install the "
        "packages on a faster disk"
    )


def judge_torch(torch: Torch | str | None) -> Finding:
    """Whether ranks can import PyTorch and vote. `torch` is the result of `look_at_torch`."""
    check, why = "torch", "ranks train with it, and vote with its gloo backend"
    if torch is None:
        found = f"its import takes longer than {_TORCH_LIMIT_S:.0f} s"
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=slow_import_advice())
    if isinstance(torch, str):
        fix = f"install it for {sys.executable}: pip install 'safepoint[torch]'"
        return Finding(check=check, status=Status.FAILURE, found=torch, why=why, fix=fix)
    found = (
        f"{torch.version}, {f'CUDA {torch.cuda}' if torch.cuda else 'no CUDA'}, imported in {torch.import_s:.1f} s"
    )
    if not torch.has_gloo:
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=f"{found}, without gloo",
            why=why,
            fix="install a PyTorch with distributed and gloo, such as a build from download.pytorch.org",
        )
    if torch.import_s > _SLOW_IMPORT_S:
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=slow_import_advice())
    return Finding(check=check, status=Status.OK, found=found, why=why)


# ---- GPUs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that the driver reports.

    Args:
        has_driver: whether the kernel has loaded the driver.
        devices: the name and memory of each device.
        driver: the version of the driver.
        trouble: why the driver does not answer; empty if it does.
    """

    has_driver: bool
    devices: tuple[str, ...] = ()
    driver: str = ""
    trouble: str = ""


def look_at_gpus(driver: Path = _DRIVER) -> Gpus:
    """Read the state of the kernel module, then query the driver."""
    has_driver = driver.exists()
    try:
        answer = ask(_GPU_QUESTION, limit_s=_LIMIT_S)
    except FileNotFoundError:
        return Gpus(has_driver=has_driver, trouble="nvidia-smi is not installed")
    except OSError as error:
        return Gpus(has_driver=has_driver, trouble=f"nvidia-smi: {error.strerror}")
    if answer.code is None:
        return Gpus(has_driver=True, trouble=f"nvidia-smi does not answer within {_LIMIT_S:.0f} s")
    if answer.code != 0:
        lines = answer.output.strip().splitlines() or [answer.last_error]
        return Gpus(has_driver=has_driver, trouble=f"nvidia-smi: {lines[-1]}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.output.splitlines() if line.count(",") == 2]
    devices = tuple(
        f"{name}, {format_bytes(int(mebibytes) << 20)}" if mebibytes.isdecimal() else name
        for name, mebibytes, _ in rows
    )
    return Gpus(has_driver=True, devices=devices, driver=rows[0][2] if rows else "")


def judge_gpus(gpus: Gpus, torch: Torch | str | None) -> Finding:
    """Whether the GPUs of this machine can be used."""
    check, why = "gpu", "without a usable GPU, a training runs on the CPU without a warning"
    if not gpus.has_driver and not gpus.devices:
        return Finding(check=check, status=Status.OK, found="no NVIDIA driver; trainings use the CPU", why=why)
    if not gpus.devices:
        return Finding(
            check=check,
            status=Status.FAILURE if gpus.trouble and "not installed" not in gpus.trouble else Status.WARNING,
            found=gpus.trouble or "the driver is loaded, but has no device",
            why=why,
            fix="look for driver errors in dmesg; in a container, request the devices (--gpus all, nvidia.com/gpu)",
        )
    counted = {name: gpus.devices.count(name) for name in gpus.devices}
    names = "; ".join(f"{count} x {name}" for name, count in counted.items())
    found = f"{names}, driver {gpus.driver}"
    if isinstance(torch, Torch) and torch.devices < len(gpus.devices):
        fix = "unset CUDA_VISIBLE_DEVICES"
        if torch.cuda is None:
            fix = "install a PyTorch that is built with CUDA"
        elif torch.devices == 0:
            fix = (
                f"the driver may be too old for CUDA {torch.cuda}: update it, or install a PyTorch for an older CUDA"
            )
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{found}; PyTorch finds {torch.devices} of {len(gpus.devices)}",
            why=why,
            fix=fix,
        )
    return Finding(check=check, status=Status.OK, found=found, why=why)


def judge_checkpoint_api(gpus: Gpus) -> Finding:
    """Whether processes with GPUs can be frozen. Trainings do not need this. Without a GPU, the status is ok."""
    check, why = "cuda checkpoints", "they freeze processes that use a GPU; trainings do not need them"
    if not gpus.devices:
        return Finding(check=check, status=Status.OK, found="no GPU to freeze", why=why)
    bindings, words = load_bindings()
    if bindings is not None:
        return Finding(check=check, status=Status.OK, found=f"{words}, by cuda-bindings", why=why)
    tool = os.environ.get(TOOL_VARIABLE) or shutil.which(TOOL)
    if tool is not None:
        return Finding(check=check, status=Status.OK, found=f"by {tool}", why=why)
    return Finding(check=check, status=Status.WARNING, found=words, why=why, fix=INSTALL)
