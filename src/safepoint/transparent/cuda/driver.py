"""The checkpoint API of NVIDIA's driver, and the two ways to it: `cuda.bindings`, and the tool `cuda-checkpoint`.

Promises: each call concerns one process. It returns when the driver has finished, or raises `DriverError`. The
calling process makes no context, and uses no GPU memory. The order of the calls is in `transparent.cuda.host_copy`.
"""

import contextlib
import ctypes
import importlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from safepoint.errors import UnsupportedError

TOOL = "cuda-checkpoint"
VARIABLE = "SAFEPOINT_CUDA_CHECKPOINT"
"""The variable with the path of the tool. If it is set, the tool is used even if `cuda.bindings` is installed."""
INSTALL = "pip install 'cuda-bindings>=13.0.2', or name NVIDIA's cuda-checkpoint with SAFEPOINT_CUDA_CHECKPOINT"
_LEAST_CUDA = 12080
"""CUDA 12.8, which driver 570 has, is the first version with these calls."""
_CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")


class CudaState(StrEnum):
    """The state of a process, as the driver reports it."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class DriverError(Exception):
    """The driver has refused a call, or the call has failed. The text is the driver's reason."""


class CudaDriver(Protocol):
    """The checkpoint API. All methods raise DriverError."""

    name: str

    def state(self, pid: int) -> CudaState:
        """The state of a process. If the process does not use CUDA, an error is raised."""
        ...

    def lock(self, pid: int, limit_ms: int) -> None:
        """Block further CUDA calls of the process. If its running calls last longer than `limit_ms`, raise
        DriverError."""
        ...

    def checkpoint(self, pid: int) -> None:
        """Copy the GPU memory of a locked process into its host memory, and release its GPUs."""
        ...

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """Take GPUs, and copy the memory back. The process is locked afterwards.

        Args:
            pid: the process, which is checkpointed.
            gpus: the UUID of each GPU that the machine had at the checkpoint → the UUID of the GPU that replaces it;
                empty to use the same GPUs. `DriverTool` supports only an empty mapping.
        """
        ...

    def unlock(self, pid: int) -> None:
        """Let the CUDA calls of a locked process continue."""
        ...


class DriverLibrary:
    """The driver through `cuda.bindings`, which PyTorch's packages with CUDA 13 install."""

    name = "cuda.bindings"

    def __init__(self, bindings: Any) -> None:
        """`bindings` is the module `cuda.bindings.driver`."""
        self._bindings = bindings

    def state(self, pid: int) -> CudaState:
        """See `CudaDriver`."""
        number = int(self._call("GetState", pid))
        if not 0 <= number < len(CudaState):
            raise DriverError(f"the driver reports the unknown state {number}")
        return tuple(CudaState)[number]

    def lock(self, pid: int, limit_ms: int) -> None:
        """See `CudaDriver`."""
        arguments = self._bindings.CUcheckpointLockArgs()
        arguments.timeoutMs = limit_ms
        self._call("Lock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """See `CudaDriver`."""
        self._call("Checkpoint", pid, None)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """See `CudaDriver`."""
        if not gpus:
            self._call("Restore", pid, None)
            return
        # The bindings copy each UUID from an address, so its bytes must stay in memory until they are copied.
        memory: list[Any] = []
        pairs: list[Any] = []
        for old, new in gpus.items():
            pair = self._bindings.CUcheckpointGpuPair()
            for field, uuid in (("oldUuid", old), ("newUuid", new)):
                memory.append(ctypes.create_string_buffer(_uuid_bytes(uuid), 16))
                setattr(pair, field, self._bindings.CUuuid(ctypes.addressof(memory[-1])))
            pairs.append(pair)
        arguments = self._bindings.CUcheckpointRestoreArgs()
        arguments.gpuPairs = pairs
        arguments.gpuPairsCount = len(pairs)
        self._call("Restore", pid, arguments)

    def unlock(self, pid: int) -> None:
        """See `CudaDriver`."""
        self._call("Unlock", pid, None)

    def _call(self, action: str, *arguments: Any) -> Any:
        name = f"cuCheckpointProcess{action}"
        try:
            code, *values = getattr(self._bindings, name)(*arguments)
        except RuntimeError as error:  # the driver lacks the function
            raise DriverError(str(error)) from error
        if int(code) != 0:
            raise DriverError(f"{name}: {getattr(code, 'name', code)}")
        return values[0] if values else None


class DriverTool:
    """The driver by NVIDIA's program `cuda-checkpoint`.

    Args:
        path: the program.
    """

    name = TOOL

    def __init__(self, path: str) -> None:
        self._path = path

    def state(self, pid: int) -> CudaState:
        """See `CudaDriver`."""
        answer = self._run("--get-state", "--pid", str(pid))
        with contextlib.suppress(ValueError):
            return CudaState(answer.lower())
        raise DriverError(f"{TOOL} reports the unknown state {answer!r}")

    def lock(self, pid: int, limit_ms: int) -> None:
        """See `CudaDriver`."""
        self._run("--action", "lock", "--pid", str(pid), "--timeout", str(limit_ms))

    def checkpoint(self, pid: int) -> None:
        """See `CudaDriver`."""
        self._run("--action", "checkpoint", "--pid", str(pid))

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """See `CudaDriver`."""
        if gpus:
            raise DriverError(f"{TOOL} is used for the same GPUs only; other GPUs need the package cuda-bindings")
        self._run("--action", "restore", "--pid", str(pid))

    def unlock(self, pid: int) -> None:
        """See `CudaDriver`."""
        self._run("--action", "unlock", "--pid", str(pid))

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self._path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise DriverError(f"{self._path}: {error.strerror}") from error
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise DriverError(f"{TOOL}: {lines[-1] if lines else f'exit code {done.returncode}'}")
        return done.stdout.strip()


def find_driver() -> CudaDriver:
    """Choose how to call the checkpoint API of NVIDIA's driver: with the program that the environment variable
    `VARIABLE` names, otherwise with `cuda.bindings`, otherwise with the program `cuda-checkpoint`.

    Raises:
        UnsupportedError: this machine has none of the three; nothing was done.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        bindings, _ = load_bindings()
        if bindings is not None:
            return DriverLibrary(bindings)
    path = named or shutil.which(TOOL)
    if path is None:
        raise UnsupportedError(
            "a process uses a GPU, and Safepoint cannot use the checkpoint API of NVIDIA's driver: "
            f"{load_bindings()[1]}; nothing was done",
            hint=INSTALL,
        )
    return DriverTool(path)


def load_bindings() -> tuple[Any, str]:
    """The module `cuda.bindings.driver`, and which CUDA the driver has; or None, and why the module cannot be
    used."""
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None, "the package cuda-bindings is not installed"
    if not all(hasattr(bindings, f"cuCheckpointProcess{call}") for call in _CALLS):
        return None, "the package cuda-bindings is too old"
    try:
        code, version = bindings.cuDriverGetVersion()
    except RuntimeError:
        return None, "there is no driver"
    words = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if int(code) != 0 or version < _LEAST_CUDA:
        return None, f"the driver has {words}, and CUDA 12.8 (driver 570) is needed"
    return bindings, words


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
