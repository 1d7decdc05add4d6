"""Starts the keeper (the process of a node that writes snapshots to disk), and a new one if the keeper has died."""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable

from safepoint.foundation import clock
from safepoint.foundation.processes import close_in_children
from safepoint.snapshot.protocol.channel import listen
from safepoint.snapshot.protocol.messages import KeeperPlan

_log = logging.getLogger("safepoint")
_LOOK_EVERY_S = 0.1
_SHORT_S, _MAX_SHORT = 5.0, 3


class KeeperProcess:
    """A keeper. It runs at least as long as its owner (see `KeeperPlan`), and then until all its work is done.

    Args:
        plan: what the keeper needs to start.

    Raises:
        OSError: the process cannot be started, or another keeper already runs with `plan.key`.
    """

    def __init__(self, plan: KeeperPlan) -> None:
        self.key = plan.key
        self._plan = plan
        self._process = _start(plan)
        self._started_s = clock.monotonic_s()
        self._num_short = 0
        self._has_given_up = False

    @property
    def pid(self) -> int:
        """The pid of the keeper that runs now."""
        return self._process.pid

    def ensure(self) -> None:
        """Start a new keeper if the last one has died.

        If three keepers in a row have died within five seconds of their start, no new one is started.
        """
        if self._process.poll() is None or self._has_given_up:
            return
        lived_s = clock.monotonic_s() - self._started_s
        self._num_short = self._num_short + 1 if lived_s < _SHORT_S else 0
        if self._num_short >= _MAX_SHORT:
            self._has_given_up = True
            _log.warning(
                "the keeper has died three times within five seconds of its start; it is not started again, and "
                "training waits for each save from now on"
            )
            return
        self._say_goodbye()
        try:
            self._process = _start(self._plan)
        except OSError as error:
            self._has_given_up = True
            _log.warning(
                "the keeper cannot be started again (%s); training waits for each save from now on", error.strerror
            )
        self._started_s = clock.monotonic_s()

    def _say_goodbye(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pipe.write(b"bye")

    def finish(self, left_s: Callable[[], float | None] = lambda: None) -> bool:
        """Make the keeper end when its work is done, and wait until it has ended.

        Args:
            left_s: called repeatedly; returns how many seconds are left before the keeper is killed, or None for no
                limit.

        Returns:
            Whether the keeper ended by itself.
        """
        self._say_goodbye()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_EVERY_S)
                return True
            left = left_s()
            if left is not None and left <= 0:
                self._process.kill()
                self._process.wait()
                return False


def _start(plan: KeeperPlan) -> "subprocess.Popen[bytes]":
    # Every user can read the command line of the keeper, so the key must not be in it. In the place of the
    # key, it has the name of the socket, which is not secret.
    with listen(plan.key) as server:
        name = os.fsdecode(server.getsockname()[1:])
        plan = dataclasses.replace(plan, key=name, listening=server.fileno())
        # The keeper gets a session of its own, so that a signal to the process group of a rank or a launcher does not
        # reach it.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "safepoint.snapshot.keeper", json.dumps(dataclasses.asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(server.fileno(),),
        )
    close_in_children(process.stdin)
    return process
