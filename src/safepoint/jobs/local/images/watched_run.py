"""`safepoint run --freeze-as-last-resort`: runs the launcher in a process of its own, and freezes it at the deadline.

A process cannot freeze itself, so the command stays outside of the launcher's tree: it forwards signals, and waits.
When the same command is run again, it restores the launcher from its image, unless there is a newer checkpoint. Each
image is restored only once: if the restored run ends without a newer checkpoint, a second restore would probably end
in the same way.

If this process is killed, the launcher runs on.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import ExitCode, SafepointError, UnsupportedError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.events import console
from safepoint.foundation.events.image_events import Frozen, NotFrozen, Thawed
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.files import write_atomic
from safepoint.foundation.processes import ProcessId, identify
from safepoint.jobs.local.attempt.node import exit_file, read_exit_code, write_plan
from safepoint.jobs.local.images.last_resort import LastResort, images_in
from safepoint.jobs.local.newest_state import choose, newest_checkpoint
from safepoint.progress.record import State, read_progress
from safepoint.settings.run_settings import RunSettings, place_output
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.transparent.criu.program import Criu

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.05
_PLAN = "launcher.json"
_RESTORED = "restored"
_log = logging.getLogger("safepoint")


def run_watched(plan: LaunchPlan, settings: RunSettings) -> int:
    """Run the ranks of this node to their end, or until they are frozen. Call this function on the main thread.

    Args:
        plan: which ranks to start.
        settings: the options of the run.

    Returns:
        The exit code that `launch` returns; 75 if the ranks are in an image.

    Raises:
        UsageError: the location of the images is unknown, or others may write to it.
        UnsupportedError: processes cannot be frozen and restored here.
    """
    if settings.output_dir is None:
        raise UsageError(
            "--freeze-as-last-resort needs --output-dir, because images are made in its folder; nothing was started",
            hint="give the output folder of the script with --output-dir",
        )
    if plan.nnodes > 1:
        raise UnsupportedError(
            f"with --nnodes {plan.nnodes}, --freeze-as-last-resort is possible only in a job on this machine; "
            "nothing was started",
            hint="run it as a job: `safepoint submit --nnodes N`",
        )
    _require_files()
    from safepoint.transparent.self_test import find_working_criu  # imports numpy

    criu = find_working_criu(1)
    console.set_up(settings.verbosity)
    return _WatchedRun(plan, settings, criu).run()


def _require_files() -> None:
    """Check that output goes to files: with a pipe or a terminal, restored processes could print nothing."""
    for descriptor, name in ((1, "output"), (2, "error output")):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            is_null = stat.S_ISCHR(mode) and os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
            if not stat.S_ISREG(mode) and not is_null:
                raise UnsupportedError(
                    f"--freeze-as-last-resort: the {name} of this command is not a file, and a restored process "
                    "could not print there; nothing was started",
                    hint="redirect it: `safepoint run … >>run.log 2>&1`",
                )


class _WatchedRun:
    def __init__(self, plan: LaunchPlan, settings: RunSettings, criu: Criu) -> None:
        self._plan = plan
        self._settings = settings
        self._criu = criu
        place = place_output(settings.output_dir or "", local_dir=settings.local_dir)
        self._output = OutputFolder(Path(os.path.abspath(place.folder)))
        self._images = self._output.root / "images"
        self._asked_s: float | None = None
        self._launcher: ProcessId | None = None

    def run(self) -> int:
        with images_in(self._images) as location:
            self._control = location.control_folder()
        with self._forwarding():
            child = None
            if not self._restore():
                child = self._start()
            launcher = self._launcher
            if launcher is None:
                return ExitCode.FAILED
            resort = LastResort(self._settings, [launcher.pid], self._images)
            while launcher.is_alive and (child is None or child.poll() is None):
                resort.look()
                if resort.is_due(self._asked_s) and self._freeze(resort):
                    if child is not None:
                        child.wait()
                    return ExitCode.INTERRUPTED_SAVED
                clock.sleep(_POLL_S)
        code = read_exit_code(self._control / _PLAN)
        if code is None:
            code = child.wait() if child is not None else ExitCode.FAILED
        return 128 - code if code < 0 else code

    @contextlib.contextmanager
    def _forwarding(self) -> Generator[None]:
        """Forward the signals of this process to the launcher, which is in a session of its own."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGUSR1 and self._asked_s is None:
                self._asked_s = clock.monotonic_s()
            if self._launcher is not None:
                self._launcher.send(number)

        before = {number: signal.signal(number, forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._control / _PLAN
        exit_file(path).unlink(missing_ok=True)
        write_plan(path, asdict(self._plan), self._settings)
        command = [sys.executable, "-P", "-m", "safepoint.jobs.local.attempt.node", str(path)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._set_launcher(child.pid)
        return child

    def _set_launcher(self, pid: int) -> None:
        self._launcher = identify(pid)
        if self._asked_s is not None and self._launcher is not None:  # a signal arrived before the launcher ran
            self._launcher.send(signal.SIGTERM)

    def _restore(self) -> bool:
        """If the newest image is newer than all checkpoints, restore the launcher from it. Returns whether it did."""
        if self._settings.resume != "auto" or self._settings.from_scratch:
            return False
        with images_in(self._images) as location:
            names = location.names()
            if not names or names[0] == self._last_restored():
                return False
            inventory = Inventory(open_store(Location.of_folder(self._output.root)))
            begin = choose(location.where(names[0]), newest_checkpoint(inventory))
            if begin.image is None:
                _log.info("the run continues %s", begin.why)
                return False
            from safepoint.transparent.thaw import thaw_image

            exit_file(self._control / _PLAN).unlink(missing_ok=True)
            try:
                [restored] = thaw_image(self._criu, location, names[0])
            except (SafepointError, OSError) as error:
                _log.warning("the process image is not used, and the run continues from its checkpoints: %s", error)
                return False
            write_atomic(self._control / _RESTORED, names[0].encode(), durable=False)
        self._set_launcher(restored.pid)
        self._report(Thawed(path=begin.image, reason=begin.why))
        return True

    def _last_restored(self) -> str:
        try:
            return (self._control / _RESTORED).read_text()
        except OSError:
            return ""

    def _freeze(self, resort: LastResort) -> bool:
        try:
            image: list[str] = []
            frozen = resort.freeze(before_end=image.append)
        except (SafepointError, OSError) as error:
            self._report(NotFrozen(reason=str(error)))
            return False
        event = Frozen(path=image[0], size_bytes=frozen.manifest.size_bytes, frozen_s=round(frozen.frozen_s, 3))
        self._report(event)
        progress = read_progress(self._output.progress)
        if progress is not None:
            ended = dataclasses.replace(progress, state=State.INTERRUPTED, message=event.line, time=clock.utc_now())
            with contextlib.suppress(OSError):
                write_atomic(self._output.progress, ended.to_bytes(), durable=False)
        return True

    def _report(self, event: Event) -> None:
        _log.log(logging.WARNING if event.is_warning else logging.INFO, "%s", event.line)
        EventLog(self._output.events, self._settings.job_events, actor="safepoint run").write(event)
