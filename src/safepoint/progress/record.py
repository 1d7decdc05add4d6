"""The progress of a run: one JSON record in a file, which the first rank replaces as a whole (docs/progress.md).

The names and units of version 1 stay; later releases only add fields. Reading a record executes no code, and a file
that is not a record is refused. `tracker` measures the values; `trainer_status` and `prometheus_text` convert them.
This module does not import torch.
"""

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from safepoint.errors import ExitCode, without_credentials
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.shared_folders.opening import read_regular

VERSION = 1
PROGRESS_NAME = "progress.json"
SPACE_NAME = "space.json"
"""The file in which the launcher records the free space of the folders of its node, for the first rank."""
OUTPUT_FOLDER = "output folder"
"""The `place` of a folder that is the output location. If checkpoints are uploaded from a folder, its `place`
differs."""
_MAX_BYTES = 1 << 20
MOST_WHOLE = (1 << 63) - 1
_Kind = TypeVar("_Kind")


class State(enum.StrEnum):
    """What the training is doing; in the last three states it has ended."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        """Whether the training has ended; another start may continue it."""
        return self in {State.INTERRUPTED, State.FINISHED, State.FAILED}


def state_after(exit_code: int) -> State:
    """The state of a training whose program exited with this code (docs/exit-codes.md)."""
    if exit_code == ExitCode.OK:
        return State.FINISHED
    is_stopped = exit_code in {ExitCode.INTERRUPTED_SAVED, ExitCode.TERMINATED_UNSAVED, ExitCode.SIGINT}
    return State.INTERRUPTED if is_stopped else State.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatistics:
    """The saves of this start of the ranks.

    Args:
        count: checkpoints that became durable.
        unsaved: saves that failed, or that a newer save superseded before they were durable.
        last_stall_s: how long training waited for the last checkpoint; None before the first checkpoint.
        mean_stall_s: how long training waited for a checkpoint on average.
        last_durable_s: seconds from the end of the last checkpoint's step until the checkpoint was durable.
        last_bytes: the size of the last checkpoint.
        expected_s: seconds that the next save is expected to take: the time of the last save. Before the first save,
            it is an estimate from the size of the state and a typical speed, and None if this size is not known.
        is_measured: whether `expected_s` comes from a save of this start.
    """

    count: int = 0
    unsaved: int = 0
    last_stall_s: float | None = None
    mean_stall_s: float | None = None
    last_durable_s: float | None = None
    last_bytes: int | None = None
    expected_s: float | None = None
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRecord:
    """The free space of one folder that the launcher of the first rank watches.

    Args:
        place: `OUTPUT_FOLDER`, `local folder` or `temporary folder`.
        path: the path of the folder.
        limit: what limits the free space: `disk`, `inodes`, `eviction` or `size_limit`.
        free_bytes: how much may still be written.
        needed_bytes: how much has to be free for the next save.
        free_inodes: how many files and folders may still be created; None if there is no limit.
        needed_inodes: how many inodes have to be free for the next save.
        saves_left: how many saves still fit; None if the number is unlimited or not known.
        remaining_s: seconds until a save does not fit; None if all saves fit, or if the time is not known.
        num_deletable: how many checkpoints may be deleted when a save does not fit.
        is_low: whether the launcher has warned that the folder is nearly full.
        size_bytes: how much could be written if nothing were stored there; None if it is not known.
    """

    place: str
    path: str = ""
    limit: str = "disk"
    free_bytes: int = 0
    needed_bytes: int = 0
    free_inodes: int | None = None
    needed_inodes: int = 0
    saves_left: int | None = None
    remaining_s: float | None = None
    num_deletable: int = 0
    is_low: bool = False
    size_bytes: int | None = None

    def to_document(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {name: _rounded(getattr(self, name)) for name in _SPACE_FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run. Times are RFC 3339 UTC.

    Args:
        time: when this was written.
        state: what the training is doing.
        step: optimizer steps done, over all attempts.
        max_steps: optimizer steps in all; 0 when unknown.
        epoch: epochs done, including the fraction of the current epoch.
        num_epochs: epochs in all; 0 when unknown.
        loss: the last reported loss; None before the first report, and for a value that is not finite.
        train_metrics: other metrics of the training, by name; None for a value that is not finite.
        eval_metrics: metrics of evaluations, by name; None for a value that is not finite.
        step_s: seconds of a step in this attempt; None before two steps were measured.
        pause_s: seconds that evaluations and saves add to each step.
        samples_per_step: samples that all ranks together process in a step; 0 when unknown.
        world_size: the number of ranks.
        run_id: the run, the same over all attempts.
        attempt: which start of the run this is, from 1.
        restart: how often the ranks of this attempt were restarted.
        started: when this start of the ranks began.
        resumed_step: the step at which this start began; None for step 0.
        output_dir: the folder of the checkpoints on the first node, absolute.
        location: the location in an object store that the checkpoints are published to; empty if there is none.
        safe_step: the step of the newest durable checkpoint; None when there is none.
        safe_time: when training reached `safe_step`.
        snapshot_step: the step of the newest snapshot in memory; None when there is none.
        saves: see `SaveStatistics`.
        space: the folders that the launcher of the first rank watches.
        grace_s: seconds that the platform grants between SIGTERM and SIGKILL.
        repeated_steps: how many steps were done again, because an interruption had lost them; None when unknown.
        message: one sentence: why the training ended or the ranks were restarted; empty if neither has happened.
    """

    time: str
    state: State
    step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_epochs: float = 0.0
    loss: float | None = None
    train_metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    eval_metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    step_s: float | None = None
    pause_s: float = 0.0
    samples_per_step: int = 0
    world_size: int = 1
    run_id: str = ""
    attempt: int = 0
    restart: int = 0
    started: str = ""
    resumed_step: int | None = None
    output_dir: str = ""
    location: str = ""
    safe_step: int | None = None
    safe_time: str | None = None
    snapshot_step: int | None = None
    saves: SaveStatistics = field(default_factory=SaveStatistics)
    space: tuple[SpaceRecord, ...] = ()
    grace_s: float = 30.0
    repeated_steps: int | None = None
    message: str = ""

    @property
    def percent(self) -> float | None:
        """The part of the training that is done, from 0 to 100, rounded down to a tenth; None when unknown.

        It is 100 only for a training that has finished and did not stop early.
        """
        if self.state is State.FINISHED and not self.early_end:
            return 100.0
        if self.max_steps <= 0:
            return None if self.step else 0.0
        return min(99.9, math.floor(1000 * max(0, self.step) / self.max_steps) / 10)

    @property
    def early_end(self) -> str:
        """A sentence with the step at which training stopped early; empty if it did not."""
        has_done_all = not 0 < self.step < self.max_steps or 0 < self.num_epochs <= self.epoch
        if self.state is not State.FINISHED or has_done_all:
            return ""
        return f"training stopped early, at step {self.step} of {self.max_steps}"

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training that are left, at the pace of this attempt; None when unknown."""
        if self.state is State.FINISHED:
            return 0.0
        return None if self.max_steps <= 0 else self.time_of(self.max_steps - self.step)

    def time_of(self, num_steps: int) -> float | None:
        """Seconds that `num_steps` steps take, at the pace of this attempt; None if unknown, 0 if `num_steps` < 0."""
        if self.step_s is None:
            return None
        return _finite(max(0, num_steps) * (self.step_s + self.pause_s))

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps in a second, without evaluations and saves; None before two steps were measured."""
        return _finite(1 / self.step_s) if self.step_s else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks in a second, without evaluations and saves; None when unknown."""
        speed = self.steps_per_s
        return None if speed is None or not self.samples_per_step else _finite(speed * self.samples_per_step)

    @property
    def save_needed_s(self) -> float | None:
        """About how long a save on demand takes, in seconds; None when unknown.

        This is the time of the save plus the time of a whole step, because a step may just have begun.
        """
        expected_s = self.saves.expected_s
        return None if expected_s is None else _finite((self.step_s or 0.0) + expected_s)

    def to_document(self) -> dict[str, Any]:
        """The record as a JSON object."""
        record: dict[str, Any] = {
            "version": VERSION,
            **{name: getattr(self, name) for name in _FIELDS},
            "saves": {name: _rounded(getattr(self.saves, name)) for name in _SAVE_FIELDS},
            "space": [one.to_document() for one in self.space],
            "percent": self.percent,
            "remaining_s": _rounded(self.remaining_s),
            "steps_per_s": _rounded(self.steps_per_s),
            "samples_per_s": _rounded(self.samples_per_s),
            "save_needed_s": _rounded(self.save_needed_s),
        }
        for name in ("step_s", "pause_s"):
            record[name] = _rounded(record[name])
        return record

    def to_bytes(self) -> bytes:
        """The JSON record."""
        return (without_credentials(json.dumps(self.to_document(), allow_nan=False)) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Progress":
        """Read a record of this or another release: unknown fields are ignored, missing fields have their defaults.

        Raises:
            ValueError: `data` is not a record.
        """
        record = parse_object(data, max_bytes=_MAX_BYTES, constant=lambda _: None)
        of_saves = cast("dict[str, Any]", _of(dict, record.get("saves", {})))
        saves = SaveStatistics(**_read(of_saves, _SAVE_FIELDS))
        known: dict[str, Any] = {"time": "", "state": State.TRAINING, **_read(record, _FIELDS)}
        return cls(**known, saves=saves, space=_space(record.get("space", [])))


def read_progress(path: Path) -> Progress | None:
    """The record at `path`; None when it does not exist or is invalid."""
    try:
        return Progress.from_bytes(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError):
        return None


def read_space(path: Path) -> tuple[SpaceRecord, ...]:
    """The list of records of folders in the file `path`; empty if the file does not exist or is invalid."""
    try:
        return _space(parse_object(read_regular(path, _MAX_BYTES)).get("space"))
    except (OSError, ValueError):
        return ()


# To list a thousand jobs, a thousand records with thirty fields each are read. So these functions must be fast.


def _of(kind: type[_Kind], value: Any) -> _Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not a {kind.__name__}")  # noqa: TRY004  the data is invalid, not the call
    return value


_text, _truth = partial(_of, str), partial(_of, bool)


def _moment(value: Any) -> str:
    clock.parse_utc(_text(value))
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_WHOLE:
        raise ValueError(f"{value!r} is not a count")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


_STATES = frozenset(State)


def _state(value: Any) -> State:
    return State(value) if value in _STATES else State.TRAINING  # a later release may have other states


def _metrics(value: Any) -> dict[str, float | None]:
    return {
        name: None if number is None else _number(number)
        for name, number in cast("dict[str, Any]", _of(dict, value)).items()
    }


def _read(record: Mapping[str, Any], parsers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    name = ""
    try:
        for name, parse in parsers.items():
            if name in record:
                value = record[name]
                values[name] = None if value is None and name in _OPTIONAL else parse(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error
    return values


def _space(value: Any) -> tuple[SpaceRecord, ...]:
    found: list[SpaceRecord] = []
    for one in cast("list[Any]", _of(list, value)):
        known: dict[str, Any] = {"place": "", **_read(cast("dict[str, Any]", _of(dict, one)), _SPACE_FIELDS)}
        found.append(SpaceRecord(**known))
    return tuple(found)


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "time": _text,
    "state": _state,
    "step": _count,
    "max_steps": _count,
    "epoch": _number,
    "num_epochs": _number,
    "loss": _number,
    "train_metrics": _metrics,
    "eval_metrics": _metrics,
    "step_s": _number,
    "pause_s": _number,
    "samples_per_step": _count,
    "world_size": _count,
    "run_id": _text,
    "attempt": _count,
    "restart": _count,
    "started": _text,
    "resumed_step": _count,
    "output_dir": _text,
    "location": _text,
    "safe_step": _count,
    "safe_time": _moment,
    "snapshot_step": _count,
    "grace_s": _number,
    "repeated_steps": _count,
    "message": _text,
}
_SAVE_FIELDS: dict[str, Callable[[Any], Any]] = {
    "count": _count,
    "unsaved": _count,
    "last_stall_s": _number,
    "mean_stall_s": _number,
    "last_durable_s": _number,
    "last_bytes": _count,
    "expected_s": _number,
    "is_measured": _truth,
}


_SPACE_FIELDS: dict[str, Callable[[Any], Any]] = {
    "place": _text,
    "path": _text,
    "limit": _text,
    "free_bytes": _count,
    "needed_bytes": _count,
    "free_inodes": _count,
    "needed_inodes": _count,
    "saves_left": _count,
    "remaining_s": _number,
    "num_deletable": _count,
    "is_low": _truth,
    "size_bytes": _count,
}


_OPTIONAL = {
    one.name for kind in (Progress, SaveStatistics, SpaceRecord) for one in fields(kind) if one.default is None
}
"""The fields that may be None."""


def _rounded(value: Any) -> Any:
    """A float with six significant digits, or None if the float is too large. Other values are returned unchanged."""
    return _finite(float(f"{value:.6g}")) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    """`value`; None if it is not finite. A record may state a step of 1e308 seconds."""
    return value if math.isfinite(value) else None
