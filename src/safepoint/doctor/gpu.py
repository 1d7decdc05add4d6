"""NVIDIA's driver, the devices it has, and whether PyTorch sees them."""

from dataclasses import dataclass
from pathlib import Path

from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.programs import ask
from safepoint.doctor.software import NoTorch, Torch
from safepoint.foundation.units import format_bytes

_LIMIT_S = 5.0
_VERSION = Path("/proc/driver/nvidia/version")
_QUESTION = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that the driver reports.

    Args:
        has_driver: whether the kernel has loaded it.
        devices: each device's name and memory.
        driver: its version.
        trouble: why it does not answer; empty when it does.
    """

    has_driver: bool
    devices: tuple[str, ...] = ()
    driver: str = ""
    trouble: str = ""


def look_at_gpus(version: Path = _VERSION) -> Gpus:
    """Ask the kernel, then the driver."""
    has_driver = version.exists()
    try:
        answer = ask(_QUESTION, limit_s=_LIMIT_S)
    except FileNotFoundError:
        return Gpus(has_driver=has_driver, trouble="nvidia-smi is not installed")
    except OSError as error:
        return Gpus(has_driver=has_driver, trouble=f"nvidia-smi: {error.strerror}")
    if answer.code is None:
        return Gpus(has_driver=True, trouble=f"nvidia-smi does not answer in {_LIMIT_S:.0f} s")
    if answer.code != 0:
        lines = answer.output.strip().splitlines() or [answer.complaint]
        return Gpus(has_driver=has_driver, trouble=f"nvidia-smi: {lines[-1]}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.output.splitlines() if line.count(",") == 2]
    devices = tuple(
        f"{name}, {format_bytes(int(mebibytes) << 20)}" if mebibytes.isdecimal() else name
        for name, mebibytes, _ in rows
    )
    return Gpus(has_driver=True, devices=devices, driver=rows[0][2] if rows else "")


def judge_gpus(gpus: Gpus, torch: Torch | NoTorch) -> Finding:
    """Whether the GPUs of this machine can be used."""
    check, why = "gpu", "without a usable GPU, a training runs on the processor without a warning"
    if not gpus.has_driver and not gpus.devices:
        return Finding(check=check, status=Status.OK, found="no NVIDIA driver; trainings use the processor", why=why)
    if not gpus.devices:
        return Finding(
            check=check,
            status=Status.FAILURE if gpus.trouble and "not installed" not in gpus.trouble else Status.WARNING,
            found=gpus.trouble or "the driver is loaded, and has no device",
            why=why,
            fix="see the driver's errors in dmesg; in a container, request the devices (--gpus all, nvidia.com/gpu)",
        )
    counted = {name: gpus.devices.count(name) for name in gpus.devices}
    names = "; ".join(f"{count} x {name}" for name, count in counted.items())
    found = f"{names}, driver {gpus.driver}"
    if isinstance(torch, Torch) and torch.devices < len(gpus.devices):
        fix = "unset CUDA_VISIBLE_DEVICES"
        if torch.cuda is None:
            fix = "install a PyTorch that is built with CUDA"
        elif torch.devices == 0:
            fix = f"the driver may be too old for CUDA {torch.cuda}: update it, or install a PyTorch for an older one"
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{found}; PyTorch sees {torch.devices} of {len(gpus.devices)}",
            why=why,
            fix=fix,
        )
    return Finding(check=check, status=Status.OK, found=found, why=why)
