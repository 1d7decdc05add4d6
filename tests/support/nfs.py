"""A real NFS server and two clients on this machine: Debian's kernel as a process (user-mode Linux), with nfsd in it.

    python -m tests.support.nfs install     # unpacks Debian's packages into the user's cache folder

The guest sees the files of this machine read and write, and mounts `/mnt/1` and `/mnt/2`, each from a network
namespace with a host name of its own: for the server, two machines. `unavailable()` says why it cannot run here.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.patience import PATIENCE

_PACKAGES = (
    *("user-mode-linux", "nfs-common", "nfs-kernel-server", "kmod", "libkmod2", "keyutils"),
    *("libevent-core-2.1-7", "libwrap0", "libtirpc3", "libtirpc-common", "libnfsidmap1", "libsqlite3-0"),
)
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safepoint" / "tests" / "nfs"
_ROOT = _CACHE / "root"
_KERNEL = _ROOT / "usr/bin/linux.uml"
_MODULES = _CACHE / "modules"
_BEGINNING = "import sys, time\nfrom pathlib import Path\nmnt = Path(sys.argv[1])\n"
_NEEDED = ("ip", "mkfs.ext4", "nsenter", "unshare")


def unavailable() -> str | None:
    """Why it cannot run here, or None if it can."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "the guest needs root's rights on this machine's files"
    return None if _MODULES.exists() else "`make test-nfs` installs it on Debian"


def install() -> str | None:
    """Download and unpack the packages unless that was done before. Returns why that is not possible, or None."""
    if unavailable() is None:
        return None
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        command = ["apt-get", "-qq", "download", *_PACKAGES]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            return f"apt-get download failed: {done.stderr.strip()[-500:]}"
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, _ROOT], check=True)
    _MODULES.joinpath("lib/modules").mkdir(parents=True)
    (release,) = (_ROOT / "usr/lib/uml/modules").iterdir()
    (_MODULES / "lib/modules" / release.name).symlink_to(release)
    return unavailable()


def run_in_guest(script: str, programs: Mapping[str, str], folder: Path) -> str:
    """Boot the guest, run a shell script in it, and return what it printed.

    Args:
        script: may call `on CLIENT NAME`, which runs a program on client 1 or 2, `stop_server` and
            `start_server`.
        programs: Python programs by name. `mnt` is the client's mount.
        folder: for the guest's files.
    """
    disk, log = folder / "disk", folder / "log"
    with disk.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    paths = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "."))
    (folder / "script").write_text(script)
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(_BEGINNING + program)
    variables = {
        "ROOT": _ROOT,
        "MODULES": _MODULES,
        "PYTHON": sys.executable,
        "PYTHONPATH": paths,
        "LOG": log,
        "FOLDER": folder,
    }
    (folder / "init").write_text(
        "#!/bin/bash\n"
        + "".join(f"export {name}={shlex.quote(str(text))}\n" for name, text in variables.items())
        + f"source {shlex.quote(str(Path(__file__).with_name('nfs_guest.sh')))}\n"
    )
    (folder / "init").chmod(0o755)
    command = [_KERNEL, "mem=1G", f"ubda={disk}", f"uml_dir={folder}", "root=/dev/root", "rootfstype=hostfs"]
    command += ["rootflags=/", "rw", f"init={folder / 'init'}", "con=null", "con0=fd:0,fd:1", "quiet"]
    subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120 * PATIENCE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    return log.read_text()


if __name__ == "__main__":
    problem = install()
    if problem:
        sys.exit(f"the tests on NFS were not run: {problem}")
