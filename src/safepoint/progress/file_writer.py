"""Keeps small files up to date from a thread of its own, at most twice a second.

Whoever has news only says that there are some; so a slow folder holds up nobody, and the last news before a long
pause are written too. The files are a convenience of the moment: they are not fsynced, and a full disk loses a
figure, not the run.
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
        make: what they are to hold; called on the writing thread.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], bytes]) -> None:
        self._paths = paths
        self._make = make
        self._changed = threading.Condition()
        self._has_news = self._is_idle = self._is_closed = False
        self._num_asked = self._num_answered = 0
        threading.Thread(target=self._write, name="safepoint-progress", daemon=True).start()

    def update(self) -> None:
        """There are news; cheap enough for every step."""
        # Without the lock: the writer says that it is idle before it looks for news.
        self._has_news = True
        if self._is_idle:
            with self._changed:
                self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Write the news of now at once, and wait for it.

        Args:
            limit_s: seconds to wait at most.

        Returns:
            Whether they are written.
        """
        with self._changed:
            self._num_asked += 1
            number = self._num_asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_answered >= number, limit_s)

    def close(self) -> None:
        """Nothing more is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _is_asked(self) -> bool:
        return self._num_asked > self._num_answered or self._is_closed

    def _write(self) -> None:
        due_s = 0.0
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(lambda: self._has_news or self._is_asked)
                self._is_idle = False
                self._changed.wait_for(lambda: self._is_asked, max(0.0, due_s - clock.monotonic_s()))
                if self._is_closed:
                    return
                self._has_news = False
                number = self._num_asked
            data = self._make()
            for path in self._paths:
                with contextlib.suppress(OSError):
                    write_atomic(path, data, durable=False)
            due_s = clock.monotonic_s() + _INTERVAL_S
            with self._changed:
                self._num_answered = number
                self._changed.notify_all()
