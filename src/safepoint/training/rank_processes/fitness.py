"""Whether a process may be copied by fork: rules about what it has done while it imported packages.

A fork copies only the calling thread. In the copy, locks that other threads hold stay locked, and pools of threads
have no threads. A CUDA context does not work in a copy. So the template only imports packages, and the error for a
broken rule names the package.
"""

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from safepoint.foundation.processes import children_of

DENIED = frozenset({"deepspeed", "bitsandbytes", "vllm", "ray", "tensorflow", "jax", "jaxlib", "apex"})
"""Packages that are known to start threads, to open devices or to read a rank's number when they are imported."""
_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads that may run, because their library handles a fork. `jemalloc_bg_thd` belongs to pyarrow's allocator."""
FIT = frozenset(
    {
        *("safepoint", "torch", "numpy", "scipy", "pandas", "pyarrow", "triton", "transformers", "accelerate"),
        *("datasets", "huggingface_hub", "fsspec", "filelock", "multiprocess", "tqdm", "trl", "peft", "matplotlib"),
        *("PIL", "numba", "llvmlite", "certifi"),
    }
)
"""Packages that are known to be fit: a process that has imported them may be copied.

Their exit handlers are harmless in a rank, because the handlers release only objects that the rank itself has made.
In other packages, an import may make a temporary folder, and an exit handler of one rank would delete the folder for
all ranks.
"""
_OF_ONE_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_TASKS = Path("/proc/self/task")


class UnfitError(Exception):
    """This process must not be copied.

    Args:
        name: the package, variable or folder that is the cause.
        reason: why, as the end of a sentence that begins with the name.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


class Fitness:
    """The rules, checked against the state of the process when this object was made.

    Args:
        channel: the descriptor of the connection to the launcher, which may be open.
    """

    def __init__(self, channel: int) -> None:
        self._allowed = {*_descriptors(), channel}

    def check(self, package: str, *, received: Sequence[int] = ()) -> None:
        """Check the process.

        Args:
            package: the package that was imported last. An error names it as the cause.
            received: descriptors that the launcher has sent. They are allowed to be open.

        Raises:
            UnfitError: the process must not be copied.
        """
        names = [name for name in _thread_names() if name not in _THREADS]
        if names:
            raise UnfitError(package, f"has started a thread ({names[0]})")
        allowed = self._allowed.union(received)
        opened = {number: target for number, target in _descriptors().items() if number not in allowed}
        for target in opened.values():
            if target.startswith("/dev/nvidia"):
                raise UnfitError(package, "has opened a GPU")
            if target.startswith(("socket:", "pipe:")):
                raise UnfitError(package, f"has opened a connection ({target})")
        torch: Any = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            raise UnfitError(package, "has initialized CUDA")
        if _start_method() is not None:
            raise UnfitError(package, "has set the start method of multiprocessing")
        if children_of(os.getpid()):
            raise UnfitError(package, "has started a process")
        denied = sorted(DENIED & sys.modules.keys())
        if denied:
            raise UnfitError(denied[0], "cannot be imported before the ranks start")


@contextlib.contextmanager
def audited() -> Generator[Callable[[], None]]:
    """Watch what packages do while they are imported in the block.

    Yields:
        A function that raises `UnfitError` if a package has read the number of a rank, or registered an exit handler.
    """
    faults: list[UnfitError] = []

    environ: Any = os.environ
    original: Any = environ.__class__

    class Audited(original):
        def __getitem__(self, key: Any) -> Any:
            if key in _OF_ONE_RANK:
                faults.append(UnfitError(_importing(), f"reads {key} while it is imported"))
            value: Any = original.__getitem__(self, key)
            return value

    register = atexit.register

    def register_audited(function: Any, *args: Any, **kwargs: Any) -> Any:
        # The handler itself may be a function of Python's library, such as `shutil.rmtree`.
        caller: Any = sys._getframe(1).f_globals.get("__name__")  # pyright: ignore[reportPrivateUsage]
        for module in (caller, getattr(function, "__module__", None)):
            package = str(module or _importing()).partition(".")[0]
            if package not in FIT and package not in sys.stdlib_module_names:
                faults.append(UnfitError(package, "registers an exit handler while it is imported"))
                break
        return register(function, *args, **kwargs)

    def check() -> None:
        if faults:
            raise faults[0]

    atexit.register = register_audited
    environ.__class__ = Audited
    try:
        yield check
    finally:
        environ.__class__ = original
        atexit.register = register


def _start_method() -> Any:
    """The start method of multiprocessing that was set, or None; the type stubs do not include None."""
    return multiprocessing.get_start_method(allow_none=True)


def _importing() -> str:
    """The package whose code runs now: the package of the innermost frame outside of Python and Safepoint."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package and package != "safepoint" and package not in sys.stdlib_module_names:
            return package
        frame = frame.f_back
    return "a package"


def _thread_names() -> list[str]:
    """The names of all threads except the main thread, also of threads that Python does not know."""
    main = str(os.getpid())
    names: list[str] = []
    for task in os.listdir(_TASKS):
        if task != main:
            with contextlib.suppress(OSError):
                names.append((_TASKS / task / "comm").read_text(errors="replace").strip())
    return names


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
