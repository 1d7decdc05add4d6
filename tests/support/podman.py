"""Containers of podman whose root folder has the programs, the packages and the CRIU of this machine.

There is no registry in the tests, so the containers need no container image: the folders of this machine are mounted
in them, at the same paths, so that the same command runs inside and outside. Needs root, podman, and catatonit.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.criu import PROGRAM, environment

_ROOT = Path(__file__).parents[2]
_PASSED_ON = ("PYTHONPATH", "XDG_CONFIG_HOME", "SAFEPOINT_CRIU")
PRIVILEGED = ("--privileged",)
RIGHTS = ("--security-opt", "seccomp=unconfined", "--cap-add", "SYS_ADMIN,NET_ADMIN,SYS_TIME")
"""The least that a container needs, so that processes in it can be frozen and restored."""


def unavailable() -> str | None:
    """Why no container can run here, or None if one can."""
    missing = [name for name in ("podman", "catatonit") if not _is_installed(name)]
    if missing or os.geteuid() != 0:
        names = " and ".join(missing) or "root"
        return f"{names} missing; on Debian, `apt-get install podman catatonit` installs what they need"
    return None


def _is_installed(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/libexec/podman:/usr/lib/podman") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container that runs.

    Args:
        name: its name.
    """

    name: str

    def command(self, *words: object, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs `words` in the container."""
        known = {**environment(), **(env or {})}
        passed = {name: known[name] for name in (*_PASSED_ON, *(env or {})) if name in known}
        variables = [word for name, value in passed.items() for word in ("--env", f"{name}={value}")]
        return ["podman", "exec", *options, *variables, self.name, *map(str, words)]

    def start(self, words: Sequence[object], log: Path, env: Mapping[str, str] | None = None) -> None:
        """Run a program in the background, without the pipes of podman: CRIU cannot dump them."""
        script = 'log=$1; shift; exec "$@" </dev/null >>"$log" 2>&1'
        command = self.command("sh", "-c", script, "sh", log, *words, options=["--detach"], env=env)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def safepoint(self, *words: object, code: int = 0) -> dict[str, Any]:
        """Run a command of Safepoint there with `--json`; the answer, or the error."""
        command = self.command(sys.executable, "-m", "safepoint.cli.main", *words, "--json")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr + result.stdout
        lines = result.stdout.splitlines() if code == 0 else result.stderr.splitlines()[-1:]
        found: dict[str, Any] = json.loads("\n".join(lines))
        return found


@contextmanager
def container(folder: Path, *options: str) -> Generator[Container]:
    """Run a container that does nothing by itself, and remove it at the end with all its processes.

    Args:
        folder: a folder that the container shares with this machine; its root folder is made there.
        options: further options of `podman run`.
    """
    name = f"safepoint-{uuid.uuid4().hex[:8]}"
    root = folder / name
    mounts = _make_root(root)
    shared = [word for path in mounts for word in ("--volume", f"{path}:{path}:ro")]
    command = ["podman", "run", "--detach", "--name", name, "--network", "none", "--init", "--shm-size", "1g"]
    command += [*shared, "--volume", f"{folder}:{folder}", *options, "--rootfs", str(root), "sleep", "infinity"]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield Container(name=name)
    finally:
        subprocess.run(["podman", "rm", "--force", "--time", "0", name], check=False, stdout=subprocess.DEVNULL)


def _make_root(root: Path) -> list[Path]:
    """An almost empty root folder; returns the folders of this machine to mount in it."""
    for name in ("etc", "proc", "sys", "dev", "tmp", "run", "root"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in ("ld.so.cache", "passwd", "group"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
    wanted = [Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), _ROOT, PROGRAM.parent]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            (root / path.name).symlink_to(os.readlink(path))
        elif path.exists():
            wanted.append(path)
    return sorted({one for one in wanted if one.exists() and not any(other in one.parents for other in wanted)})
