"""Checks the counts of Lightning's loops: their types, and whether they contradict the manifest.

Lightning ends a training when these counts reach the limits of the script. If the counts in a checkpoint are of a
later step or epoch than its manifest states, the training would end at once or early, with exit code 0, as if it were
complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.foundation.field_types import MOST_COUNT
from safepoint.training.plain.data.position import Position

_COUNTS = {"total", "current", "_batches_that_stepped"}
"""The names of the entries in the state of a loop that are counts, or contain counts."""
_EVENTS = {"ready", "started", "processed", "completed"}
"""What happens to a batch, an epoch or an optimizer step. A loop counts how often each of these events happened."""
_FLAG = "is_last_batch"


def check_counts(state: Any, *, are_counts: bool = False) -> None:
    """Check the types of the counts in the state of Lightning's loops.

    Args:
        state: the state of the loops, or a part of this state.
        are_counts: whether all values in `state` are counts.

    Raises:
        ValueError: a count has an unknown name, is not a whole number, is negative or is too large; or the flag
            `is_last_batch` is not a bool.
    """
    if isinstance(state, dict):
        for name, value in cast("dict[Any, Any]", state).items():
            # Lightning sets an attribute for each entry. An entry with an unknown name could replace a method.
            if are_counts and name not in _EVENTS:
                raise ValueError(f"a loop has an unknown count {name!r:.80}")
            if name == _FLAG and type(value) is not bool:
                raise ValueError(f"{_FLAG!r} of a loop is {value!r:.80}")
            check_counts(value, are_counts=are_counts or name in _COUNTS)
    elif are_counts and (type(state) is not int or not 0 <= state <= MOST_COUNT):
        raise ValueError(f"a count of a loop is {state!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far the loops of a Trainer have come.

    Args:
        epochs: the number of complete epochs.
        automatic_steps: the number of optimizer steps that Lightning has made by itself (automatic optimization).
        manual_steps: the number of optimizer steps that the script has made (manual optimization).
        batches: for each event, the number of batches in the current epoch. When an epoch has ended, the numbers are
            those of this epoch until the next epoch begins.
        all_batches: for each event, the number of batches in all epochs together.
        batches_that_stepped: the number of batches with an optimizer step. Loggers use this number as their step.
        is_last_batch: whether the newest batch was the last batch of its epoch.
    """

    epochs: int
    automatic_steps: int
    manual_steps: int
    batches: Mapping[str, int]
    all_batches: Mapping[str, int]
    batches_that_stepped: int
    is_last_batch: bool

    @property
    def most_steps(self) -> int:
        """The larger of the two numbers of optimizer steps. A Trainer makes only one kind of steps."""
        return max(self.automatic_steps, self.manual_steps)


def reached(fit_loop: Any) -> Reached:
    """Read how far the loops of a Trainer have come.

    Args:
        fit_loop: the state of Lightning's `fit_loop`. `check_counts` has accepted its counts.

    Raises:
        ValueError: a count is missing, or the counts of epochs contradict each other.
    """
    epochs, batches = _part(fit_loop, "epoch_progress"), _part(fit_loop, "epoch_loop.batch_progress")
    automatic = _part(fit_loop, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total")
    manual = _part(fit_loop, "epoch_loop.manual_optimization.optim_step_progress", "total")
    for one in (_part(epochs, "total"), _part(epochs, "current")):
        if one.get("processed") != one.get("completed") or one.get("ready", 0) < one.get("completed", 0):
            raise ValueError("its counts of epochs contradict each other")
    try:
        return Reached(
            epochs=epochs["current"]["processed"],
            automatic_steps=automatic["completed"],
            manual_steps=manual["completed"],
            batches={name: batches["current"][name] for name in sorted(_EVENTS)},
            all_batches={name: batches["total"][name] for name in sorted(_EVENTS)},
            batches_that_stepped=_part(fit_loop, "epoch_loop.state_dict")["_batches_that_stepped"],
            is_last_batch=batches[_FLAG],
        )
    except KeyError as error:
        raise ValueError(f"its loops have no count {error}") from error


def contradiction_of(
    found: Reached, manifest: Manifest, position: Position, *, is_automatic: bool, accumulation: int
) -> str:
    """How the counts of a Trainer contradict the manifest of the same checkpoint; empty if they do not contradict it.

    Args:
        found: the counts.
        manifest: the manifest of the checkpoint.
        position: the position in the data, from the same checkpoint.
        is_automatic: whether Lightning makes the optimizer steps, and not the script.
        accumulation: the number of batches for each optimizer step; the smallest one if it changes in the training.
    """
    if found.epochs != position.epoch or not position.epoch <= manifest.epoch <= position.epoch + 1:
        return f"its loops have done {found.epochs} epochs, and the manifest says epoch {manifest.epoch:g}"
    steps = found.automatic_steps if is_automatic else found.manual_steps
    # With manual optimization, a script may make several steps for one batch. So there is no limit.
    most = _most_steps(manifest, position, accumulation) if is_automatic else MOST_COUNT
    if not manifest.step <= steps <= most:
        return f"its loops have done {steps} optimizer steps, and the manifest says step {manifest.step}"
    stepped = found.batches_that_stepped
    if stepped < manifest.step or (is_automatic and stepped > steps + 1):
        return f"its loops have counted {stepped} batches with a step, and the manifest says step {manifest.step}"
    return _contradiction_of_batches(found, position.batches)


def _contradiction_of_batches(found: Reached, batches: int) -> str:
    """How the counts of batches contradict the position in the data, or each other; empty if they do not.

    Args:
        found: the counts.
        batches: batches of the running epoch at this position; 0 if no epoch is running.
    """
    if batches and set(found.batches.values()) != {batches}:
        *counts, last = (f"{number} {name}" for name, number in found.batches.items())
        return (
            f"its loops have counted {', '.join(counts)} and {last} batches in the epoch, and its position in the "
            f"data is after batch {batches}"
        )
    if batches and found.is_last_batch:
        return (
            f"its loops say that batch {batches} is the last batch of its epoch, and its position in the data is "
            "within the epoch"
        )
    in_all = found.all_batches
    is_alike = in_all["started"] == in_all["processed"] == in_all["completed"] <= in_all["ready"]
    if not is_alike or in_all["completed"] < found.batches["completed"]:
        return "its counts of batches contradict each other"
    return ""


def _most_steps(manifest: Manifest, position: Position, accumulation: int) -> int:
    """The largest number of optimizer steps that the loops of a checkpoint can have counted.

    Usually, this number is the step in the manifest. But if a run started from a checkpoint that Lightning wrote, its
    loops have also counted the steps before that checkpoint, and the step in the manifest is smaller. The number of
    samples in the manifest includes the samples of those steps, so it shows how many batches all epochs had together.
    In each epoch, the loops can have counted at most the number of batches divided by `accumulation`, rounded up:
    Lightning also makes a step if fewer batches remain at the end of an epoch.
    """
    in_batch = max(1, manifest.global_batch // manifest.gradient_accumulation)
    in_epoch = (manifest.samples_seen // in_batch - position.batches) // max(1, position.epoch)
    parts = (position.epoch * -(-in_epoch // accumulation), -(-position.batches // accumulation))
    return max(manifest.step, sum(parts))


def _part(state: Any, *names: str) -> dict[str, Any]:
    for name in names:
        state = cast("dict[str, Any]", state).get(name) if isinstance(state, dict) else None
    if not isinstance(state, dict):
        raise ValueError(f"its loops have no counts {'.'.join(names)!r}")  # noqa: TRY004  the caller expects it
    return cast("dict[str, Any]", state)
