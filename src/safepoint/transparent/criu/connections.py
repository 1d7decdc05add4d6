"""Ends the kernel's repair mode, in which a killed CRIU leaves the TCP connections of processes.

While CRIU reads the queues of a connection, the connection is in repair mode. In this mode, the connection sends
nothing. CRIU ends the mode itself, unless CRIU is killed.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_PIDFD_GETFD = 438
_TCP_REPAIR, _OFF_WITHOUT_PROBE = 19, -1


def end_repair(pids: Iterable[int]) -> int:
    """End the repair mode of all TCP connections of processes, and return how many connections were in repair mode.

    Args:
        pids: the processes.
    """
    num_ended = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for descriptor in _sockets_of(pid):
                with contextlib.suppress(OSError), copy_of(pid, descriptor) as copy:
                    is_tcp = copy.family in {socket.AF_INET, socket.AF_INET6} and copy.type == socket.SOCK_STREAM
                    if is_tcp and copy.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1:
                        copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF_WITHOUT_PROBE)
                        num_ended += 1
    return num_ended


def _sockets_of(pid: int) -> list[int]:
    found: list[int] = []
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(folder / name).startswith("socket:"):
                found.append(int(name))
    return found


def copy_of(pid: int, descriptor: int) -> socket.socket:
    """A descriptor of this process for a socket of another process.

    Args:
        pid: the other process.
        descriptor: the number of the socket in the other process.

    Raises:
        OSError: the socket was closed, or the process has ended.
    """
    process = os.pidfd_open(pid)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        copy = library.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(process)
    return socket.socket(fileno=copy)
