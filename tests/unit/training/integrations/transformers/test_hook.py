"""Whether this release of transformers has the loop that is led."""

import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest
import transformers.trainer

from safepoint.errors import SafepointError
from safepoint.training.integrations.transformers.hook import hook_trainer
from tests.support.contexts import rank_context

METHODS = ("_run_epoch", "_load_best_model", "_push_from_checkpoint", "_get_output_dir")
FUNCTIONS = ("skip_first_batches", "deepspeed_load_checkpoint")
COUNTED = ("_tr_loss", "current_gradient_accumulation_steps")
IS_OLDER = not hasattr(transformers.trainer.Trainer, "_run_epoch")
"""Whether Safepoint makes the method and the names of the loop; see test_older_loops.py."""


def release(*, without: str = "") -> Any:
    """As this one, where one thing has another name."""
    module: Any = ModuleType("transformers.trainer")
    vars(module).update({name: value for name, value in vars(transformers.trainer).items() if name != without})
    contents = {
        name: renamed(value, without) if inspect.isfunction(value) else value
        for name, value in vars(transformers.trainer.Trainer).items()
        if name not in {without, "__dict__", "__weakref__"}
    }
    module.Trainer = type("Trainer", (), contents)
    return module


def renamed(function: Any, name: str) -> FunctionType:
    """What says `name` says something else."""
    code = inspect.unwrap(function).__code__
    names = tuple("of_another_name" if one == name else one for one in code.co_names)
    return FunctionType(
        code.replace(co_names=names),
        function.__globals__,
        function.__name__,
        closure=inspect.unwrap(function).__closure__,
    )


def test_this_release_has_all() -> None:
    """Nothing is refused, and training is led."""
    module = release()
    before = module.Trainer.train
    hook_trainer(module, rank_context())
    assert module.Trainer.train is not before


@pytest.mark.parametrize("name", [*METHODS, *FUNCTIONS, *COUNTED])
def test_a_release_without_one_is_refused(name: str) -> None:
    """By its name, when it is imported and not in the middle of a training."""
    if IS_OLDER and name in {"_run_epoch", *COUNTED}:
        pytest.skip("this release has one method for the loop")
    with pytest.raises(SafepointError, match=rf"has no [\w.]*\.{name}; training was not started"):
        hook_trainer(release(without=name), rank_context())
