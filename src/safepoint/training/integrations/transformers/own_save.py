"""Redirects the files that a script's own `_save_checkpoint` writes.

A subclass may add files to a checkpoint. Safepoint first writes each checkpoint in a working folder, so the files
must be written there. The subclass's code names the checkpoint's folder in one of two ways:

- `self._get_output_dir(…)/checkpoint-N`. This is the working folder already.
- `self.args.output_dir/checkpoint-N`. This is another folder. So this module changes `args.output_dir` to the parent
  of the working folder while the subclass's code runs.

The code of transformers and TRL must read the real output folder, because it stores `args.output_dir` in the files
that it saves. Other files that the subclass writes to `args.output_dir` are moved to the real output folder after the
save.
"""

import contextlib
import functools
import importlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.pickles.temporary_attributes import temporarily

_LIBRARIES = {"transformers", "trl"}
_SAVE = "_save_checkpoint"


@contextlib.contextmanager
def redirected_output_dir(trainer: Any, root: Path) -> Generator[None]:
    """While the block runs, `args.output_dir` is `root` in the code of the script's own subclass.

    Args:
        trainer: the trainer that is about to save.
        root: the folder in which `checkpoint-N` is written.
    """
    library = _extended_library_class(trainer)
    if library is None:
        yield
        return
    args, output = trainer.args, trainer.args.output_dir
    original = getattr(library, _SAVE)

    @functools.wraps(original)
    def save(self: Any, *arguments: Any, **named: Any) -> Any:
        with temporarily(self.args, output_dir=output if self is trainer else self.args.output_dir):
            return original(self, *arguments, **named)

    before = set(root.iterdir())
    try:
        with temporarily(args, output_dir=str(root)), temporarily(library, **{_SAVE: save}):
            yield
    finally:
        for path in set(root.iterdir()) - before:
            if step_of(path) is None:
                shutil.move(path, Path(output, path.name))


def has_own_model_save(trainer: Any) -> bool:
    """Whether a subclass in the script decides how a model is saved."""
    base: Any = importlib.import_module("transformers").Trainer
    kind = cast("Any", type(trainer))
    return kind.save_model is not base.save_model or kind._save is not base._save


def _extended_library_class(trainer: Any) -> Any:
    """The class of transformers or TRL whose `_save_checkpoint` the script overrides; None if there is none."""
    savers = [base for base in cast("tuple[Any, ...]", type(trainer).__mro__) if _SAVE in vars(base)]
    library = next((base for base in savers if base.__module__.partition(".")[0] in _LIBRARIES), None)
    return None if library is savers[0] else library
