"""Runs other programs, with a time limit: a broken driver or a dead file server lets them hang."""

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of another program.

    Args:
        code: its exit code; None when it had not ended in time.
        output: its stdout.
        complaint: the last line of its stderr.
    """

    code: int | None
    output: str = ""
    complaint: str = ""


def ask(command: Sequence[str], *, limit_s: float) -> Answer:
    """Run `command`, and end it after `limit_s` seconds.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a device ignores even SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return Answer(code=None)
    lines = complaint.strip().splitlines()
    return Answer(code=process.returncode, output=output, complaint=lines[-1] if lines else "")
