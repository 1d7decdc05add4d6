"""Work that may hang, such as a write to a network folder: run on a thread, and abandoned after a time limit."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Work(Generic[_T]):
    """A task that runs on a thread of its own.

    Args:
        task: called at once, on that thread.
    """

    def __init__(self, task: Callable[[], _T]) -> None:
        self._task = task
        self._done = threading.Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        # A daemon, so that a hanging task does not keep the process from exiting.
        threading.Thread(target=self._run, name="safepoint-bounded", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            self._error = error
        self._done.set()

    def is_done(self, limit_s: float) -> bool:
        """Whether it has returned or raised within `limit_s` seconds."""
        return self._done.wait(limit_s)

    def result(self, limit_s: float) -> _T | None:
        """What the task returned, or None when it is not done within `limit_s` seconds.

        Raises:
            BaseException: what the task raised.
        """
        if not self.is_done(limit_s):
            return None
        if self._error is not None:
            raise self._error
        return self._result


def do_within(task: Callable[[], object], limit_s: float) -> bool:
    """Run `task` and wait at most `limit_s` seconds; its exceptions are dropped.

    Returns:
        Whether it was done in time; otherwise it continues on its thread.
    """
    return Work(task).is_done(limit_s)
