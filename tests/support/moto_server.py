"""An S3 server in its own process: moto, which checks neither authentication nor integrity."""

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safepoint.storage.location import Location, parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store
from tests.support.patience import PATIENCE

_PROGRAM = Path(__file__).with_name("moto_process.py")


class MotoServer:
    """One server on loopback; its buckets are deleted when it stops."""

    bucket = "checkpoints"

    def __init__(self, log: Path) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=stream,
                stderr=stream,
            )
        deadline = time.monotonic() + 60 * PATIENCE
        while not self._answers():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        self._make_bucket()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which a job reaches the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def location(self, prefix: str) -> Location:
        return parse_location(f"s3://{self.bucket}/{prefix}")

    def store(self, prefix: str) -> Store:
        return open_store(self.location(prefix), StorageOptions.from_environment(self.variables))

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def _make_bucket(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("PUT", f"/{self.bucket}")
        assert connection.getresponse().status in {200, 409}
        connection.close()


@contextmanager
def moto_server(folder: Path) -> Iterator[MotoServer]:
    server = MotoServer(folder / "moto.log")
    try:
        yield server
    finally:
        server.stop()


__all__ = ["MotoServer", "moto_server"]
