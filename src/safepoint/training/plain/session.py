"""`safepoint.session`, for hand-written loops."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from safepoint.errors import UsageError
from safepoint.foundation.environment import Place
from safepoint.training.context.rank_context import RankContext, current_context
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.plain.state.accelerated_parts import AcceleratedParts
from safepoint.training.plain.state.parts import NamedParts, Parts
from safepoint.training.plain.training import Training

_HINT = "call run.step(loss=…) after each step of the optimizer"


class Run(Training):
    """The run that `session` returns. The loop takes its batches from this object, and reports its steps to it.

    Args:
        context: the context of this rank.
        parts: the model, the optimizer and everything else that is saved.
        data: the data of the loop, which is iterated once in each epoch.
        output_dir: see `Training`.
        save_steps: see `Training`.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        parts: Parts,
        data: Iterable[Any] | None,
        output_dir: str | Path | None,
        save_steps: int | None,
    ) -> None:
        self._tracked = TrackedData(data, context.log.info)
        super().__init__(context, parts=parts, data=self._tracked, output_dir=output_dir, save_steps=save_steps)

    @property
    def step_number(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self._loop.step

    @property
    def batches_per_step(self) -> int:
        """Batches of this rank in the last optimizer step."""
        return self._loop.batches_per_step

    @property
    def epoch(self) -> int:
        """The running epoch, from 0."""
        return self._tracked.epoch

    def epochs(self, count: int) -> Iterator[Iterator[Any]]:
        """The batches of each remaining epoch, up to `count` epochs in all, for loops with work between epochs.

        Raises:
            UsageError: the session has no data, or its data cannot be iterated `count` times; or `count` is not a
                whole number from 0; or the call is outside the session's `with` statement.
        """
        if not self._is_inside:
            raise UsageError("the session is used outside its `with` statement")
        if self._tracked.loader is None:
            raise UsageError("the session has no data to take batches from", hint="pass the data: session(data=…, …)")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:  # pyright: ignore  scripts have no types
            raise UsageError(f"epochs {count!r} must be a whole number, 0 or more")
        if count > 1 and isinstance(self._tracked.loader, Iterator):
            raise UsageError(
                f"the data is an iterator, which is empty after one epoch, and {count} epochs were requested",
                hint="give the session something that can be iterated again: a DataLoader, a list, an object with "
                "an __iter__ of its own",
            )
        self.epochs_to_do = count
        for number, batches in enumerate(self._tracked.epochs(count)):
            yield batches
            if number == 0 and self._misses_steps and self._context.place.is_first:
                self._context.log.warning(
                    "the optimizer has stepped, but run.step() was not called, so nothing is saved: %s",
                    _HINT,
                )

    def _finish(self) -> None:
        if self._misses_steps:
            raise UsageError(
                "nothing of this run was saved: the optimizer has stepped, but run.step() was not called", hint=_HINT
            )
        super()._finish()

    def batches(self, epochs: int = 1) -> Iterator[Any]:
        """The remaining batches, up to `epochs` epochs in all."""
        for batches in self.epochs(epochs):
            yield from batches


def session(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    accelerator: Any = None,
    data: Iterable[Any] | None = None,
    output_dir: str | Path | None = None,
    save_steps: int | None = None,
    **others: Any,
) -> Run:
    """Make a training survive preemption, crashes and lost nodes.

    Under `safepoint run`, its options override the arguments. Under plain `python` or `torchrun`, the SAFEPOINT_*
    variables override them.

    Args:
        model: a module on its device, with its initial weights. DistributedDataParallel may wrap the module.
        optimizer: an optimizer of the model's parameters.
        scheduler: a scheduler of the learning rate: any object with `state_dict` and `load_state_dict`, or None.
        accelerator: an `accelerate.Accelerator` that has prepared model, optimizer and scheduler. Do not pass these
            three in addition. A checkpoint contains what `accelerator.save_state` saves.
        data: a DataLoader, torchdata's StatefulDataLoader, or any object that can be iterated again in each epoch.
        output_dir: a folder or an object store for checkpoints; `--output-dir` overrides this value.
        save_steps: optimizer steps between checkpoints; `--save-steps` overrides this value. None saves only on
            request and at the end.
        others: all other parts of the state as keyword arguments, such as a gradient scaler, a second
            optimizer or an average of the weights. Each must have `state_dict` and `load_state_dict`.

    Returns:
        The run, for a `with` statement. When the statement begins, the run resumes from the newest valid checkpoint.

    Raises:
        UsageError: an argument is invalid, or its state cannot be saved; or no output folder is set; or there are
            several ranks, and torch.distributed is not initialized.
    """
    _check_types(data, output_dir, save_steps)
    current = current_context()
    current.outcome.check_not_interrupted()
    if current.place.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"this is one of {current.place.world_size} ranks, and torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group() before session()",
        )
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
    parts = _parts_of({name: part for name, part in named.items() if part is not None}, accelerator, current.place)
    return Run(current, parts=parts, data=data, output_dir=output_dir, save_steps=save_steps)


def _check_types(data: Any, output_dir: Any, save_steps: Any) -> None:
    if data is not None and not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise UsageError(f"data {data!r} cannot be iterated", hint="give a DataLoader")
    if output_dir is not None and not isinstance(output_dir, str | Path):
        raise UsageError(f"output_dir {output_dir!r} is not a path")
    if save_steps is not None and (isinstance(save_steps, bool) or not isinstance(save_steps, int)):
        raise UsageError(f"save_steps {save_steps!r} is not a whole number")


def _parts_of(named: dict[str, Any], accelerator: Any, place: Place) -> Parts:
    if accelerator is not None:
        if named:
            raise UsageError(
                f"{next(iter(named))} is given in addition to an accelerator, which saves only what it has prepared",
                hint="prepare it, or register it with accelerator.register_for_checkpointing",
            )
        return AcceleratedParts(accelerator, place)
    for name in ("model", "optimizer"):
        if name not in named:
            raise UsageError(f"there is no {name} to save", hint="give session() a model and an optimizer")
    for name, part in named.items():
        if isinstance(part, type):
            raise UsageError(f"{name} is the class {part.__name__}, not an instance of it", hint="pass an instance")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{name} cannot be saved: {type(part).__name__} has no state_dict and load_state_dict")
    return NamedParts(named, place)
