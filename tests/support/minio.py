"""A real S3 server on loopback: MinIO, built from its Go module into the user's cache folder.

    python -m tests.support.minio build     # minutes the first time; prints the reason if it cannot be built here

It checks the checksums of what it receives, which Ceph RGW and moto do not.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server, free_ports

_MODULE = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safepoint" / "tests"
PROGRAM = _CACHE / _MODULE.rpartition("-")[2] / "minio"


def build() -> str | None:
    """Build the server unless that was done before. Returns why that is not possible, or None."""
    if PROGRAM.exists():
        return None
    if shutil.which("go") is None:
        return "there is no Go here"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        environment = {**os.environ, "GOBIN": folder, "CGO_ENABLED": "0"}
        done = subprocess.run(
            ["go", "install", _MODULE], env=environment, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            return f"go install failed: {done.stderr.strip()[-500:]}"
        PROGRAM.parent.mkdir(exist_ok=True)
        Path(folder, "minio").replace(PROGRAM)
    return None


class Minio(S3Server):
    """One server in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {
            "MINIO_ROOT_USER": self.keys[0],
            "MINIO_ROOT_PASSWORD": self.keys[1],
            "MINIO_UPDATE": "off",
            "MINIO_BROWSER": "off",
            "HOME": str(self._folder),
        }
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "server", "--address", f"127.0.0.1:{self.port}", str(self._folder / "data")],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60 * PATIENCE
        while True:
            with contextlib.suppress(OSError, RuntimeError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                self.make_bucket()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"MinIO does not answer: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def minio() -> Iterator[Minio]:
    """A running server; its process and files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="minio-") as folder:
        server = Minio(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


if __name__ == "__main__":
    reason = build()
    if reason:
        print(f"NOT RUN: minio ({reason})")
    sys.exit(3 if reason else 0)
