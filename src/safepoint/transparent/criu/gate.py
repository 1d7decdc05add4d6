"""Holds CRIU at the point of a restore where all processes of a tree exist and none runs, until a word is given.

A connection between two trees survives only if both ends exist before one of them sends anything. CRIU runs a script
at this point, which waits for a lock. If Safepoint ends meanwhile, the kernel releases the lock, the script finds no
word, and CRIU ends what it has restored. CRIU closes all descriptors that it inherits, so a pipe would not do.
"""

import fcntl
import os
from pathlib import Path

_SCRIPT = """#!/bin/sh
folder=${0%/*}
case $CRTOOLS_SCRIPT_ACTION in
  post-restore) : >"$folder/restored" && flock --shared "$folder/gate" true && [ -e "$folder/go" ] ;;
  post-resume) : >"$folder/resumed" ;;
esac
"""


class Gate:
    """The gate of one restore.

    Args:
        folder: an existing folder for it, which is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.script = folder / "gate.sh"
        self.script.write_text(_SCRIPT)
        self.script.chmod(0o700)
        self._lock = os.open(folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def is_reached(self) -> bool:
        """Whether all processes exist, and CRIU waits."""
        return (self._folder / "restored").exists()

    @property
    def is_passed(self) -> bool:
        """Whether CRIU has completed the restore."""
        return (self._folder / "resumed").exists()

    def open(self) -> None:
        """Let CRIU go on."""
        (self._folder / "go").touch()
        self.close()

    def close(self) -> None:
        """Release the lock. If the gate was not opened, CRIU ends what it has restored."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
