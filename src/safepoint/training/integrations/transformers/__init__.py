"""Hooks Hugging Face's Trainer, and every trainer that is based on it, when the user's script imports transformers.

- `arguments`: the options that were given to `safepoint run` replace the script's own.
- `hook`: lets Safepoint save, stop and resume every `train()` of the process.
- `run`: one call of `train()`: start, vote at every step, stop, resume.
- `deferred_work`: which work that a checkpoint defers the script itself can cause.
- `trainer_loop`: runs the Trainer's own `_save_checkpoint` in a working folder.
- `only_rank`: trains the model of a job's only rank as it is.
- `own_save`: redirects the files that a subclass in the script writes in its own `_save_checkpoint`.
- `hub`: keeps Safepoint's own files out of uploads to the Hugging Face Hub.
- `save_callbacks`: which callbacks are notified of saves, and when.
- `resume`: the state that an exact resume needs, and that the Trainer itself does not save or load.
- `sharding`: how the ranks divide a model, and how a checkpoint or a final model is made of their parts.
"""

import functools
import sys
from pathlib import Path
from types import ModuleType

from safepoint.foundation.events.start_events import Phase
from safepoint.training.compatibility.transformers_releases import build_mappings
from safepoint.training.context.rank_context import RankContext, current_context
from safepoint.training.integrations.imports import after_import
from safepoint.training.integrations.transformers.hub import hook_uploads


def install(context: RankContext) -> None:
    """Hook transformers for the rank of `context`, now or when it is imported."""

    def hook_arguments(module: ModuleType) -> None:
        from safepoint.training.integrations.transformers.arguments import hook

        hook(module, context)

    def trainer_imported(module: ModuleType) -> None:
        from safepoint.training.integrations.transformers.hook import hook_trainer

        hook_trainer(module, context)
        context.record.passed(Phase.IMPORTS_DONE)

    after_import("huggingface_hub.hf_api", functools.partial(hook_uploads, outputs=context.outputs))
    after_import("transformers.training_args", hook_arguments)
    after_import("transformers.trainer", trainer_imported)


def install_before_ranks() -> None:
    """Hook uploads in a process from which ranks are copied.

    Other modules import the function `upload_folder` from `huggingface_hub.hf_api` before `install` is called in the
    copy, so the function has to be replaced earlier.
    """
    after_import("huggingface_hub.hf_api", functools.partial(hook_uploads, outputs=_OutputsOfRank()))


def prepare_before_ranks() -> None:
    """If the Trainer is imported, make transformers build its tables now, so that not each rank has to build them."""
    if "transformers.trainer" in sys.modules:
        build_mappings("")


class _OutputsOfRank:
    """The output folders of the rank that this process becomes."""

    def contains(self, folder: Path) -> bool:
        return current_context().outputs.contains(folder)


__all__ = ["install", "install_before_ranks", "prepare_before_ranks"]
