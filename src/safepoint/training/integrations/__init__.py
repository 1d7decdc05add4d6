"""The hooks into the training frameworks; each is installed when the user's program imports the framework."""

from safepoint.snapshot.images.capture import find_save_functions
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations import (
    accelerate_launch,
    gpu_questions,
    strangers,
    torch_store,
    transformers,
    unsaved_steps,
)


def install_integrations(context: RankContext) -> None:
    """Hook every known framework as soon as the program has imported it."""
    torch_store.install(context)
    strangers.install(context)
    accelerate_launch.install(context)
    transformers.install(context)
    unsaved_steps.install(context)


def install_before_ranks() -> None:
    """Install the hooks that must be in place when packages are imported before there is a rank."""
    gpu_questions.install_before_ranks()
    transformers.install_before_ranks()


def prepare_before_ranks() -> None:
    """Before ranks are copied, compute what each rank would compute about the imported modules."""
    find_save_functions()
    transformers.prepare_before_ranks()


__all__ = ["install_before_ranks", "install_integrations", "prepare_before_ranks"]
