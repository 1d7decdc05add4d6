"""Lets only the frozen processes connect to CRIU while it dumps them.

CRIU runs code of its own in each process. This code connects to an abstract Unix socket of CRIU, receives commands
over the connection, and sends the memory of the process. Every user of the machine can see the name of the socket and
connect to it, and CRIU accepts every connection. So another user could get descriptors of root's files, and decide
what is in the image. With two idle connections, another user could make CRIU wait for ever.

So a filter of the kernel (seccomp) stops CRIU's calls `listen` and `accept`, and this module answers them
(seccomp_unotify(2)). This module accepts each connection. It closes connections from other processes, and passes
connections from the frozen processes to CRIU. While CRIU has a filter, it cannot dump processes that have a filter
too. For such processes, CRIU runs without a filter.
"""

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import platform
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import Any

from safepoint.foundation.processes import is_seeing_all, status_words
from safepoint.transparent.criu.connections import copy_of

_log = logging.getLogger("safepoint")
_MACHINES = {
    "x86_64": (0xC000003E, 317, 50, (43, 288)),
    "aarch64": (0xC00000B7, 277, 201, (202, 242)),
}
"""The machine's number for filters, and the numbers of its calls `seccomp`, `listen`, and `accept` and `accept4`."""
_SET_FILTER, _NEW_LISTENER = 1, 1 << 3
_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
"""SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND and SECCOMP_IOCTL_NOTIF_ADDFD."""
_NOTICE = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags; number of the call, machine, address, arguments."""
_ANSWER, _ADDED = struct.Struct("=QqiI"), struct.Struct("=QIIII")
"""struct seccomp_notif_resp and struct seccomp_notif_addfd."""
_CONTINUE, _ADD_AND_ANSWER = 1, 1 << 1
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Instructions of classic BPF: load a word, compare it, return."""
_NUMBER_AT, _MACHINE_AT = 0, 4
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_PEER = struct.Struct("=3i")


@contextlib.contextmanager
def only_for(pids: Iterable[int]) -> Generator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that starts CRIU by calling its argument. Only `pids` can connect to this CRIU.

    If this restriction is not possible, log a warning.

    Args:
        pids: the processes that CRIU dumps.
    """
    allowed = frozenset(pids)
    if platform.machine() not in _MACHINES:
        yield functools.partial(_unguarded, "Safepoint does not know the system calls of this kind of processor")
    elif any(map(_has_filter, allowed)):
        yield functools.partial(_unguarded, "a process has a seccomp filter")
    else:
        admission = _Admission(allowed)
        try:
            yield admission.start
        finally:
            admission.close()


def _unguarded(why: str, start: Callable[[], Any]) -> Any:
    if is_seeing_all():  # in a container, all processes trust each other
        _log.warning(
            "other users of this machine can connect to CRIU during the dump and change the image, because %s; "
            "freeze processes here only if you trust all users",
            why,
        )
    return start()


def _has_filter(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return status_words(Path(f"/proc/{pid}"), b"Seccomp:") != [b"0"]
    return False


class _Admission:
    """Answers the calls of one CRIU.

    Args:
        allowed: the processes that may connect.
    """

    def __init__(self, allowed: Collection[int]) -> None:
        self._allowed = allowed
        self._listeners: dict[int, socket.socket] = {}
        """Copies of CRIU's listening sockets, by the number of the socket (its inode)."""
        self._waiting: dict[int, deque[socket.socket]] = {}
        """Connections of allowed processes that CRIU has not accepted yet, by the number of the listening socket."""
        self._asked: list[tuple[int, int]] = []
        """The calls of `accept` that wait for a connection: the number of the socket, and the number of the call."""
        self._notices = -1
        self._end, self._ended = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    def start(self, start: Callable[[], Any]) -> Any:
        """Call `start` on a thread with the filter, and return its result. The process that `start` starts inherits
        the filter."""
        found: list[Any] = []
        failed: list[BaseException] = []
        refused: list[OSError] = []

        def run() -> None:
            try:
                self._notices = _set_filter()
            except OSError as error:  # such as in a container whose runtime has a filter of this kind
                refused.append(error)
                return
            try:
                found.append(start())
            except BaseException as error:  # noqa: BLE001  it is raised below
                failed.append(error)

        thread = threading.Thread(target=run, name="safepoint-criu")  # a filter cannot be removed from a thread
        thread.start()
        thread.join()
        if refused:
            return _unguarded(f"the kernel refuses a filter for CRIU: {refused[0].strerror}", start)
        if failed:
            raise failed[0]
        self._thread = threading.Thread(target=self._answer_all, name="safepoint-criu-admission", daemon=True)
        self._thread.start()
        return found[0]

    def close(self) -> None:
        """Stop answering calls. Call this after CRIU has ended."""
        os.close(self._ended)
        if self._thread is not None:
            self._thread.join()
        os.close(self._end)
        if self._notices >= 0:
            os.close(self._notices)
        for one in (*self._listeners.values(), *(one for each in self._waiting.values() for one in each)):
            one.close()

    def _answer_all(self) -> None:
        poll = select.poll()
        for descriptor in (self._end, self._notices):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, event in poll.poll():
                if descriptor == self._end:
                    return
                with contextlib.suppress(OSError):  # the process that made the call has ended
                    if descriptor == self._notices and event & select.POLLIN:
                        self._note(poll)
                    elif descriptor == self._notices:
                        poll.unregister(descriptor)  # no process has the filter any more
                    else:
                        self._admit(descriptor)
            self._hand_over()

    def _note(self, poll: select.poll) -> None:
        """Read which call was made."""
        notice = bytearray(_NOTICE.size)
        fcntl.ioctl(self._notices, _RECEIVE, notice)
        call, pid, _, number, _, _, descriptor, *_ = _NOTICE.unpack(notice)
        try:
            one = copy_of(pid, descriptor)
        except OSError:
            self._continue(call)
            return
        _, _, listen, _ = _MACHINES[platform.machine()]
        place = os.fstat(one.fileno()).st_ino
        if number == listen and one.family == socket.AF_UNIX and place not in self._listeners:
            self._listeners[place] = one
            self._waiting[place] = deque()
            one.setblocking(False)  # CRIU's own descriptor of this socket does not block either
            self._continue(call)
            poll.register(one.fileno(), select.POLLIN)
            return
        one.close()
        if number != listen and place in self._listeners:
            self._asked.append((place, call))
        else:
            self._continue(call)

    def _continue(self, call: int) -> None:
        fcntl.ioctl(self._notices, _SEND, bytearray(_ANSWER.pack(call, 0, 0, _CONTINUE)))

    def _admit(self, listener: int) -> None:
        """Accept all connections that wait at a socket."""
        place, one = next((place, one) for place, one in self._listeners.items() if one.fileno() == listener)
        while True:
            try:
                connected, _ = one.accept()
            except BlockingIOError:
                return
            pid, _, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if pid in self._allowed:
                self._waiting[place].append(connected)
            else:
                connected.close()
                _log.debug("process %d, which is not frozen, connected to CRIU; the connection was closed", pid)

    def _hand_over(self) -> None:
        """Answer the calls of `accept` for which a connection has arrived.

        If a call cannot be answered, because a signal has interrupted it or its process has ended, the connection
        waits for the next call, and the other calls are still answered.
        """
        for place, call in list(self._asked):
            if self._waiting[place]:
                self._asked.remove((place, call))
                one = self._waiting[place][0]
                added = bytearray(_ADDED.pack(call, _ADD_AND_ANSWER, one.fileno(), 0, 0))
                with contextlib.suppress(OSError):
                    fcntl.ioctl(self._notices, _ADD_FD, added)
                    self._waiting[place].popleft().close()


def _set_filter() -> int:
    """Install the filter for this thread and the processes that it starts. Returns a descriptor for the calls.

    Raises:
        OSError: the kernel refuses the filter.
    """
    machine, seccomp, listen, accept = _MACHINES[platform.machine()]
    asked = (listen, *accept)
    code = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 0, len(asked) + 1, machine), (_LOAD, 0, 0, _NUMBER_AT)]
    code += [(_IF_EQUAL, len(asked) - place, 0, number) for place, number in enumerate(asked)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ASK)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filters)))
    library = ctypes.CDLL(None, use_errno=True)
    notices = library.syscall(seccomp, _SET_FILTER, _NEW_LISTENER, program)
    if notices < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return notices
