"""Gives a copy the command line and the environment that /proc shows of a new process."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_START_CODE = 26
"""The number of the first field of /proc/self/stat that is read here, see proc_pid_stat(5)."""
_texts: list[ctypes.Array[ctypes.c_char]] = []


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")
        ),
        *(
            (name, ctypes.c_uint64)
            for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")
        ),
        *(("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)),
    )


def set_title(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Let /proc show this command line and this environment for this process.

    Raises:
        OSError: the kernel does not allow it.
    """
    fields = [int(word) for word in Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[_START_CODE - 3 :]]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    texts = [b"".join(os.fsencode(word) + b"\0" for word in words)]
    texts.append(b"".join(os.fsencode(f"{name}={text}") + b"\0" for name, text in variables.items()))
    buffers = [ctypes.create_string_buffer(text, len(text) + 1) for text in texts]
    places = [ctypes.addressof(buffer) for buffer in buffers]
    layout = _Map(
        start_code=fields[0],
        end_code=fields[1],
        start_stack=fields[2],
        start_data=fields[19],
        end_data=fields[20],
        start_brk=fields[21],
        brk=libc.sbrk(0),
        arg_start=places[0],
        arg_end=places[0] + len(texts[0]),
        env_start=places[1],
        env_end=places[1] + len(texts[1]),
        exe_fd=0xFFFFFFFF,
    )
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _texts[:] = buffers  # the kernel reads from them later
