"""Warns if a script trains, and no trainer that Safepoint supports has begun."""

import logging
from types import ModuleType
from typing import Any

from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import

_log = logging.getLogger("safepoint")


def install(context: RankContext) -> None:
    """At the first step of an optimizer in this process, warn if no supported trainer has begun."""
    if not context.place.is_first:
        return

    def watch(module: ModuleType) -> None:
        optimizers: Any = module
        is_first = True

        def before_step(*_: Any) -> None:
            nonlocal is_first
            was_first, is_first = is_first, False
            if was_first and context.outputs.is_empty:
                _log.warning(
                    "the script trains, but no Trainer of Hugging Face or TRL, no SafepointCallback, no "
                    "safepoint.session and no safepoint.epochs has begun: nothing of this training is saved; use "
                    "safepoint.session in a loop written by hand"
                )

        # The hook is not removed here, because torch's list of hooks must not change while torch runs the hooks.
        optimizers.register_optimizer_step_pre_hook(before_step)

    after_import("torch.optim.optimizer", watch)
