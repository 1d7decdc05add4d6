"""Work that may hang: a broken driver, a dead file server. It is waited for so long, then left alone."""

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What another program said.

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
        # A process that waits for a device does not even hear that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return Answer(code=None)
    lines = complaint.strip().splitlines()
    return Answer(code=process.returncode, output=output, complaint=lines[-1] if lines else "")


class Work(Generic[_T]):
    """Something that is being done beside the rest.

    Args:
        task: what to do; it begins at once.
    """

    def __init__(self, task: Callable[[], _T]) -> None:
        self._task = task
        self._done = threading.Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        # Not waited for at the end of the process, so that a hanging one does not keep it.
        threading.Thread(target=self._run, name="holdfast-doctor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            self._error = error
        self._done.set()

    def result(self, limit_s: float) -> _T | None:
        """What came of it, or None when it is not done in `limit_s` seconds."""
        if not self._done.wait(limit_s):
            return None
        if self._error is not None:
            raise self._error
        return self._result


__all__ = ["Answer", "Work", "ask"]
