"""Another user connects to the socket over which CRIU talks to the frozen processes, and takes the place of one.

The stranger would receive descriptors of root's files, and send what becomes the memory of a process of root.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from safepoint.transparent.criu import admission
from safepoint.transparent.criu.messages import explain
from safepoint.transparent.criu.program import Criu
from tests.support.patience import PATIENCE

_CRIU = """#!{python}
import pathlib, socket, time
here = pathlib.Path({here!r})
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind({name!r})
listening.listen(1)
(here / "listens").touch()
while not (here / "go").exists():
    time.sleep(0.01)
for _ in range(2):
    connected, _ = listening.accept()
    connected.send(b"orders")
    with (here / "received").open("ab") as file:
        file.write(connected.recv(100) + b" ")
"""
"""Listens, accepts and sends orders as CRIU does; each process that connects says whose it is."""
_PEER = """
import os, socket, sys
user, name, count, waits = int(sys.argv[1]), sys.argv[2].replace("@", "\\0"), int(sys.argv[3]), sys.argv[4] == "waits"
if user:
    os.setgid(user)
    os.setuid(user)
sys.stdin.readline()
kept = []
for _ in range(count):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(waits)
    try:
        one.connect(name)
        one.send(str(user).encode())
    except OSError:
        continue
    kept.append(one)
print("connected", flush=True)
for one in kept:
    one.setblocking(True)
    try:
        print(one.recv(100), flush=True)
    except OSError:
        pass
"""
_STRANGER = 65534


class Peer:
    """A process that connects after `begin`."""

    def __init__(self, name: str, *, user: int = 0, count: int = 1, waits: bool = True) -> None:
        arguments = [str(user), name.replace("\0", "@"), str(count), "waits" if waits else "-"]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PEER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.mark.skipif(os.getuid() != 0, reason="a filter of calls, and another user, need root")
@pytest.mark.parametrize("num_connections", [1, 2, 20])
def test_only_frozen_processes_are_accepted(num_connections: int, tmp_path: Path) -> None:
    """The stranger is the first, and fills the queue. It receives nothing, and neither side waits because of it."""
    name = f"\0safepoint-test-{os.getpid()}-{num_connections}"
    program = tmp_path / "criu"
    program.write_text(_CRIU.format(python=sys.executable, here=str(tmp_path), name=name))
    program.chmod(0o700)
    stranger = Peer(name, user=_STRANGER, count=num_connections, waits=False)
    frozen = [Peer(name), Peer(name)]

    def connect() -> None:
        deadline_s = time.monotonic() + 30 * PATIENCE
        while not (tmp_path / "listens").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        stranger.begin()
        stranger.line()
        for one in frozen:
            one.begin()
        (tmp_path / "go").touch()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        criu = Criu(path=str(program), version="4.2")
        criu.run("dump", [], folder=tmp_path, log=tmp_path / "log", pids=[one.process.pid for one in frozen])
        thread.join()
        assert (tmp_path / "received").read_text().split() == ["0", "0"]
        for one in frozen:
            assert one.process.communicate(timeout=30 * PATIENCE)[0] == "connected\nb'orders'\n"
        assert "orders" not in stranger.process.communicate(timeout=30 * PATIENCE)[0]
    finally:
        for one in (stranger, *frozen):
            one.process.kill()
            one.process.wait()


@pytest.mark.parametrize("reason", ["kernel", "process", "processor"])
def test_without_the_protection_there_is_a_warning(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses the filter, a process has one of its own, or the processor is another one."""

    def refuse() -> int:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(admission, "is_seeing_all", lambda: True)
    monkeypatch.setattr(admission, "_set_filter", refuse)
    if reason == "process":
        monkeypatch.setattr(admission, "_has_filter", lambda pid: True)
    elif reason == "processor":
        monkeypatch.setattr(admission, "_MACHINES", {})
    Criu(path="true", version="4.2").run("dump", [], folder=tmp_path, log=tmp_path / "log", pids=[os.getpid()])
    assert "change the image, because" in caplog.text
    assert reason in caplog.text


def test_a_call_that_cannot_be_answered_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal has interrupted the first call of `accept`. Its connection is for the next call at this socket."""
    answered: dict[int, int] = {}

    def answer(_: int, request: int, content: bytearray) -> None:
        call, _, descriptor, *_ = struct.unpack("=QIIII", content)
        if call == 7:
            raise FileNotFoundError(2, "No such file or directory")
        answered[call] = descriptor

    monkeypatch.setattr(admission.fcntl, "ioctl", answer)
    one = admission._Admission([os.getpid()])
    pairs = [socket.socketpair() for _ in range(3)]
    numbers = [mine.fileno() for mine, _ in pairs]
    one._waiting = {1: deque([pairs[0][0], pairs[1][0]]), 2: deque([pairs[2][0]])}
    one._asked = [(1, 7), (1, 8), (2, 9), (1, 10), (1, 11)]
    one._hand_over()
    assert answered == {8: numbers[0], 9: numbers[2], 10: numbers[1]}
    assert one._asked == [(1, 11)]
    assert all(mine.fileno() == -1 for mine, _ in pairs)
    for _, other in pairs:
        other.close()
    one.close()


def test_data_for_a_restore_is_named() -> None:
    """CRIU ends the restore at data that it does not expect; nothing was restored, and the image is whole."""
    reason, hint = explain("(00.1) 7: Error (criu/files.c:1021): Unexpected fle 0x41414141414141, pid=7\n")
    assert "another program" in reason
    assert "try again" in hint
