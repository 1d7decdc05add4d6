"""A CRIU that works here: Debian unstable's package with its own loader and libraries, in the user's cache folder.

    python -m tests.support.criu install     # downloads and unpacks the packages; nothing is installed on the system

Debian 12 has CRIU 3.17 and Debian 13 has 4.1, which both fail on newer kernels. `unavailable()` says why none can
run.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safepoint.errors import UnsupportedError
from safepoint.transparent.criu.program import VARIABLE, find_criu

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safepoint" / "tests" / "criu"
PROGRAM = _CACHE / "criu"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


def environment() -> dict[str, str]:
    """The environment variables with which Safepoint finds this CRIU; that of the system if there is none."""
    return {**os.environ, VARIABLE: str(PROGRAM)} if PROGRAM.exists() else {**os.environ}


def unavailable() -> str | None:
    """Why no CRIU can run here, or None if one can."""
    try:
        criu = find_criu(str(PROGRAM) if PROGRAM.exists() else None)
    except UnsupportedError as error:
        return f"{error.message}; `make test-images` installs CRIU on Debian, as root"
    result = subprocess.run([criu.path, "check"], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"criu check: {(result.stderr or result.stdout).strip()}"


def install() -> str | None:
    """Download and unpack CRIU. Returns why it cannot run here, or None."""
    if unavailable() is None:
        return None
    if os.geteuid() != 0:
        return "CRIU needs root"
    if shutil.which("apt-get") is None or not _KEYRING.exists():
        return "there is no apt-get here, or no keys of Debian's archive"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        reason = _unpack(Path(temporary))
    return reason or unavailable()


def _unpack(folder: Path) -> str | None:
    """Let apt-get resolve the packages as for an empty system, so that the loader and all libraries come too."""
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources").write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian sid main\n")
    settings = {
        "Dir::Etc::SourceList": folder / "sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    for command in (["update"], ["--yes", "--download-only", "install", "criu"]):
        result = subprocess.run([*apt, *command], stdout=subprocess.DEVNULL, check=False)
        if result.returncode != 0:
            return f"apt-get {command[0]} failed with exit code {result.returncode}"
    for package in (folder / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    root = _CACHE / "root"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)
    (folder / "root").rename(root)
    loader = next(path for path in (root / "usr").rglob("ld-linux*.so.*") if path.is_file())
    command = [loader, "--library-path", root / _LIBRARIES, root / "usr/sbin/criu"]
    PROGRAM.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    PROGRAM.chmod(0o755)
    return None


def main() -> None:
    """`install`: exit code 1 with the reason on stderr if CRIU cannot run here."""
    reason = install()
    if reason:
        sys.exit(f"skipped: {reason}")


if __name__ == "__main__":
    main()
