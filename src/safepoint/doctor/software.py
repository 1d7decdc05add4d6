"""Python and PyTorch: their versions, and whether they have what a training needs."""

import json
import platform
import sys
from dataclasses import dataclass

from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.programs import ask

_LIMIT_S = 12.0
_SLOW_S = 8.0
_LOCAL_DISK = "install Python's packages on a local disk; every start of a rank waits for this"
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
        has_gloo: whether it has the gloo backend, over which ranks agree.
        import_s: how long importing it takes.
    """

    version: str
    cuda: str | None
    devices: int
    has_gloo: bool
    import_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTorch:
    """Why PyTorch could not be examined.

    Args:
        reason: in a few words.
        is_slow: whether the import took too long.
    """

    reason: str
    is_slow: bool = False


TOO_SLOW = NoTorch(reason=f"importing it takes longer than {_LIMIT_S:.0f} s", is_slow=True)


def look_at_torch() -> Torch | NoTorch:
    """Import PyTorch in another process."""
    answer = ask([sys.executable, "-c", _QUESTION], limit_s=_LIMIT_S)
    if answer.code is None:
        return TOO_SLOW
    if answer.code != 0:
        return NoTorch(reason=answer.complaint or f"importing it ends with {answer.code}")
    return Torch(**json.loads(answer.output.splitlines()[-1]))


def judge_python() -> Finding:
    """Whether this Python can be used at all."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    why = "Safepoint relies on Linux's signals, shared memory and durable renames"
    if not sys.platform.startswith("linux"):
        return Finding(
            check="python", status=Status.FAILURE, found=f"{found}, on {sys.platform}", why=why, fix="train on Linux"
        )
    return Finding(check="python", status=Status.OK, found=found, why=why)


def judge_torch(torch: Torch | NoTorch) -> Finding:
    """Whether ranks can import PyTorch and vote."""
    why = "ranks train with it and agree over its gloo process group"
    if isinstance(torch, NoTorch):
        return Finding(
            check="torch",
            status=Status.WARNING if torch.is_slow else Status.FAILURE,
            found=torch.reason,
            why=why,
            fix=_LOCAL_DISK if torch.is_slow else f"install it for {sys.executable}: pip install torch",
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
            fix="install a PyTorch that is built with distributed and gloo, such as those from download.pytorch.org",
        )
    if torch.import_s > _SLOW_S:
        return Finding(check="torch", status=Status.WARNING, found=found, why=why, fix=_LOCAL_DISK)
    return Finding(check="torch", status=Status.OK, found=found, why=why)
