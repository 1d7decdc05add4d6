"""Python and PyTorch: the versions that are here, and whether they can do what a training needs."""

import json
import platform
import sys
from dataclasses import dataclass

from holdfast.doctor.finding import Finding, Status
from holdfast.doctor.limits import ask

_LIMIT_S = 12.0
_SLOW_S = 8.0
_QUESTION = """
import json, time
begun = time.monotonic()
import torch, torch.distributed as distributed
is_there = distributed.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": torch.cuda.device_count(),
    "has_gloo": is_there and distributed.is_gloo_available(),
    "import_s": time.monotonic() - begun,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The PyTorch that a training would import.

    Args:
        version: its own.
        cuda: the CUDA version that it was built with; None for none.
        devices: how many CUDA devices it sees.
        has_gloo: whether ranks can talk to each other over it.
        import_s: how long importing it takes.
    """

    version: str
    cuda: str | None
    devices: int
    has_gloo: bool
    import_s: float


def look_at_torch() -> Torch | str:
    """Import it in a process of its own; why not, when it cannot be."""
    answer = ask([sys.executable, "-c", _QUESTION], limit_s=_LIMIT_S)
    if answer.code is None:
        return f"importing it takes longer than {_LIMIT_S:.0f} s"
    if answer.code != 0:
        return answer.complaint or f"importing it ends with {answer.code}"
    return Torch(**json.loads(answer.output.splitlines()[-1]))


def judge_python() -> Finding:
    """Whether this Python can be used at all."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    why = "Holdfast needs Linux: signals, shared memory and durable renames as they are there"
    if not sys.platform.startswith("linux"):
        return Finding(
            check="python", status=Status.FAILURE, found=f"{found}, on {sys.platform}", why=why, fix="train on Linux"
        )
    return Finding(check="python", status=Status.OK, found=found, why=why)


def judge_torch(torch: Torch | str) -> Finding:
    """Whether ranks can import PyTorch and vote."""
    why = "ranks train with it and agree over its gloo process group"
    if isinstance(torch, str):
        is_slow = "longer than" in torch
        return Finding(
            check="torch",
            status=Status.WARNING if is_slow else Status.FAILURE,
            found=torch,
            why=why,
            fix="install Python's packages on a local disk; every start of a rank waits for this"
            if is_slow
            else f"install it for {sys.executable}: pip install torch",
        )
    found = (
        f"{torch.version}, {f'CUDA {torch.cuda}' if torch.cuda else 'no CUDA'}, imported in {torch.import_s:.1f} s"
    )
    if not torch.has_gloo:
        return Finding(
            check="torch",
            status=Status.FAILURE,
            found=f"{found}, without gloo",
            why=why,
            fix="install a PyTorch that is built with distributed and gloo, as those of its own index are",
        )
    if torch.import_s > _SLOW_S:
        fix = "install Python's packages on a local disk; every start of a rank waits for this"
        return Finding(check="torch", status=Status.WARNING, found=found, why=why, fix=fix)
    return Finding(check="torch", status=Status.OK, found=found, why=why)


__all__ = ["Torch", "judge_python", "judge_torch", "look_at_torch"]
