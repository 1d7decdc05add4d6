"""Hugging Face Trainer, and every trainer built on it: hooked when the user's script imports transformers.

- `arguments`: the options of `safepoint run` replace the script's own, where they were given.
- `hook`: every `train()` of the process becomes a run.
- `run`: one call of `train()`: start, vote at every step, stop, resume.
- `framework`: the Trainer's own `_save_checkpoint`, led into a working folder; `own_save`: a script's.
- `best_model`: the best model at the end, where every node has a part of it.
- `hub`: pushes to the Hugging Face Hub, from checkpoints that are complete.
- `reference`: TRL's reference model, where it changes.
- `state`: what the Trainer does not save and an exact continuation needs.
- `counted`: what TRL's trainers count for themselves.
- `geometry`: how many samples a step sees, and keeping that with another number of ranks.
- `continuation` and `data_position`: where a resumed run stands in its data; `repartition`: ZeRO on other ranks.
- `sharing`: which strategies are supported; `shards`: which rank has which part of a weight.
- `final_model`: the finished model, laid out before it is sent.
- `callback`, `takeover`, `listeners`: how the Trainer's loop is hooked, and which callbacks are notified of saves.
"""

from types import ModuleType

from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import


def install(context: RankContext) -> None:
    """Hook transformers for `session`, now or when it is imported."""

    def hook_arguments(module: ModuleType) -> None:
        from safepoint.training.integrations.transformers.arguments import hook

        hook(module, context)

    def trainer_imported(module: ModuleType) -> None:
        from safepoint.training.integrations.transformers.hook import hook_trainer

        hook_trainer(module, context)

    def hub_imported(module: ModuleType) -> None:
        from safepoint.training.integrations.transformers.hub import hook_uploads

        hook_uploads(module, context.outputs)

    after_import("huggingface_hub.hf_api", hub_imported)
    after_import("transformers.training_args", hook_arguments)
    after_import("transformers.trainer", trainer_imported)


__all__ = ["install"]
