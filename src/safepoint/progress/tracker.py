"""Tracks the progress of the training in this process. The first rank also writes the progress (docs/progress.md).

The loop and the engine report to a `ProgressTracker` on every rank, so that they need not distinguish the first rank.
Only the first rank writes its record to a file. A report is cheap enough for every step.
"""

import contextlib
import math
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safepoint.estimates.pace import Pace
from safepoint.foundation import clock
from safepoint.progress.file_writer import ProgressFile
from safepoint.progress.metric_history import METRICS_NAME, MetricHistory
from safepoint.progress.record import MOST_WHOLE, Progress, SaveStatistics, State, read_progress, read_space

_LOOK_EVERY_S = 0.5
_USUAL_BYTES_PER_S = 200e6
"""The assumed speed of a disk before the first save."""
_MOST_METRICS = 256
_EVAL = ("eval_", "eval/", "val_", "val/", "test_", "test/", "validation_", "validation/")


class ProgressTracker:
    """Collects the progress of this process's training.

    Args:
        places: further files for the record, besides the file in the output folder.
        is_first: whether this rank writes the record.
        restart: see `Progress`.
        world_size: see `Progress`.
        grace_s: see `Progress`.
        space: the file in which the launcher records the free space of the folders; None if there is no such file.
    """

    def __init__(
        self,
        *,
        places: Sequence[Path] = (),
        is_first: bool,
        restart: int = 0,
        world_size: int = 1,
        grace_s: float = 30.0,
        space: Path | None = None,
    ) -> None:
        self._places = places
        self._space = space
        self._is_first = is_first
        self._common = {"restart": restart, "world_size": world_size, "grace_s": grace_s}
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._known: dict[str, Any] = {}
        self._metrics: dict[bool, dict[str, float | None]] = {True: {}, False: {}}
        self._pace = Pace()
        self._saves = SaveStatistics()
        self._snapshot_time = ""
        self._file: ProgressFile | None = None
        self._look_again_s = 0.0

    # ---- the life of a training -----------------------------------------------------------------------------------

    def begin(
        self,
        path: Path,
        *,
        location: str,
        run_id: str,
        attempt: int,
        samples_per_step: int,
        resumed_step: int | None,
        resumed_time: str | None,
        resumed_bytes: int | None,
    ) -> None:
        """Report where the ranks have decided to start.

        Args:
            path: the file of the record in the output folder. If the file already has a record of this run, and the
                run resumes, the epoch, total steps and total epochs of that record are used until the loop reports
                its own values.
            location: see `Progress`.
            run_id: see `Progress`.
            attempt: see `Progress`.
            samples_per_step: see `Progress`.
            resumed_step: the step of the checkpoint or snapshot that the run resumes from; None for step 0.
            resumed_time: when that checkpoint was made; None for step 0, and for a snapshot that is not durable.
            resumed_bytes: the size of that checkpoint or snapshot; None if it is not known.
        """
        with self._lock:
            self._state = State.STARTING
            expected_s = None if resumed_bytes is None else resumed_bytes / _USUAL_BYTES_PER_S
            self._pace, self._saves = Pace(), SaveStatistics(expected_s=expected_s)
            self._metrics = {True: {}, False: {}}
            self._known = {
                "run_id": run_id,
                "attempt": attempt,
                "samples_per_step": samples_per_step,
                "started": clock.utc_now(),
                "step": resumed_step or 0,
                "resumed_step": resumed_step,
                "safe_step": resumed_step if resumed_time else None,
                "safe_time": resumed_time,
                "output_dir": str(path.parent.parent.absolute()),
                "location": location,
                "repeated_steps": 0 if resumed_step is None else None,
            }
            before = read_progress(path) if self._is_first and resumed_step is not None else None
            if before is not None and before.run_id == run_id:
                self._known |= {"max_steps": before.max_steps, "num_epochs": before.num_epochs, "epoch": before.epoch}
                if before.repeated_steps is not None:
                    lost = max(0, before.step - self._known["step"])
                    self._known["repeated_steps"] = min(before.repeated_steps + lost, MOST_WHOLE)
        if self._is_first:
            if self._file is not None:
                self._file.close()
            paths = [*self._places, path]
            history = MetricHistory([one.with_name(METRICS_NAME) for one in paths])
            self._file = ProgressFile(paths, lambda: self._report(history))
            self._file.update()

    def loop_begins(self) -> None:
        """Report that the first step begins."""
        with self._changing():
            self._state = State.TRAINING
            self._pace.begins(clock.monotonic_s())

    @property
    def state(self) -> State:
        """What the training is doing."""
        return self._state

    def end(self, state: State, message: str = "", *, limit_s: float = 5.0) -> None:
        """Record the end of the training. Returns when the record is written, or after `limit_s` seconds."""
        with self._lock:
            self._state = state
        message = message or self.now().early_end
        with self._lock:
            self._known["message"] = message
        if self._file is not None:
            self._file.flush(limit_s)

    @contextlib.contextmanager
    def during(self, state: State) -> Generator[None]:
        """Report `state` while the `with` block runs, and the earlier state again when the block ends."""
        before = self._state
        self.change(before, state)
        try:
            yield
        finally:
            self.change(state, before)

    def change(self, before: State, state: State) -> None:
        """Report `state`, if the reported state is still `before`."""
        with self._changing():
            if self._state is before:  # a training that has ended keeps its state
                self._state = state

    # ---- a step -----------------------------------------------------------------------------------------------

    def step_ends(self) -> None:
        """Report that the optimizer has stepped."""
        self._pace.step_ends(clock.monotonic_s())

    def boundary_ends(self) -> None:
        """Report that the boundary after a step (votes, saves and evaluations before the next step) is over."""
        self._pace.boundary_ends(clock.monotonic_s())

    def reached(
        self, *, step: int, max_steps: int, epoch: float, num_epochs: float, samples_per_step: int | None = None
    ) -> None:
        """Report the position of the training; see `Progress`."""
        with self._changing():
            known = self._known
            known["step"], known["max_steps"] = step, max(0, max_steps)
            known["epoch"], known["num_epochs"] = epoch, num_epochs
            if samples_per_step is not None:
                known["samples_per_step"] = samples_per_step

    def is_due(self) -> bool:
        """Whether metrics that cost time should be read now: on the first rank, at most twice a second."""
        if not self._is_first or clock.monotonic_s() < self._look_again_s:
            return False
        self._look_again_s = clock.monotonic_s() + _LOOK_EVERY_S
        return True

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics of the program. The names of an evaluation's metrics begin with a prefix of `_EVAL`."""
        if not self._is_first:
            return
        with self._changing():
            for name, value in metrics.items():
                if not isinstance(value, int | float) or isinstance(value, bool):
                    continue
                number = float(value) if math.isfinite(value) else None
                if name == "loss":
                    self._known["loss"] = number
                    continue
                kind = self._metrics[name.startswith(_EVAL)]
                if name in kind or len(kind) < _MOST_METRICS:
                    kind[name] = number

    # ---- saves --------------------------------------------------------------------------------------------------

    def expect_save(self, size_bytes: int) -> None:
        """Report the expected size of a checkpoint; used before the first save, if `begin` gave no size."""
        with self._lock:
            if not self._saves.expected_s:
                self._saves = replace(self._saves, expected_s=size_bytes / _USUAL_BYTES_PER_S)

    def snapshot_taken(self, step: int) -> None:
        """Report that a snapshot of this step is in memory, or is being copied there."""
        with self._changing():
            self._known["snapshot_step"] = step
            self._snapshot_time = clock.utc_now()

    def became_durable(self, step: int) -> None:
        """Report that the snapshot of this step is durable. If duration and size are known, call `saved` instead."""
        with self._changing():
            time = self._snapshot_time if self._known.get("snapshot_step") == step else clock.utc_now()
            self._known |= {"safe_step": step, "safe_time": time}

    def saved(self, step: int, *, time: str, stall_s: float, durable_s: float, size_bytes: int) -> None:
        """Report that a checkpoint is durable.

        Args:
            step: the step of the checkpoint.
            time: when that step ended.
            stall_s: how long training waited for the checkpoint.
            durable_s: seconds from the end of the step until the checkpoint was durable.
            size_bytes: the size of the checkpoint's files.
        """
        with self._changing():
            self._known |= {"safe_step": step, "safe_time": time}
            before = self._saves
            self._saves = replace(
                before,
                count=before.count + 1,
                last_stall_s=stall_s,
                mean_stall_s=(before.count * (before.mean_stall_s or 0.0) + stall_s) / (before.count + 1),
                last_durable_s=durable_s,
                last_bytes=size_bytes,
                expected_s=durable_s,
                is_measured=True,
            )

    def not_saved(self) -> None:
        """Report that a save did not become a checkpoint."""
        with self._changing():
            self._saves = replace(self._saves, unsaved=self._saves.unsaved + 1)

    # ---- the record ---------------------------------------------------------------------------------------------

    def now(self) -> Progress:
        """The current record."""
        space = () if self._space is None else read_space(self._space)
        with self._lock:
            return Progress(
                time=clock.utc_now(),
                state=self._state,
                train_metrics=dict(self._metrics[False]),
                eval_metrics=dict(self._metrics[True]),
                step_s=self._pace.step_s,
                pause_s=self._pace.pause_s,
                saves=self._saves,
                space=space,
                **self._common,
                **self._known,
            )

    def _report(self, history: MetricHistory) -> bytes:
        """The record as bytes, on the writing thread; its metrics become a point of the history."""
        progress = self.now()
        history.add(progress)
        return progress.to_bytes()

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        with self._lock:
            yield
        if self._file is not None:
            self._file.update()
