"""Work that may hang, such as a write to a folder on a network: it is waited for so long, then left alone."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Work(Generic[_T]):
    """Something that is being done beside the rest.

    Args:
        task: what to do; it begins at once, on a thread of its own.
    """

    def __init__(self, task: Callable[[], _T]) -> None:
        self._task = task
        self._done = threading.Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        # Not waited for at the end of the process, so that a hanging one does not keep it.
        threading.Thread(target=self._run, name="safepoint-bounded", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            self._error = error
        self._done.set()

    def is_done(self, limit_s: float) -> bool:
        """Whether it is done in `limit_s` seconds, in whatever way."""
        return self._done.wait(limit_s)

    def result(self, limit_s: float) -> _T | None:
        """What came of it, or None when it is not done in `limit_s` seconds.

        Raises:
            BaseException: what the task has raised.
        """
        if not self.is_done(limit_s):
            return None
        if self._error is not None:
            raise self._error
        return self._result


def do_within(task: Callable[[], object], limit_s: float) -> bool:
    """Do it and wait `limit_s` seconds at most; what it raises is dropped.

    Returns:
        Whether it was done in time; otherwise it goes on beside whatever follows.
    """
    return Work(task).is_done(limit_s)
