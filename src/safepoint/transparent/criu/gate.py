"""Makes CRIU wait at two points of a restore: when all processes exist and none runs, and when CRIU has completed the
restore.

A connection between two trees survives only if both ends exist before either of them sends anything, so all trees
wait at the first point. At the second point, the restored processes are still stopped. If CRIU ended at this
point, the kernel would end the processes in CRIU's session with SIGHUP, because their parent has ended.

At these points, CRIU runs a script, which waits for a lock. If Safepoint ends meanwhile, the kernel releases the
lock. At the first point, the script then fails, because it does not find the file `go`, and CRIU ends the processes
that it has restored. CRIU closes all descriptors that it inherits, so a pipe cannot replace the lock.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from safepoint.errors import UnsupportedError

_SCRIPT = """#!/bin/sh
folder=${0%/*}
case $CRTOOLS_SCRIPT_ACTION in
  post-restore)
    echo "$CRTOOLS_INIT_PID" >"$folder/pid" && mv "$folder/pid" "$folder/restored" &&
      flock --shared "$folder/start" true && [ -e "$folder/go" ]
    ;;
  post-resume) : >"$folder/resumed" && flock --shared "$folder/end" true ;;
esac
"""


def folder_for_scripts(candidates: Sequence[Path]) -> Path:
    """The first of these folders in which the kernel executes programs.

    Containers and some machines mount `/dev/shm` or `/tmp` with `noexec`.

    Args:
        candidates: existing folders.

    Raises:
        UnsupportedError: there is no such folder.
    """
    for folder in candidates:
        if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return folder
    names = ", ".join(map(str, candidates))
    raise UnsupportedError(
        f"a restore needs a folder in which programs can be executed, and these are mounted with noexec: {names}; "
        "nothing was restored",
        hint="set TMPDIR to a folder on another file system",
    )


class Gate:
    """The gate of one restore.

    Args:
        folder: an existing empty folder for the files of the gate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.script = folder / "gate.sh"
        self.script.write_text(_SCRIPT)
        self.script.chmod(0o700)
        self._locks = {name: _locked(folder / name) for name in ("start", "end")}

    def restored(self) -> int | None:
        """The number of the root process, as CRIU sees it; None before all processes exist."""
        try:
            return int((self._folder / "restored").read_text())
        except FileNotFoundError:
            return None

    @property
    def is_passed(self) -> bool:
        """Whether CRIU has completed the restore. The processes are stopped."""
        return (self._folder / "resumed").exists()

    def open(self) -> None:
        """Let CRIU complete the restore."""
        (self._folder / "go").touch()
        self._release("start")

    def close(self) -> None:
        """Let CRIU end. If the gate was not opened, CRIU ends the processes that it has restored."""
        for name in list(self._locks):
            self._release(name)

    def _release(self, name: str) -> None:
        os.close(self._locks.pop(name))


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
