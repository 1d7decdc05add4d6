"""A real browser for the dashboard: Debian's Chromium, driven by Playwright, and axe-core for accessibility.

    python -m tests.support.browser install      # apt-get, as root; npm

axe-core (MPL 2.0) is not part of this project: it is downloaded once, and compared with a digest.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.patience import PATIENCE

_AXE = "axe-core@4.14.1"
_AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
AXE_FILE = Path.home() / ".cache" / "safepoint" / "tests" / "axe-core-4.14.1.min.js"
_PACKAGES = ("chromium", "fonts-dejavu-core")
_LINK = re.compile(r"(https?://\S+)/enter\?token=(\S+)")


def unavailable() -> str | None:
    """Why the browser cannot run here, or None if it can."""
    if shutil.which("chromium") is None:
        return "chromium not found; `make test-browser` installs it on Debian, as root"
    if importlib.util.find_spec("playwright") is None:
        return "playwright not found; `make test-browser` installs it"
    if not AXE_FILE.is_file():
        return "axe-core not found; `make test-browser` downloads it with npm"
    return None


def install() -> str | None:
    """Install what is missing. Returns why that is not possible, or None."""
    if shutil.which("chromium") is None:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            return "installing chromium needs apt-get and root"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *_PACKAGES]):
            done = subprocess.run(
                ["apt-get", "-qq", *command], check=False, stdout=subprocess.DEVNULL, env=environment
            )
            if done.returncode != 0:
                return f"apt-get {command[0]} failed with exit code {done.returncode}"
    if not AXE_FILE.is_file():
        if shutil.which("npm") is None:
            return "downloading axe-core needs npm"
        AXE_FILE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=AXE_FILE.parent) as folder:
            command = ["npm", "pack", "--silent", _AXE]
            done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                return f"npm pack failed: {done.stderr.strip()[-500:]}"
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                stream = archive.extractfile("package/axe.min.js")
                data = b"" if stream is None else stream.read()
        if hashlib.sha256(data).hexdigest() != _AXE_SHA256:
            return "axe-core has another digest than expected"
        AXE_FILE.write_bytes(data)
    return unavailable()


class Served:
    """A `safepoint dashboard` in a process of its own.

    Args:
        root: the current folder of the process.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self._links: list[str] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        """Start it; a second start uses the same port."""
        code = "import sys; from safepoint.cli.main import main; sys.argv[0] = 'safepoint'; main()"
        command = [sys.executable, "-c", code, "dashboard", "--port", str(self.port), *options]
        self._process = subprocess.Popen(command, cwd=self.root, stdout=subprocess.PIPE, text=True)
        self.next_link()
        self.port = urlsplit(self._links[-1]).port or 0

    def next_link(self) -> str:
        """Wait for the next link that the command prints."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _LINK.search(line)
            if found is not None:
                self._links.append(found[0])
                return found[0]
        raise AssertionError("the dashboard has ended")

    @property
    def link(self) -> str:
        """The newest link; it works once."""
        return self._links[-1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def stop(self) -> int:
        """End it with SIGTERM, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(20 * PATIENCE)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@contextlib.contextmanager
def served(root: Path, *options: str) -> Iterator[Served]:
    """A dashboard that is ended after the block."""
    server = Served(root)
    server.start(*options)
    try:
        yield server
    finally:
        server.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        reason = install()
        if reason is not None:
            sys.exit(f"the browser's tests are skipped: {reason}")
