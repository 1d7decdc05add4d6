"""`safepoint.epochs`, which replaces `range` in the loop over epochs of a script that uses Accelerate.

The loop iterates over its own DataLoader. This module replaces the loader's `__iter__`. In each epoch, the first pass
over the loader returns the batches of a session (`safepoint.session`). After a resume, the session leaves out the
batches that were trained on before.

When the loop requests its next batch after an optimizer has stepped, the step is reported to the session. By then the
loop has also stepped its scheduler.
"""

import dis
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import UsageError
from safepoint.training.context.rank_context import current_context
from safepoint.training.plain.session import Run, session

_DROPS = {"POP_TOP", "POP_ITER"}
"""The instructions that drop an iterator. They cannot raise an error."""
_HINT = "give the loader that the loop iterates over: safepoint.epochs(count, accelerator, data=loader)"


def epochs(
    count: int,
    accelerator: Any,
    *,
    data: Any = None,
    output_dir: str | Path | None = None,
    save_steps: int | None = None,
) -> Iterator[int]:
    """The numbers of the epochs that are left: `for epoch in safepoint.epochs(3, accelerator):`.

    The loop stays as it is: it iterates over its DataLoader, steps its optimizer, and may evaluate at the end of an
    epoch. A checkpoint holds what `accelerator.save_state` saves, and the position in the data. Variables of the
    loop, such as a sum of losses or the number that `enumerate` counts, are not restored.

    Args:
        count: the number of epochs in all.
        accelerator: an `accelerate.Accelerator` that has prepared model, optimizer, scheduler and data.
        data: the DataLoader that the loop trains on; None takes the first DataLoader that the accelerator has
            prepared.
        output_dir: see `session`.
        save_steps: see `session`.

    Raises:
        UsageError: the accelerator has prepared no DataLoader, or the loop trains on another DataLoader.
    """
    loaders: list[Any] = list(accelerator._dataloaders)
    loader = data if data is not None else next(iter(loaders), None)
    if loader is None:
        raise UsageError("the accelerator has prepared no DataLoader", hint=_HINT)
    run = session(accelerator=accelerator, data=loader, output_dir=output_dir, save_steps=save_steps)
    return _epochs(run, count, accelerator, loader)


def _epochs(run: Run, count: int, accelerator: Any, loader: Any) -> Iterator[int]:
    loop = _Loop(run, accelerator)
    hook = register_optimizer_step_post_hook(loop.optimizer_stepped)
    passes = temporarily(type(loader), __iter__=loop.passes_over(loader))  # Python looks for this method in the class
    try:
        with temporarily(accelerator, backward=loop.with_loss(accelerator.backward)), passes, run:
            for batches in run.epochs(count):
                loop.pending = batches
                try:
                    yield run.epoch
                except GeneratorExit:
                    # After an error, report no step: the report may begin a save, and the other ranks may not take
                    # part in this save.
                    if not _is_left_on_purpose():
                        raise
                    loop.report()
                    return
                loop.pending = None
                loop.report()
    finally:
        hook.remove()


def _is_left_on_purpose() -> bool:
    """Whether `break` or `return` has ended the loop over the calling generator.

    Python closes the generator after `break` and `return`, and also when an error ends the loop. Only after `break`
    and `return`, the current instruction of the function with the loop drops an iterator.
    """
    frame = inspect.currentframe()
    generator = frame.f_back if frame is not None else None
    caller = generator.f_back if generator is not None else None
    return caller is not None and dis.opname[caller.f_code.co_code[caller.f_lasti]] in _DROPS


class _Loop:
    """What the loop does in one epoch.

    Args:
        run: the session.
        accelerator: the loop's `accelerate.Accelerator`.
    """

    def __init__(self, run: Run, accelerator: Any) -> None:
        self.pending: Iterator[Any] | None = None
        """The batches of the epoch; None as soon as the loop iterates over its loader."""
        self._run = run
        self._accelerator = accelerator
        self._optimizers = {id(getattr(one, "optimizer", one)) for one in accelerator._optimizers}
        self._has_stepped = False
        self._loss: Any = None
        self._has_warned = False

    def with_loss(self, backward: Any) -> Any:
        """Return a function that calls the accelerator's `backward`, and keeps the loss for the progress report."""

        def remember(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._loss = loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
            return backward(loss, *args, **kwargs)

        return remember

    def passes_over(self, loader: Any) -> Any:
        """Return the function that replaces `__iter__` in the loader's class.

        In each epoch, its first call for `loader` returns the session's batches.
        """
        original: Any = cast("Any", type(loader)).__iter__

        def iterate(this: Any) -> Iterator[Any]:
            if this is not loader or self.pending is None:
                return original(this)
            batches, self.pending = self.pending, None
            return self._reported(batches)

        return iterate

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after each step of any optimizer of the process."""
        if id(optimizer) not in self._optimizers:
            return
        if self.pending is not None:
            raise UsageError(
                "the optimizer has stepped, but the loop has not iterated over the DataLoader of safepoint.epochs; "
                "the run was stopped, because no resume could continue it",
                hint=_HINT,
            )
        self._has_stepped = True

    def _reported(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch. When the loop requests the next batch, the step before is reported."""
        for batch in batches:
            yield batch
            self.report()

    def report(self) -> None:
        """Report a step, if the optimizer has stepped since the last report."""
        if self._has_stepped:
            self._has_stepped = False
            self._run.step(loss=self._loss)
            self._warn_of_counting()

    def _warn_of_counting(self) -> None:
        if self._has_warned or self._run.batches_per_step <= self._accelerator.gradient_accumulation_steps:
            return
        self._has_warned = True
        context = current_context()
        if context.place.is_first:
            context.log.warning(
                "the loop accumulates gradients over %d batches by itself. If it counts the batches with "
                "`enumerate`, it counts from 0 after a resume within an epoch, and then accumulates different "
                "batches; use `accelerator.accumulate`",
                self._run.batches_per_step,
            )
