"""A script's own `_save_checkpoint`: the folder that it writes to, however it finds it.

A subclass adds files after the Trainer's own, either to `self._get_output_dir(…)/checkpoint-N`, which is led to where
the checkpoint is being made, or to `self.args.output_dir/checkpoint-N`. The second is led there too, but only while
the subclass is at work: what transformers and TRL save names the output folder. Anything else that the subclass
writes into the output folder ends up there.
"""

import contextlib
import functools
import importlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.format.catalog import step_of

_LIBRARIES = {"transformers", "trl"}
_SAVE = "_save_checkpoint"


@contextlib.contextmanager
def led_by_arguments(trainer: Any, root: Path) -> Generator[None]:
    """For the time of a save, `args.output_dir` is `root` for a subclass of the script's own.

    Args:
        trainer: about to save.
        root: where the folder `checkpoint-N` is being made.
    """
    library = _class_below_own(trainer)
    if library is None:
        yield
        return
    args, output = trainer.args, trainer.args.output_dir
    original = getattr(library, _SAVE)

    @functools.wraps(original)
    def save(self: Any, *arguments: Any, **named: Any) -> Any:
        led, self.args.output_dir = self.args.output_dir, output if self is trainer else self.args.output_dir
        try:
            return original(self, *arguments, **named)
        finally:
            self.args.output_dir = led

    before = set(root.iterdir())
    args.output_dir = str(root)
    setattr(library, _SAVE, save)
    try:
        yield
    finally:
        setattr(library, _SAVE, original)
        args.output_dir = output
        for path in set(root.iterdir()) - before:
            if step_of(path) is None:
                shutil.move(path, Path(output, path.name))


def saves_in_its_own_way(trainer: Any) -> bool:
    """Whether a subclass decides how a model is saved."""
    base: Any = importlib.import_module("transformers").Trainer
    kind = cast("Any", type(trainer))
    return kind.save_model is not base.save_model or kind._save is not base._save


def _class_below_own(trainer: Any) -> Any:
    """The library's class whose save a subclass of the script's own extends; None when there is no such subclass."""
    has_own = False
    for base in cast("tuple[Any, ...]", type(trainer).__mro__):
        if _SAVE in vars(base):
            if base.__module__.partition(".")[0] in _LIBRARIES:
                return base if has_own else None
            has_own = True
    return None
