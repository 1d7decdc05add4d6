"""Answers torch's queries for GPUs while packages are imported in a process from which ranks are copied.

torch opens the library NVML for a query, and never closes it. From then on, the process has the GPUs open. If the
process were copied, the handles in its copies would not work. So for each query, a short-lived copy of the process
opens NVML and returns the result. In the ranks themselves, queries work as usual.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from typing import Any

_QUESTIONS = ("_raw_device_count_nvml", "_raw_device_uuid_nvml")
"""The functions of `torch.cuda` that open NVML: how many GPUs this machine has, and which."""


def install_before_ranks() -> None:
    """From now on, this process does not open NVML when a package queries torch for GPUs."""
    import torch

    cuda: Any = torch.cuda
    for name in _QUESTIONS:
        if hasattr(cuda, name):  # if not, a query opens the GPUs here, and ranks are then started as new processes
            setattr(cuda, name, _asked_by_a_copy(getattr(cuda, name)))


def _asked_by_a_copy(ask: Callable[[], Any]) -> Callable[[], Any]:
    """A function that returns the result of `ask`. It does not call `ask` in this process, only in its copies."""
    pid = os.getpid()
    answer_of_copy = functools.cache(functools.partial(_answer_of_copy, ask))

    @functools.wraps(ask)
    def answer() -> Any:
        return answer_of_copy() if os.getpid() == pid else ask()

    return answer


def _answer_of_copy(ask: Callable[[], Any]) -> Any:
    """Call `ask` in a copy of this process.

    Raises:
        OSError: there was no answer. torch then queries the CUDA driver, as it does without NVML.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            with contextlib.suppress(OSError, AttributeError):
                os.write(writer, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    if not text:
        raise OSError("NVML did not answer")
    return json.loads(text)
