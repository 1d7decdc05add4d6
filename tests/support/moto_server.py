"""An S3 server in its own process: moto, which checks neither authentication nor integrity."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server, free_ports

_PROGRAM = Path(__file__).with_name("moto_process.py")


class MotoServer(S3Server):
    """One server on loopback; its buckets are deleted when it stops."""

    keys = ("key", "secret")

    def __init__(self, log: Path, host: str = "127.0.0.1") -> None:
        self._log = log
        (self.port,) = free_ports(1)
        self.host = host
        self.endpoint = f"http://{host}:{self.port}"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    str(_PROGRAM),
                    "-H",
                    "127.0.0.1" if self.host == "127.0.0.1" else "0.0.0.0",
                    "-p",
                    str(self.port),
                ],
                stdout=stream,
                stderr=stream,
            )
        deadline = time.monotonic() + 60 * PATIENCE
        while not self._answers():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        self.make_bucket()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def moto_server(folder: Path, host: str = "127.0.0.1") -> Iterator[MotoServer]:
    """A server, which `host` reaches too, if it is another address of this machine."""
    server = MotoServer(folder / "moto.log", host)
    try:
        yield server
    finally:
        server.stop()


__all__ = ["MotoServer", "moto_server"]
