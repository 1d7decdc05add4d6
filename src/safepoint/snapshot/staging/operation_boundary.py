"""Notifies when a thread is between two operations of torch."""

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

_call_back: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_numbers = itertools.count(1)
_waiting: dict[int, Callable[[], None]] = {}


@_call_back
def _arrived(number: int | None) -> int:
    call = _waiting.pop(number or 0, None)
    if call is not None:
        call()
    return 0


def when_between_operations(thread: int, call: Callable[[], None]) -> bool:
    """Have `call` made when `thread` next comes from one instruction of Python to another.

    Args:
        thread: its number; only the main thread is supported.
        call: short, raises nothing; made on that thread.

    Returns:
        Whether it will be; otherwise it is unknown.
    """
    if thread != threading.main_thread().ident:
        return False
    number = next(_numbers)
    _waiting[number] = call
    if ctypes.pythonapi.Py_AddPendingCall(_arrived, ctypes.c_void_p(number)) != 0:  # too many are waiting
        del _waiting[number]
        return False
    return True
