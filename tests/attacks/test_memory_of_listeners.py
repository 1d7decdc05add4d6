"""Strangers send as much as they can to the ports of a job: its launcher takes a bounded memory."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

_MOST_MB = 60
_NUM_CONNECTIONS = 64
_METRICS = """
import time
from safepoint.progress.metrics_server import MetricsServer
from tests.unit.progress.test_record import FULL
server = MetricsServer(lambda: (FULL, False), host="127.0.0.1", port=0)
print(server.port, flush=True)
time.sleep(600)
"""
_STORE = """
import time
from safepoint.training.rendezvous import admission
from safepoint.training.rendezvous.store_server import StoreServer
from tests.support.ports import free_port
server, port = StoreServer(), free_port()
server.start()
if IS_LOCAL:
    import safepoint.training.rendezvous.store_server as module
    module.is_same_user = lambda writer: False  # as for a process of another user
else:
    server.serve_nodes(admission.Gate(b"s" * 32, num_nodes=4, is_open=True), port)
print(server.port if IS_LOCAL else port, flush=True)
time.sleep(600)
"""
_LINE = b"a: " + b"b" * 65_000 + b"\r\n"
REQUESTS = {
    "long headers": b"GET /metrics HTTP/1.0\r\n" + _LINE * 99 + b"\r\n",
    "long headers, not complete": b"GET /metrics HTTP/1.0\r\n" + _LINE * 99,
    "a long line": b"GET /" + b"a" * 8_000_000,
    "a header that continues": b"GET /metrics HTTP/1.0\r\na: b\r\n" + (b" " + b"c" * 65_000 + b"\r\n") * 98 + b"\r\n",
    "a body": b"POST /metrics HTTP/1.0\r\nContent-Length: 8000000\r\n\r\n" + b"b" * 8_000_000,
    "many requests": b"GET /metrics HTTP/1.1\r\nConnection: keep-alive\r\n\r\n" * 100_000,
}


@contextlib.contextmanager
def running(code: str) -> Generator[tuple[int, int]]:
    """The process and the port of a program that prints its port."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def memory_mb(pid: int, which: str) -> int:
    found = re.search(rf"{which}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def flood(port: int, data: bytes) -> None:
    def send() -> None:
        for _ in range(2):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=4) as one:
                one.sendall(data)
                threading.Event().wait(1)  # a connection stays while others send

    senders = [threading.Thread(target=send) for _ in range(_NUM_CONNECTIONS)]
    for one in senders:
        one.start()
    for one in senders:
        one.join()


def check(code: str, data: bytes) -> None:
    with running(code) as (pid, port):
        flood(port, b"\0")
        before_mb = memory_mb(pid, "VmRSS")
        flood(port, data)
        taken_mb = memory_mb(pid, "VmHWM") - before_mb
        print(f"peak: {taken_mb} MB more than {before_mb} MB")
        assert taken_mb < _MOST_MB


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_metrics_port(kind: str) -> None:
    """A request with 99 lines of 65,000 bytes took 20 MB."""
    check(_METRICS, REQUESTS[kind])


@pytest.mark.parametrize("is_local", [True, False], ids=["processes of this machine", "nodes"])
def test_the_rendezvous_store(is_local: bool) -> None:
    """A client that is not admitted fills at most the buffers of its connection."""
    check(_STORE.replace("IS_LOCAL", str(is_local)), b"b" * 8_000_000)
