"""What happened, as typed records in one stream: for people on the console, for programs as JSON lines.

Promises: one line per event, RFC 3339 UTC times, fields only ever added. Writing an event never stops the
training: a full disk loses the event, not the run.
Not here: figures that change every step (see `holdfast.training.progress`).
"""

import contextlib
import dataclasses
import json
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from holdfast.foundation import clock
from holdfast.foundation.units import format_bytes, format_duration, plural, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(ABC):
    """Base of every event; the class name in snake case is the event's name in JSON."""

    is_warning: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """`AttemptStarted` → `attempt_started`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def line(self) -> str:
        """One line for a person."""
        return self._sentence()

    @abstractmethod
    def _sentence(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """One rank of an attempt; part of `AttemptStarted`."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(Event):
    """The ranks have found each other and begin to train."""

    attempt: int
    run_id: str
    world_size: int
    global_batch: int
    ranks: tuple[RankStarted, ...]

    def _sentence(self) -> str:
        pids = ", ".join(str(rank.pid) for rank in self.ranks[:8])
        return (
            f"training on {plural(self.world_size, 'rank')} (pid {pids}), "
            f"{self.global_batch} samples per step, run {self.run_id[:8]}, attempt {self.attempt}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected(Event):
    """A checkpoint was found damaged and is passed over."""

    is_warning: ClassVar[bool] = True
    path: str
    file: str
    reason: str

    def _sentence(self) -> str:
        return f"{self.path} is not used: {printable(self.file)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The run goes on from a verified checkpoint."""

    step: int
    path: str
    num_files: int
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return (
            f"resuming from step {self.step}: {self.path}, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)} verified in {format_duration(self.duration_s)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedFromMemory(Event):
    """Ranks that were started anew go on from the snapshot that the last ones have left in memory."""

    step: int
    num_files: int
    size_bytes: int

    def _sentence(self) -> str:
        return (
            f"resuming from step {self.step}: the snapshot in memory, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Event):
    """Checkpoints that this run does not continue were moved out of its way."""

    num_checkpoints: int
    path: str

    def _sentence(self) -> str:
        return f"{plural(self.num_checkpoints, 'checkpoint')} moved to {self.path}; nothing is deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKept(Event):
    """Another number of ranks: gradient accumulation was adapted so that a step sees the same samples."""

    world_size_before: int
    world_size: int
    accumulation_before: int
    accumulation: int
    global_batch: int

    def _sentence(self) -> str:
        return (
            f"{self.world_size_before} → {plural(self.world_size, 'rank')}: gradient accumulation "
            f"{self.accumulation_before} → {self.accumulation} keeps {self.global_batch} samples per step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """All ranks agreed to stop here because at least one was told to."""

    signal: str
    rank: int
    step: int

    def _sentence(self) -> str:
        return f"{self.signal} on rank {self.rank}: all ranks stop at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGivenUp(Event):
    """The rest of the running step would have missed the deadline; the step before it is saved instead."""

    step: int
    micro_batches_left: int
    needed_s: float
    available_s: float

    def _sentence(self) -> str:
        return (
            f"step {self.step} given up with {plural(self.micro_batches_left, 'micro-batch')} to go: it needs about "
            f"{format_duration(self.needed_s)}, {format_duration(max(self.available_s, 0))} are left"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A checkpoint is committed: complete, durable, named in its manifest."""

    step: int
    trigger: str
    path: str
    num_files: int
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return (
            f"saved step {self.step} ({self.trigger}): {self.path}, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)} in {format_duration(self.duration_s)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSuperseded(Event):
    """A snapshot waited for the disk, and a newer one took its place."""

    is_warning: ClassVar[bool] = True
    step: int
    trigger: str
    by: int

    def _sentence(self) -> str:
        return f"step {self.step} ({self.trigger}) was not written: step {self.by} came before its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save did not become a checkpoint; what was written of it is gone."""

    is_warning: ClassVar[bool] = True
    step: int
    trigger: str
    reason: str
    consequence: str

    def _sentence(self) -> str:
        return f"step {self.step} ({self.trigger}) could not be saved: {self.reason}; {self.consequence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resealed(Event):
    """A callback added files to a committed checkpoint; its manifest was written anew to name them."""

    step: int
    files: tuple[str, ...]

    def _sentence(self) -> str:
        return f"checkpoint of step {self.step} now also names {', '.join(self.files)}, added by a callback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Event):
    """Retention removed a checkpoint."""

    step: int
    path: str

    def _sentence(self) -> str:
        return f"pruned {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Event):
    """A rank failed, and the ranks were started anew."""

    is_warning: ClassVar[bool] = True
    restart: int
    max_restarts: int
    reason: str

    def _sentence(self) -> str:
        return f"{self.reason}; starting the ranks anew ({self.restart} of {plural(self.max_restarts, 'restart')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAbandoned(Event):
    """A step would not have ended before the deadline: the newest snapshot in memory was committed in its place."""

    is_warning: ClassVar[bool] = True
    step: int
    snapshot_step: int | None
    reason: str

    def _sentence(self) -> str:
        instead = "no snapshot was there" if self.snapshot_step is None else f"step {self.snapshot_step} is committed"
        return f"step {self.step} is given up: {self.reason}; {instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Event):
    """The run left after a stop, with or without a checkpoint of the last step."""

    step: int
    saved: bool
    reason: str

    def _sentence(self) -> str:
        if self.saved:
            return f"interrupted, state of step {self.step} is saved; run the same command again to go on"
        return f"interrupted at step {self.step}, not saved: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """Training came to its own end."""

    step: int

    def _sentence(self) -> str:
        return f"training finished at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded(Event):
    """A checkpoint is committed in the object store too."""

    step: int
    location: str
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        rate = format_bytes(round(self.size_bytes / max(self.duration_s, 1e-3)))
        duration = format_duration(self.duration_s)
        return f"uploaded {self.location}, {format_bytes(self.size_bytes)} in {duration}, {rate}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed(Event):
    """A checkpoint did not arrive in the object store; it is tried again while the run lasts."""

    is_warning: ClassVar[bool] = True
    step: int
    name_in_store: str
    reason: str

    def _sentence(self) -> str:
        where = "" if self.name_in_store == "final" else "it stands locally and "
        return f"{self.name_in_store} is not uploaded yet: {self.reason}; {where}is tried again"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSuperseded(Event):
    """A checkpoint is not uploaded, because a newer one took its turn."""

    step: int

    def _sentence(self) -> str:
        return f"step {self.step} is not uploaded: a newer checkpoint took its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadUnfinished(Event):
    """The run ends, and the object store does not have its newest checkpoint."""

    is_warning: ClassVar[bool] = True
    location: str
    folder: str

    def _sentence(self) -> str:
        return (
            f"the newest checkpoint did not arrive in {self.location} in time; it stands in {self.folder}, and the "
            "same command on this machine goes on from it and uploads it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalMissing(Event):
    """The finished model is not in the object store; a checkpoint has the same weights."""

    is_warning: ClassVar[bool] = True
    step: int
    location: str
    reason: str
    checkpoint: str | None

    def _sentence(self) -> str:
        again = "run the same command again"
        if self.checkpoint is not None:
            again = f"`holdfast checkpoints export {self.checkpoint} {self.location}` makes it, or {again}"
        return f"the final model is not in {self.location}: {self.reason}; step {self.step} is saved: {again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(Event):
    """A checkpoint was brought from the object store."""

    step: int
    location: str
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        rate = format_bytes(round(self.size_bytes / max(self.duration_s, 1e-3)))
        duration = format_duration(self.duration_s)
        return f"fetched {self.location}, {format_bytes(self.size_bytes)} in {duration}, {rate}/s"


class EventLog:
    """Appends events as JSON lines to a file; several processes may append to the same one.

    Args:
        path: the file, or None to drop the events.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Append one line; a line is one write, so that lines of several writers do not mix."""
        if self._path is None:
            return
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        record = {"time": clock.utc_now(), "event": event.name, **fields}
        line = json.dumps(record, default=dataclasses.asdict) + "\n"
        # The stream reports; it must not be the reason that a run ends.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


__all__ = [
    "AttemptStarted",
    "BatchKept",
    "CheckpointRejected",
    "Event",
    "EventLog",
    "Fetched",
    "FinalMissing",
    "Finished",
    "Interrupted",
    "Pruned",
    "RankStarted",
    "Resealed",
    "Resumed",
    "ResumedFromMemory",
    "SaveFailed",
    "SaveSuperseded",
    "Saved",
    "SetAside",
    "StepAbandoned",
    "StepGivenUp",
    "StopRequested",
    "UploadFailed",
    "UploadSuperseded",
    "UploadUnfinished",
    "Uploaded",
]
