"""Finds things that CRIU cannot dump, if possible before any process is stopped.

CRIU itself would fail only after it has stopped all processes.
"""

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation.processes import kernel_lines, name_of
from safepoint.transparent.criu.trees import open_files

_OBSTACLES = (
    (
        "anon_inode:[io_uring]",
        "uses io_uring, which CRIU cannot dump",
        "start the program with USE_LIBUV=0 (torchrun ignores it), or with a seccomp profile that refuses io_uring",
    ),
)
"""The beginning of a descriptor's target, what the process does with the descriptor, and what the reader can do."""


def refuse_obstacles(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Look at the open files of processes.

    Args:
        pids: the processes.
        proc: where the proc file system is mounted.

    Raises:
        FreezeError: a process has something open that CRIU cannot dump.
    """
    for pid in pids:
        for target in open_files(pid, proc):
            for beginning, reason, hint in _OBSTACLES:
                if target.startswith(beginning):
                    raise FreezeError(
                        f"process {pid} ({name_of(pid, proc)}) {reason}; nothing was frozen",
                        hint=hint,
                    )


_ESTABLISHED, _LISTENING = b"01", b"0A"


def refuse_connecting(pids: Collection[int]) -> None:
    """Check that no process waits until another of these processes accepts its TCP connection.

    CRIU leaves out connections that were not accepted yet. If the other end is a different program, this is not an
    error: the connection is closed when the processes are restored. If it were an error, every user of the machine
    could prevent an image by opening a connection.

    Args:
        pids: the processes, which are stopped.

    Raises:
        FreezeError: a process waits, and would lose its connection.
    """
    own = {target[8:-1].encode() for pid in pids for target in open_files(pid) if target.startswith("socket:[")}
    listening: set[bytes] = set()
    waiting: set[tuple[bytes, bytes]] = set()
    connected: set[tuple[bytes, bytes]] = set()
    for table in {Path(f"/proc/{pid}/net/{name}") for pid in list(pids)[:1] for name in ("tcp", "tcp6")}:
        with contextlib.suppress(OSError):
            for fields in map(bytes.split, kernel_lines(table)[1:]):
                if len(fields) < 10:
                    continue
                near, far, state, socket = _v4(fields[1]), _v4(fields[2]), fields[3], fields[9]
                if state == _LISTENING and socket in own:
                    listening.add(_port(near))
                elif state == _ESTABLISHED and socket == b"0":
                    waiting.add((near, far))
                elif state == _ESTABLISHED and socket in own:
                    connected.add((far, near))
    if any(_port(near) in listening for near, _ in waiting & connected):
        raise FreezeError(
            "a process connects to another process, which has not accepted the connection yet; the processes run on, "
            "and no image was made",
            hint="try again",
        )


_MAPPED = b"0000000000000000FFFF0000"
"""The prefix of an IPv4 address of an IPv6 socket in the kernel's lists."""


def _v4(address: bytes) -> bytes:
    return address.removeprefix(_MAPPED)


def _port(address: bytes) -> bytes:
    return address.rpartition(b":")[2]
