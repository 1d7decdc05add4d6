"""DeepSpeed for tests, in its own folder: where it is installed, every Trainer imports it."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import environment

_FOLDER = Path(sys.prefix) / "deepspeed"
_BUILD = "from deepspeed.ops.op_builder import ShareMemCommBuilder as Builder; Builder().load()"


def deepspeed_variables() -> dict[str, str]:
    """The environment variables with which a process finds DeepSpeed and its compiled operations."""
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions")}


@functools.cache
def _why_not() -> str | None:
    if not _FOLDER.is_dir():
        return f"DeepSpeed is not in {_FOLDER}: run `make venv`"
    if shutil.which("g++") is None:
        return "DeepSpeed builds its communication for the CPU with g++, which is not here"
    # A minute on a small machine, once; no training that is tested should have to wait for it.
    environ = environment(DS_ACCELERATOR="cpu", **deepspeed_variables())
    done = subprocess.run([sys.executable, "-c", _BUILD], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return None


def skip_without_deepspeed(strategy: str) -> None:
    """Build what DeepSpeed needs, or skip a test of ZeRO with the reason."""
    if strategy.startswith("zero") and (reason := _why_not()) is not None:
        pytest.skip(reason)


if __name__ == "__main__":
    if (problem := _why_not()) is not None:
        sys.exit(problem)


__all__ = ["deepspeed_variables", "skip_without_deepspeed"]
