"""Keeps small files up to date on a thread of its own, at most twice a second.

A caller only reports that the content has changed, so the caller never waits for a slow folder. The last change is
written even if no other change follows. The files are not fsynced. If a write fails, for example on a full disk, the
change is dropped.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.files import write_atomic

_INTERVAL_S = 0.5


class ProgressFile:
    """Writes the same bytes to several files.

    Args:
        paths: the files.
        make: returns the content; called on the writing thread.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], bytes]) -> None:
        self._paths = paths
        self._make = make
        self._changed = threading.Condition()
        self._has_changed = self._is_idle = self._is_closed = False
        self._num_requested = self._num_flushed = 0
        threading.Thread(target=self._write, name="safepoint-progress", daemon=True).start()

    def update(self) -> None:
        """Report a change. The call is cheap enough for every step."""
        # No lock is needed: the writer sets `_is_idle` before it reads `_has_changed`, so it cannot miss the change.
        self._has_changed = True
        if self._is_idle:
            with self._changed:
                self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Write the current content at once, and wait for the end of the write.

        Args:
            limit_s: seconds to wait at most.

        Returns:
            Whether the write ended in time.
        """
        with self._changed:
            self._num_requested += 1
            number = self._num_requested
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_flushed >= number, limit_s)

    def close(self) -> None:
        """End the thread. A change that is not written yet is dropped; see `flush`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _is_requested(self) -> bool:
        return self._num_requested > self._num_flushed or self._is_closed

    def _write(self) -> None:
        due_s = 0.0
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(lambda: self._has_changed or self._is_requested)
                self._is_idle = False
                self._changed.wait_for(lambda: self._is_requested, max(0.0, due_s - clock.monotonic_s()))
                if self._is_closed:
                    return
                self._has_changed = False
                number = self._num_requested
            data = self._make()
            for path in self._paths:
                with contextlib.suppress(OSError):
                    write_atomic(path, data, durable=False)
            due_s = clock.monotonic_s() + _INTERVAL_S
            with self._changed:
                self._num_flushed = number
                self._changed.notify_all()
