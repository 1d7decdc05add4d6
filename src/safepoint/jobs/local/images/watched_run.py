"""`safepoint run --freeze-as-last-resort`: runs the launcher in a process of its own, which it can freeze.

A process cannot freeze itself, so the command stays outside of the launcher's tree: it forwards signals, and waits.
It makes an image at the deadline if the ranks cannot save before it, and in a pod also on request (`image_request`).
When the same command is run again, it restores the launcher from its image, unless there is a newer checkpoint. Each
image is restored only once: if the restored run ends without a newer checkpoint, a second restore would probably end
in the same way.

If this process is killed, the launcher runs on; in a pod, it ends with the pod.
"""

import contextlib
import dataclasses
import enum
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import ExitCode, FreezeError, SafepointError, UnsupportedError, UsageError
from safepoint.foundation import clock
from safepoint.foundation.events import console
from safepoint.foundation.events.image_events import Frozen, FrozenOnRequest, NotFrozen, Thawed, ThawedWithoutProgress
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.files import write_atomic
from safepoint.foundation.processes import ProcessId, identify, tree_of
from safepoint.jobs.local.attempt.node import exit_file, read_exit_code, write_plan
from safepoint.jobs.local.attempt.thaw_watch import ThawWatch
from safepoint.jobs.local.images.image_request import HOLD_S, ImageRequest, failure_of, take_request
from safepoint.jobs.local.images.last_resort import LastResort, carried_folders, images_in, were_late
from safepoint.jobs.local.images.output_copy import OutputCopy, is_file
from safepoint.jobs.local.newest_state import choose, newest_checkpoint
from safepoint.progress.record import State, read_progress
from safepoint.progress.trainer_status import TERMINATION_LOG, TrainerStatus
from safepoint.settings.run_settings import RunSettings, place_output
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.trees import held, kill

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import ImageManifest

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.05
_PLAN = "launcher.json"
_RESTORED = "restored"
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
"""The ranks of one node need no other network. CRIU restores a connection with its addresses, and the pod or machine
of a restore may have another address."""
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
    from safepoint.transparent.self_test import find_working_criu  # imports numpy

    criu = find_working_criu(1 if is_file(1) else None)
    console.set_up(settings.verbosity)
    return _WatchedRun(plan, settings, criu).run()


class _End(enum.Enum):
    """How a launcher has ended."""

    OWN = enum.auto()
    FROZEN = enum.auto()
    """It is in an image."""
    STUCK = enum.auto()
    """It was restored, made no progress, and was ended."""


class _WatchedRun:
    def __init__(self, plan: LaunchPlan, settings: RunSettings, criu: Criu) -> None:
        self._plan = plan
        self._settings = settings
        self._criu = criu
        place = place_output(settings.output_dir or "", local_dir=settings.local_dir)
        self._output = OutputFolder(Path(os.path.abspath(place.folder)))
        self._images = self._output.root / "images"
        self._asked_s: float | None = None
        self._held: list[int] | None = None
        """While an image is made on request, the signals that the launcher gets only if it runs on."""
        self._launcher: ProcessId | None = None

    def run(self) -> int:
        with images_in(self._images) as location:
            self._control = location.control_folder()
        output = OutputCopy(self._control)
        with self._forwarding(), output.copying():
            child = None if self._restore() else self._start(output)
            end = self._watch(child)
            if end is _End.STUCK:
                child = self._start(output)
                end = self._watch(child)
        if end is _End.FROZEN:
            return ExitCode.INTERRUPTED_SAVED
        code = read_exit_code(self._control / _PLAN)
        if code is None:
            code = child.wait() if child is not None else ExitCode.FAILED
        return 128 - code if code < 0 else code

    def _watch(self, child: subprocess.Popen[bytes] | None) -> _End:
        """Watch the launcher until it has ended.

        Args:
            child: its process; None if it was restored.
        """
        launcher = self._launcher
        if launcher is None:
            return _End.OWN
        watch = None
        if child is None:
            own = partial(tree_of, launcher.pid)
            watch = ThawWatch(self._output.progress, own, is_late=were_late([launcher.pid]))
        resort = LastResort(self._settings, [launcher.pid], self._images)
        while launcher.is_alive and (child is None or child.poll() is None):
            resort.look()
            request = take_request(resort.folders)
            is_frozen = request is not None and self._answer(request, launcher)
            if is_frozen or (resort.is_due(self._asked_s) and self._freeze(resort)):
                if child is not None:
                    child.wait()
                return _End.FROZEN
            if watch is not None and watch.is_stuck():
                with held(tree_of(launcher.pid)) as processes:
                    kill(processes)
                self._report(ThawedWithoutProgress(limit_s=watch.limit_s or 0.0))
                return _End.STUCK
            clock.sleep(_POLL_S)
        return _End.OWN

    @contextlib.contextmanager
    def _forwarding(self) -> Generator[None]:
        """Forward the signals of this process to the launcher, which is in a session of its own."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGUSR1 and self._asked_s is None:
                self._asked_s = clock.monotonic_s()
            if self._held is not None:
                self._held.append(number)
            elif self._launcher is not None:
                self._launcher.send(number)

        before = {number: signal.signal(number, forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, output: OutputCopy) -> subprocess.Popen[bytes]:
        path = self._control / _PLAN
        exit_file(path).unlink(missing_ok=True)
        write_plan(path, asdict(self._plan), self._settings)
        command = [sys.executable, "-P", "-m", "safepoint.jobs.local.attempt.node", str(path)]
        with output.opened() as files:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files[1],
                stderr=files[2],
                env={**_ON_LOOPBACK, **os.environ},
                start_new_session=True,
            )
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
            begin = choose(location.where(names[0]), newest_checkpoint(self._inventory()))
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

    def _inventory(self) -> Inventory:
        return Inventory(open_store(Location.of_folder(self._output.root)))

    def _safe_step(self, created: str) -> int | None:
        """The step of the newest checkpoint that is not newer than an image which was made at this time.

        None if there is no such checkpoint, or if the folder cannot be read. While an image is stored and checked, a
        job that runs on may save a newer checkpoint.
        """
        with contextlib.suppress(SafepointError, OSError):
            found = newest_checkpoint(self._inventory(), until_s=clock.parse_utc(created))
            return None if found is None else found.step
        return None

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
        self._report_end(event)
        self._report_to_cluster(frozen.manifest)
        return True

    def _report_to_cluster(self, manifest: "ImageManifest") -> None:
        """In a pod, write the image into the termination message, which a command that stops the job reads.

        The launcher, which writes this message otherwise, is in the image.
        """
        progress = read_progress(self._output.progress)
        if progress is None or not TERMINATION_LOG.is_file():
            return
        from safepoint.transparent.images.materialise import image_document

        with images_in(self._images) as location:
            image = {**image_document(manifest, location), "safe_step": self._safe_step(manifest.created)}
        TrainerStatus.of(progress, has_ended=False).write_termination_message(TERMINATION_LOG, image=image)

    def _answer(self, request: ImageRequest, launcher: ProcessId) -> bool:
        """Make the image of a request. Returns whether the processes have ended."""
        is_running_after = request.is_running_after
        try:
            with images_in(self._images) as location, self._holding(launcher, is_needed=not is_running_after):
                manifest = self._make_image(request, launcher, location)
        except (SafepointError, OSError) as error:
            _log.warning("the processes run on, and the request for an image has failed: %s", error)
            with contextlib.suppress(OSError):  # the requester has its answer already, or has ended
                request.reply(failure_of(error))
            return False
        event = FrozenOnRequest(
            path=location.where(manifest.name), size_bytes=manifest.size_bytes, is_running=is_running_after
        )
        if is_running_after:
            self._report(event)
        else:
            self._report_end(event)
        return not is_running_after

    def _make_image(self, request: ImageRequest, launcher: ProcessId, location: "ImageLocation") -> "ImageManifest":
        """Make the image, check it, and answer. Unless the processes run on, wait for the stop signal.

        Raises:
            SafepointError, OSError: the processes run on.
        """
        from safepoint.transparent.freeze import freeze_trees
        from safepoint.transparent.images.materialise import image_document, verify

        def answer(manifest: "ImageManifest") -> None:
            verify(location, manifest.name, deep=True)
            request.reply({**image_document(manifest, location), "safe_step": self._safe_step(manifest.created)})

        def end(manifest: "ImageManifest") -> None:
            answer(manifest)
            self._wait_for_stop()

        manifest = freeze_trees(
            self._criu,
            [launcher.pid],
            location,
            is_running_after=request.is_running_after,
            carried=carried_folders([launcher.pid]),
            before_end=end,
        ).manifest
        if request.is_running_after:
            answer(manifest)
        return manifest

    @contextlib.contextmanager
    def _holding(self, launcher: ProcessId, *, is_needed: bool) -> Generator[None]:
        """Keep signals from the launcher while the block runs. If it runs on after the block, it gets them then.

        A signal that a stopped process gets would be frozen with it.
        """
        self._held = [] if is_needed else None
        try:
            yield
        finally:
            held, self._held = self._held, None
            for number in held or ():
                launcher.send(number)

    def _wait_for_stop(self) -> None:
        """Wait for the stop signal, which ends a job that is frozen.

        Raises:
            FreezeError: there was none.
        """
        deadline_s = clock.monotonic_s() + HOLD_S
        while self._asked_s is None:
            if clock.monotonic_s() > deadline_s:
                raise FreezeError(
                    f"no stop signal arrived within {HOLD_S:g} s after the image was made",
                    hint="freeze the job once more",
                )
            clock.sleep(_POLL_S)

    def _report_end(self, event: Event) -> None:
        """Report that the processes were ended, and are in an image."""
        self._report(event)
        progress = read_progress(self._output.progress)
        if progress is not None:
            ended = dataclasses.replace(progress, state=State.INTERRUPTED, message=event.line, time=clock.utc_now())
            with contextlib.suppress(OSError):
                write_atomic(self._output.progress, ended.to_bytes(), durable=False)

    def _report(self, event: Event) -> None:
        _log.log(logging.WARNING if event.is_warning else logging.INFO, "%s", event.line)
        EventLog(self._output.events, self._settings.job_events, actor="safepoint run").write(event)
