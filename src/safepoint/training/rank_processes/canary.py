"""Tests once whether a copy of this process can compute, before ranks are copied from it.

A copy that cannot compute usually hangs, because it waits for a pool of threads that only the original has.
"""

import contextlib
import os
import signal
import sys
from typing import Any

from safepoint.foundation.processes import wait_for_end

_LIMIT_S = 20.0
"""Seconds that the copy may take on a busy machine; it computes for some milliseconds."""


def can_compute() -> str:
    """Copy this process, and let the copy compute on several threads.

    Returns:
        The end of a sentence that says what went wrong; empty if the copy could compute.

    Raises:
        OSError: there is no memory for a copy, or there are too many processes.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _compute()
            code = 0
        finally:
            os._exit(code)
    descriptor = os.pidfd_open(pid)
    try:
        if not wait_for_end(descriptor, _LIMIT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"does not work in a copy of the process: the copy hung for {_LIMIT_S:g} s"
    finally:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return "" if code == 0 else f"does not work in a copy of the process: the copy ended with {code}"


def _compute() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("CUDA")
        weight = torch.ones(256, 256, requires_grad=True)
        (torch.ones(4096, 256) @ weight).relu().sum().backward()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.linalg.inv(numpy.eye(128) + 1)
