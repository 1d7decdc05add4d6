"""Holds CRIU at the point of a restore where all processes of a tree exist and none runs, until a word is given.

A connection between two trees survives only if both ends exist before one of them sends anything. CRIU runs a script
at this point, which waits at a pipe. If Safepoint ends meanwhile, the kernel closes the pipe, the script fails, and
CRIU ends what it has restored.
"""

import contextlib
import os
from pathlib import Path

_SCRIPT = """#!/bin/sh
case $CRTOOLS_SCRIPT_ACTION in
  post-restore)
    echo restored >"/proc/self/fd/$SAFEPOINT_ANSWER"
    read -r word <"/proc/self/fd/$SAFEPOINT_GATE" && [ "$word" = go ]
    ;;
  post-resume) echo resumed >"/proc/self/fd/$SAFEPOINT_ANSWER" ;;
esac
"""
RESTORED, RESUMED = "restored", "resumed"


class Gate:
    """The gate of one restore.

    Args:
        folder: a folder for the script.
    """

    def __init__(self, folder: Path) -> None:
        self.script = folder / "gate.sh"
        self.script.write_text(_SCRIPT)
        self.script.chmod(0o700)
        self._gate, self._opener = os.pipe()
        answers, self._answer = os.pipe()
        self._answers = open(answers, encoding="ascii", errors="replace")  # noqa: SIM115  closed by `close`

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that CRIU has to inherit."""
        return self._gate, self._answer

    @property
    def environment(self) -> dict[str, str]:
        """The variables that CRIU has to inherit."""
        return {"SAFEPOINT_GATE": str(self._gate), "SAFEPOINT_ANSWER": str(self._answer)}

    def started(self) -> None:
        """CRIU has inherited its ends of the pipes, so this process closes them, and notices when CRIU ends."""
        os.close(self._gate)
        os.close(self._answer)
        self._gate = self._answer = -1

    def wait_for(self, answer: str) -> bool:
        """Wait until CRIU has come to a point; False if it has ended before.

        Args:
            answer: RESTORED or RESUMED.
        """
        return self._answers.readline().strip() == answer

    def open(self) -> None:
        """Let the processes run."""
        with contextlib.suppress(BrokenPipeError):  # CRIU has ended, which `wait_for` reports
            os.write(self._opener, b"go\n")

    def close(self) -> None:
        """Close the pipes. If the gate was not opened, CRIU ends what it has restored."""
        for descriptor in (self._gate, self._answer, self._opener):
            if descriptor >= 0:
                os.close(descriptor)
        self._gate = self._answer = self._opener = -1
        self._answers.close()
