"""Runs a task on a thread of its own, and waits for the task only for a limited time.

A write to a network folder, for example, may hang.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Work(Generic[_T]):
    """A task that runs on a thread of its own.

    Args:
        task: called at once, on that thread.
    """

    def __init__(self, task: Callable[[], _T]) -> None:
        self._future = Future[_T]()
        # No executor is used. While a task hangs, an executor's threads keep the process from exiting; daemon threads
        # do not.
        threading.Thread(target=self._run, args=(task,), name="safepoint-bounded", daemon=True).start()

    def _run(self, task: Callable[[], _T]) -> None:
        try:
            self._future.set_result(task())
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            self._future.set_exception(error)

    def is_done(self, limit_s: float, *, unless: Future[Any] | None = None) -> bool:
        """Wait at most `limit_s` seconds, and return whether the task has returned or raised.

        Args:
            limit_s: how long to wait.
            unless: the wait also ends when this future is done.
        """
        wait([self._future, *([] if unless is None else [unless])], limit_s, FIRST_COMPLETED)
        return self._future.done()

    def result(self, limit_s: float, *, unless: Future[Any] | None = None) -> _T | None:
        """What the task returned, or None if the task is not done in time; see `is_done`.

        Raises:
            BaseException: what the task raised.
        """
        return self._future.result() if self.is_done(limit_s, unless=unless) else None


def do_within(task: Callable[[], object], limit_s: float) -> bool:
    """Run `task` and wait at most `limit_s` seconds; its exceptions are dropped.

    Returns:
        Whether the task was done in time. If it was not, it continues on its thread.
    """
    return Work(task).is_done(limit_s)
