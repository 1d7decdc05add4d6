"""Another user of the machine connects to the port at which gloo waits for a rank, and takes the rank's place."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from types import ModuleType

import pytest

from safepoint.training.integrations import strangers
from safepoint.training.integrations.strangers import hook, without_strangers

_STRANGER = 65534
_CONNECT = """
import os, socket, sys
import encodings.idna
os.setgroups([]); os.setgid({user}); os.setuid({user})
connected = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
connected.sendall(bytes(8))  # the number of the pair, as gloo expects it
if sys.argv[3] == "half":
    connected.shutdown(socket.SHUT_WR)
print(flush=True)
sys.stdin.read()
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def stranger(port: int, how: str, host: str = "127.0.0.1") -> Generator[None]:
    code = _CONNECT.format(user=_STRANGER)
    process = subprocess.Popen(
        [sys.executable, "-c", code, host, str(port), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"\n"
        yield
    finally:
        process.communicate(timeout=30)


@pytest.fixture
def kept() -> Generator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def listen(kept: contextlib.ExitStack, host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return kept.enter_context(socket.create_server((host, 0), family=family))


def accept(kept: contextlib.ExitStack, listener: socket.socket) -> socket.socket:
    return kept.enter_context(listener.accept()[0])


def is_open(one: socket.socket) -> bool:
    """Whether what is written to the other end may still arrive."""
    try:
        one.send(b"x")
    except BrokenPipeError:
        return False
    return True


@needs_root
@pytest.mark.parametrize("how", ["whole", "half"])
def test_a_stranger_is_shut_out(how: str, kept: contextlib.ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """Also one who has closed one direction, for which the kernel names no user. The ranks of this user stay."""
    with caplog.at_level(logging.WARNING, logger="safepoint"), without_strangers():
        listener = listen(kept)
        port = listener.getsockname()[1]
        kept.enter_context(stranger(port, how))
        theirs = accept(kept, listener)
        client = kept.enter_context(socket.create_connection(("127.0.0.1", port)))
        own = accept(kept, listener)
    assert not is_open(theirs)
    assert is_open(own)
    assert is_open(client)
    assert "connected to a port at which this rank waited for another rank" in caplog.text


@needs_root
def test_other_connections_stay(kept: contextlib.ExitStack) -> None:
    """Those of servers that the program had opened before, and those that it opens to servers of others."""
    listener = listen(kept)
    kept.enter_context(stranger(listener.getsockname()[1], "whole"))
    with without_strangers():
        listen(kept)
        theirs = accept(kept, listener)
    assert is_open(theirs)


def test_the_mode_of_a_socket_stays(kept: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default timeout makes each socket that Python opens non-blocking, and those of torch may be blocking."""
    with without_strangers():
        listener = listen(kept)
        kept.enter_context(socket.create_connection(listener.getsockname()))
        own = accept(kept, listener)
        socket.setdefaulttimeout(60)
        kept.callback(socket.setdefaulttimeout, None)
        assert os.get_blocking(own.fileno())
    assert os.get_blocking(own.fileno())
    assert os.get_blocking(listener.fileno())


def test_every_group_of_torch_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that creates them exists in this release, and its result is passed on."""
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    assert callable(c10d._new_process_group_helper)
    seen: list[str] = []

    @contextlib.contextmanager
    def checked() -> Generator[None]:
        yield
        seen.append("checked")

    def create(number: int) -> int:
        seen.append("created")
        return number

    module = ModuleType("c10d")
    module.__dict__["_new_process_group_helper"] = create
    monkeypatch.setattr(strangers, "without_strangers", checked)
    hook(module)
    wrapped: Callable[[int], int] = module.__dict__["_new_process_group_helper"]
    assert wrapped(7) == 7
    assert seen == ["created", "checked"]
