"""Copies the template, and turns each copy into a rank: gives it the properties of a new process, in a fixed order.

The order matters. The session and the standard streams come first, so that a later signal reaches only this rank, and
a later error goes to its output. Then the rank waits until its launcher knows its pid. All other descriptors are
closed before the environment is replaced, and random numbers are drawn last.
"""

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from safepoint.foundation.processes import set_name
from safepoint.training.rank_processes.messages import Birth

_SETTERS = (
    *("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"),
    *("scipy_openblas_set_num_threads", "openblas_set_num_threads"),
)
_OPENBLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_PID = struct.Struct("=q")


def make_children_of_reaper(count: int, become: Callable[[int], NoReturn]) -> tuple[int, ...] | None:
    """Copy this process, so that the copies are children of the nearest process that adopts orphans.

    This process forks an intermediate process, which makes the copies and ends. The copies then are orphans, and
    become children of the nearest ancestor that adopts orphans, such as the launcher.

    Args:
        count: the number of copies.
        become: called in each copy with its number; must not return.

    Returns:
        The pids of the copies; None if not all of them could be made. In this case some copies may run.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        middle = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return None
    if middle == 0:
        _make_all(count, become, writer)
    os.close(writer)
    found = b""
    while len(found) < count * _PID.size and (part := os.read(reader, count * _PID.size - len(found))):
        found += part
    os.close(reader)
    os.waitpid(middle, 0)
    if len(found) < count * _PID.size:
        return None
    return tuple(pid for (pid,) in _PID.iter_unpack(found))


def _make_all(count: int, become: Callable[[int], NoReturn], writer: int) -> NoReturn:
    try:
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(writer)  # if it stayed open, and the next fork failed, the template would wait for this copy
                become(number)
            os.write(writer, _PID.pack(pid))
    finally:
        os._exit(0)


def be_born(
    birth: Birth,
    number: int,
    descriptors: Sequence[int],
    changes: Mapping[str, str | None],
    main: Callable[[list[str]], int],
) -> NoReturn:
    """Become rank `number` of `birth`, and run its program; does not return.

    Args:
        birth: the request of the launcher.
        number: the position of this rank in the request.
        descriptors: the descriptors that came with the request.
        changes: the environment variables that the template's imports have changed: name → new value, or None for a
            deleted variable. In a new process, the same imports would make the same changes.
        main: runs a rank, given the arguments after `python -m safepoint.training`.
    """
    code = 1
    try:
        os.setsid()
        streams = (descriptors[0], descriptors[1 + 2 * number], descriptors[2 + 2 * number])
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        if os.read(descriptors[-1], 1) == b"":
            os._exit(0)  # the launcher has given up this start, or is gone
        restore(birth, number, changes)
        arguments = list(birth.arguments[number])
        sys.orig_argv = [sys.executable, "-P", "-u", "-m", "safepoint.training", *arguments]
        sys.argv = [sys.argv[0], *arguments]
        set_name("python")
        code = main(arguments)
    except BaseException:  # noqa: BLE001  as in a process of its own, which would print the traceback and end with 1
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def restore(birth: Birth, number: int, changes: Mapping[str, str | None]) -> None:
    """Give this copy the properties of a new process, except those that `be_born` itself sets.

    `be_born` sets the session, the standard streams, the arguments and the name of the process.

    All descriptors except the standard streams are closed.

    Args:
        birth: the request of the launcher.
        number: the position of this process in the request.
        changes: see `be_born`.
    """
    _close_others()
    _restore(birth)
    variables = {name: text for name, text in birth.environments[number].items() if name not in changes}
    _replace_environment(variables | {name: text for name, text in changes.items() if text is not None})
    importlib.invalidate_caches()  # files may have appeared since the template looked into their folders
    _restore_threads()
    _draw_random_numbers()


def _close_others() -> None:
    """Close every descriptor except the standard streams."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(number)


def _restore(birth: Birth) -> None:
    """Set the properties that a new process would get now. They may have changed since the template was started."""
    signal.set_wakeup_fd(-1)
    # A launcher that runs in the background of a shell ignores SIGQUIT, and so does the template. But torch elastic
    # handles the signal before it starts ranks, so a new process would have the default.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.chdir(birth.folder)
    os.umask(birth.umask)
    if birth.cores and set(birth.cores) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, birth.cores)
    for name, limits in birth.limits.items():
        soft, hard = (resource.RLIM_INFINITY if limit is None else limit for limit in limits)
        if resource.getrlimit(int(name)) != (soft, hard):
            resource.setrlimit(int(name), (soft, hard))


def _replace_environment(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    for name, text in variables.items():
        if os.environ.get(name) != text:
            os.environ[name] = text


def _restore_threads() -> None:
    """Give OpenBLAS as many threads as it would choose in a new process.

    The template starts with one thread, because OpenBLAS would start further threads as soon as it is loaded.
    """
    chosen = [os.environ[name] for name in _OPENBLAS_VARIABLES if os.environ.get(name, "").isdecimal()]
    number = int(chosen[0]) if chosen else len(os.sched_getaffinity(0))
    if number == 1:
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        words = [line.split(maxsplit=5) for line in maps]
    for path in sorted({line[5].strip() for line in words if len(line) == 6 and "openblas" in line[5]}):
        with contextlib.suppress(OSError):
            library: Any = ctypes.CDLL(path)
            setter = next((getattr(library, name) for name in _SETTERS if hasattr(library, name)), None)
            if setter is not None:
                setter(number)


def _draw_random_numbers() -> None:
    """Seed NumPy's and torch's generators, because all copies have the same state. Python seeds its own at a fork."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # generators of GPUs do not exist yet
