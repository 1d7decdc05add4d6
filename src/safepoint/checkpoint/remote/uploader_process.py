"""The uploader's process. The first rank starts the process, and the process outlives this rank.

    python -m safepoint.checkpoint.remote.uploader_process

The process reads the checkpoints from the output folder. It is controlled by stdin, one JSON object a line. The first
line is an `UploaderPlan`. (The plan is not a command-line argument, because it lists steps in the object store. A
stranger could create many objects there, and the argument would be too long.) A line
`{"newest_only": …, "deadline_s": …}` is the request to finish; `deadline_s` is a time of the monotonic clock, or
null. If stdin ends without a request to finish, the training's process has died. The uploader then has the grace
period to upload the newest checkpoint. Exit code 0: everything that had to be uploaded is in the store.
"""

import dataclasses
import io
import json
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.remote.verified_upload import FIRST_PAUSE_S, LONGEST_PAUSE_S, patience_s
from safepoint.errors import ConflictError, ExitCode, SafepointError
from safepoint.foundation import clock, files
from safepoint.foundation.events import console
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.priority import Priority
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store

_LOOK_EVERY_S = 0.25
_KEEPER_S = 10.0
"""The longest wait after a training has died. In this time, the keeper (the process that writes snapshots to disk)
writes the last snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderPlan:
    """The settings of an uploader.

    Args:
        folder: the local output folder.
        location: the location that its checkpoints are published to.
        attempt_id: the unique name of the attempt that has claimed the location.
        run_id: see `Uploader`.
        keep: which checkpoints stay in the store, in the form that `parse_policies` reads; None keeps all.
        node: see `Uploader`.
        num_nodes: see `Uploader`.
        extra_bytes: see `Uploader`.
        passed_over: steps whose checkpoints in the store were found damaged at the start.
        grace_s: for how many seconds to upload the newest checkpoint after the training's process has died.
        verbosity: the verbosity of the console.
        events: the file of the job's event stream, in addition to the stream in the output folder; None for none.
    """

    folder: str
    location: str
    attempt_id: str
    run_id: str | None = None
    keep: str | None = None
    node: int = 0
    num_nodes: int = 1
    extra_bytes: int = 0
    passed_over: tuple[int, ...] = ()
    grace_s: float = 30.0
    verbosity: int = 0
    events: str | None = None


class _Process:
    """Uploads on one thread, receives commands on the main thread."""

    def __init__(self, plan: UploaderPlan) -> None:
        output = OutputFolder(Path(plan.folder))
        log = console.set_up(plan.verbosity)
        events = EventLog(output.events, Path(plan.events) if plan.events else None, actor="uploader")

        def report(event: Event) -> None:
            events.write(event)
            (log.warning if event.is_warning else log.info)("%s", event.line)

        self._priority = Priority()
        self._priority.lower()
        store = open_store(parse_location(plan.location))
        self._plan = plan
        self._log = log
        self._uploader = Uploader(
            output,
            RemoteFolder(store, attempt_id=plan.attempt_id, passed_over=plan.passed_over),
            policies=parse_policies(plan.keep),
            report=report,
            node=plan.node,
            num_nodes=plan.num_nodes,
            extra_bytes=plan.extra_bytes,
            run_id=plan.run_id,
        )
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._left_out_final = False
        self._ended = threading.Event()
        self._exit_code = ExitCode.OK
        self._code_without_extras: ExitCode | None = None

    def run(self) -> int:
        threading.Thread(target=self._work, name="safepoint-uploader", daemon=True).start()
        self._receive_commands()
        self._ended.wait()
        return self._exit_code

    def _work(self) -> None:
        try:
            self._exit_code = self._upload()
        except ConflictError as error:
            self._log.warning("%s", error)
            self._exit_code = ExitCode.CONFLICT
        except Exception:  # noqa: BLE001  the thread must not die and leave the training waiting for it
            self._log.exception("the uploader failed")
            self._exit_code = ExitCode.FAILED
        self._ended.set()

    def _upload(self) -> ExitCode:
        """Upload until the uploader has received the request to finish, and has finished or given up."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                while self._uploader.upload_next():
                    pause_s = FIRST_PAUSE_S
                if self._finishing.is_set():
                    self._uploader.check_complete()
                    self._code_without_extras = ExitCode.STORAGE if self._left_out_final else ExitCode.OK
                    self._uploader.upload_extra_files()
                    return self._code_without_extras
                self._wait(_LOOK_EVERY_S)
            except ConflictError:
                raise
            except SafepointError as error:
                if self._is_to_give_up(error):
                    if self._code_without_extras is not None:
                        self._uploader.extra_files.report_left_out(str(error))
                    return self._code_at_deadline
                self._wait(_LOOK_EVERY_S if self._uploader.is_waiting else pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @property
    def _code_at_deadline(self) -> ExitCode:
        """The exit code when time is up. An interrupted training counts as saved even if its extra files are missing
        in the store."""
        is_saved = self._uploader.newest_only and self._code_without_extras is not None
        return self._code_without_extras or ExitCode.OK if is_saved else ExitCode.STORAGE

    def _end_at_deadline(self) -> None:
        if self._code_without_extras is not None:
            self._uploader.extra_files.report_left_out("there was no more time")
        os._exit(int(self._code_at_deadline))

    def _wait(self, pause_s: float) -> None:
        self._wake.wait(pause_s)
        self._wake.clear()

    def _is_to_give_up(self, error: SafepointError) -> bool:
        """Whether to give up after `error`.

        Only an uploader that has received the request to finish gives up. It gives up shortly before its deadline. If
        it has no deadline, it gives up when it has made no progress for `patience_s(error)` seconds.
        """
        if not self._finishing.is_set():
            return False
        now_s, deadline_s = clock.monotonic_s(), self._uploader.deadline_s
        if deadline_s is not None:
            return now_s + 0.5 > deadline_s
        return now_s - self._uploader.last_progress_s > patience_s(error)

    def _receive_commands(self) -> None:
        pending: bytes = b""
        while not self._ended.is_set():
            ready, _, _ = select.select([0], [], [], 0.2)
            if not ready:
                continue
            data: bytes = os.read(0, 4096)
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                command = json.loads(line)
                self._finish(newest_only=command["newest_only"], deadline_s=command["deadline_s"])
            if not data:
                self._wait_for_keeper()
                if not self._finishing.is_set():
                    self._finish(newest_only=True, deadline_s=clock.monotonic_s() + self._plan.grace_s)
                return

    def _wait_for_keeper(self) -> None:
        """Wait for the keeper (the process that writes snapshots to disk) after the training has died.

        The checkpoint that the keeper commits in this time is uploaded too.
        """
        deadline_s = clock.monotonic_s() + min(_KEEPER_S, self._plan.grace_s / 3)
        lock = OutputFolder(Path(self._plan.folder)).keeper_lock
        while files.is_locked(lock) and clock.monotonic_s() < deadline_s:
            clock.sleep(0.1)

    def _finish(self, *, newest_only: bool, deadline_s: float | None) -> None:
        # The final model was to be uploaded, but there is no time for it.
        if self._uploader.with_final and newest_only:
            self._left_out_final = True
        self._uploader.takes_open = True
        self._uploader.newest_only = newest_only
        self._uploader.with_final = not newest_only
        self._uploader.deadline_s = deadline_s
        if deadline_s is not None:
            end = threading.Timer(max(0.0, deadline_s - clock.monotonic_s()), self._end_at_deadline)
            end.daemon = True
            end.start()
        if not self._finishing.is_set():
            # The time that `patience_s` limits is counted from now on.
            self._uploader.last_progress_s = clock.monotonic_s()
        self._finishing.set()
        self._priority.restore()
        self._wake.set()


def main() -> int:
    """Run the uploader with the plan that is the first line of stdin, until it has finished or given up."""
    # Some platforms signal every process of a job. This process ignores the signals, because it must outlive the
    # training. The end of stdin shows that the training has ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with io.FileIO(0, closefd=False) as stdin:  # without a buffer: the commands stay in the pipe
        line = stdin.readline()
    return _Process(UploaderPlan(**json.loads(line))).run()


def plan_line(plan: UploaderPlan) -> bytes:
    """The plan as the line that `main` reads."""
    return json.dumps(dataclasses.asdict(plan)).encode() + b"\n"


if __name__ == "__main__":
    # Threads of the store's library must not delay the exit.
    sys.stdout.flush()
    os._exit(main())
