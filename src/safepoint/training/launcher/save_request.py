"""Requests a checkpoint of the job that trains in this pod, and makes its ranks wait after the save.

`safepoint suspend --on` runs this module in the pod of the first node, before it suspends the job. The module prints
lines of JSON. While it waits, it prints `{"waits": …}`, so that the connection stays in use. At the end, it prints
`{"receipt": …}` or `{"error": …}`. If the module ends with an error, or is killed, the training continues.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.tools.receipt import CheckpointReceipt, check_checkpoint
from safepoint.errors import CheckpointError, ConflictError, NotFoundError, SafepointError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.progress.record import PROGRESS_NAME, read_progress
from safepoint.training.outcome.hold import Held, Hold
from safepoint.training.outcome.launcher_folder import running_launchers

_LOOK_S, _LOOK_IN_STORE_S = 0.05, 0.5
_SIGN_S = 2.0
_LEAST_S = 60.0
_PATIENCE = 3
"""A save may take this many times as long as expected."""


class SaveRequest:
    """One request for a checkpoint.

    Args:
        folder: the launcher's folder.
        pid: the launcher's process id.
        within_s: the most seconds for the save, the upload and the check together.
        sign: called every two seconds with a text that says what the request waits for.
    """

    def __init__(self, folder: Path, pid: int, *, within_s: float, sign: Callable[[str], None]) -> None:
        self._folder, self._pid = folder, pid
        self._hold = Hold(folder)
        self._deadline_s = clock.monotonic_s() + within_s
        self._sign = sign
        self._next_sign_s = 0.0

    def carry_out(self) -> CheckpointReceipt:
        """Make the job save, wait for the upload if there is an object store, and check the checkpoint.

        After the save, the ranks wait.

        Raises:
            ConflictError: the job does not train.
            WaitTimeoutError: the save, the upload or the check took too long.
            CheckpointError: the save failed, or the checkpoint in the output folder is not valid.
        """
        self._hold.request()
        try:
            receipt = self._check(self._wait_for_save())
        except BaseException:
            self._hold.withdraw()
            raise
        self._hold.request()
        return receipt

    def _wait_for_save(self) -> Held:
        progress = read_progress(self._folder / PROGRESS_NAME)
        if progress is None or progress.state.is_end:  # SIGUSR1 could kill a rank that has not begun to train
            raise ConflictError("the job does not train yet, or does not train any more")
        os.kill(self._pid, signal.SIGUSR1)
        limit_s = clock.monotonic_s() + max(_LEAST_S, _PATIENCE * (progress.save_needed_s or 0.0))
        while (held := self._hold.held) is None:
            self._wait("the save", min(limit_s, self._deadline_s), _LOOK_S)
        return held

    def _check(self, held: Held) -> CheckpointReceipt:
        if not held.is_saved:
            raise CheckpointError(f"the save of step {held.step} failed")
        location = held.location or held.folder
        while True:
            try:
                return check_checkpoint(location, held.step, deep=True, progress=self._reads)
            except CheckpointError:
                if not held.location:
                    raise
            self._wait(f"the upload of step {held.step}", self._deadline_s, _LOOK_IN_STORE_S)

    def _reads(self, done: int, total: int) -> None:
        self._wait(f"the check of the checkpoint ({done} of {total} bytes are read)", self._deadline_s, 0.0)

    def _wait(self, what: str, deadline_s: float, pause_s: float) -> None:
        now_s = clock.monotonic_s()
        if now_s > deadline_s:
            raise WaitTimeoutError(f"the request timed out while it waited for {what}")
        if now_s >= self._next_sign_s:
            self._next_sign_s = now_s + _SIGN_S
            self._hold.request()
            self._sign(what)
        clock.sleep(pause_s)


def request_save(*, within_s: float, sign: Callable[[str], None]) -> CheckpointReceipt:
    """Request a checkpoint of the only job that this user runs on this machine.

    Args:
        within_s: the most seconds for the save, the upload and the check together.
        sign: called every two seconds with a text that says what the request waits for.

    Raises:
        NotFoundError: no job runs.
        ConflictError: several jobs run, or the job does not train.
        WaitTimeoutError: see `SaveRequest.carry_out`.
        CheckpointError: see `SaveRequest.carry_out`.
    """
    running = running_launchers()
    if not running:
        raise NotFoundError("no process of `safepoint run` is running here")
    if len(running) > 1:
        raise ConflictError(f"{len(running)} processes of `safepoint run` are running here")
    return SaveRequest(*running[0], within_s=within_s, sign=sign).carry_out()


def main(arguments: list[str]) -> int:
    """Carry out one request. The argument is the number of seconds that the request may take."""
    try:
        receipt = request_save(within_s=float(arguments[0]), sign=lambda what: _print("waits", what))
    except (SafepointError, OSError) as error:
        _print("error", error.message if isinstance(error, SafepointError) else str(error))
        return error.exit_code if isinstance(error, SafepointError) else 1
    _print("receipt", dataclasses.asdict(receipt))
    return 0


def _print(key: str, value: object) -> None:
    print(json.dumps({key: value}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
