"""Differences between the releases of transformers.

| releases | difference | handled by |
|---|---|---|
| below 5.3 | the loop of the Trainer is one method | `split_loop` |
| below 5.0 | no module `conversion_mapping`; `save_pretrained` uses a table in the model | `is_converted` |
| below 5.0 | `save_safetensors=False` writes pickles | `writes_safetensors` |
| below 5.0 | ranks on CPUs load the optimizer's state to a device such as `cpu:0`, which torch refuses | `loadable` |
| below 5.1 | no training argument `enable_jit_checkpoint` | `arguments.py` reads it with a default |
"""

import ast
import contextlib
import importlib
import inspect
import textwrap
from types import ModuleType
from typing import Any, cast

import torch

from safepoint.errors import SafepointError
from safepoint.foundation.units import plural

_LOOP = "_inner_training_loop"


def split_loop(module: ModuleType) -> None:
    """Give an older Trainer the methods into which later releases have split the training loop.

    In the older releases, the loop is one method, `_inner_training_loop`. This function changes the source of the
    method as follows, and compiles it again. Everything else stays as it was, also the line numbers in a traceback.

    - The loss since the last log line is the attribute `_tr_loss`, and not a local variable.
    - `_init_training_state(epochs, batches)` returns the epoch, and the batch in this epoch, at which training
      starts.
    - `_run_epoch(train_dataloader=…, epoch=…)` is called after `on_epoch_begin`. If it returns False, the loop over
      the epochs ends.
    - `_finalize_training(trial, num_train_samples, start_time, finish)` is called after the last epoch. `finish` is a
      function that runs the rest of the loop's method. It takes the other three arguments.

    Args:
        module: `transformers.trainer`.

    Raises:
        SafepointError: the source of the loop does not have the expected form.
    """
    trainer: Any = module.Trainer
    original = inspect.unwrap(getattr(trainer, _LOOP, split_loop))
    if hasattr(trainer, "_run_epoch") or "tr_loss" not in original.__code__.co_varnames:
        return
    try:
        lines, first = inspect.getsourcelines(original)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        (function,) = tree.body
        _rewrite(cast("ast.FunctionDef", function))
    except (OSError, SyntaxError, ValueError) as error:
        raise SafepointError(
            f"the training loop of this release of transformers has an unknown form ({error}); training was not "
            "started",
            hint='install a supported release: pip install "safepoint[transformers]"',
        ) from error
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(original), "exec"), vars(module), made)  # the release's own code
    loop = made[_LOOP]
    loop.__qualname__ = original.__qualname__
    setattr(trainer, _LOOP, loop)
    for method in (_init_training_state, _run_epoch, _finalize_training):
        setattr(trainer, method.__name__, method)


def _init_training_state(self: Any, epochs: int, batches: int) -> tuple[int, int]:
    return epochs, batches


def _run_epoch(self: Any, *, train_dataloader: Any, epoch: int) -> bool:
    return True


def _finalize_training(self: Any, trial: Any, num_train_samples: Any, start_time: float, finish: Any) -> Any:
    return finish(trial, num_train_samples, start_time)


_BEFORE_EPOCHS = """
epochs_trained, steps_trained_in_current_epoch = self._init_training_state(
    epochs_trained, steps_trained_in_current_epoch
)
"""
_BEGIN_EPOCH = """
if not self._run_epoch(train_dataloader=epoch_dataloader, epoch=epoch):
    break
"""
_FINISH = """
def finish(trial, num_train_samples, start_time):
    pass
return self._finalize_training(trial, num_train_samples, start_time, finish)
"""


def _rewrite(function: ast.FunctionDef) -> None:
    """Make the changes that the docstring of `split_loop` describes.

    Raises:
        ValueError: a statement at which the method is changed was not found, or was found more than once.
    """
    _Loss().visit(function)
    epochs = _only(
        [i for i, one in enumerate(function.body) if isinstance(one, ast.For) and _name(one.target) == "epoch"],
        "a loop over epochs",
    )
    loop = cast("ast.For", function.body[epochs])
    begins = _only([i for i, one in enumerate(loop.body) if _calls(one, "on_epoch_begin")], "on_epoch_begin")
    loop.body[begins + 1 : begins + 1] = _statements(_BEGIN_EPOCH, loop.body[begins])
    named, returns = _statements(_FINISH, function.body[epochs + 1])
    cast("ast.FunctionDef", named).body = function.body[epochs + 1 :]
    before = _statements(_BEFORE_EPOCHS, loop)
    function.body[epochs:] = [*before, loop, named, returns]


class _Loss(ast.NodeTransformer):
    """Makes the variable `tr_loss` the attribute `self._tr_loss`."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id != "tr_loss":
            return node
        owner = ast.copy_location(ast.Name("self", ast.Load()), node)
        return ast.copy_location(ast.Attribute(owner, "_tr_loss", node.ctx), node)


def _statements(source: str, place: ast.stmt) -> list[ast.stmt]:
    """Return the statements of `source`. A traceback shows all of them at the line of `place`."""
    statements = ast.parse(source).body
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return statements


def _only(places: list[int], what: str) -> int:
    """The only element of `places`, the indexes of the statements at which `what` was found.

    Raises:
        ValueError: there is no element, or more than one.
    """
    if len(places) != 1:
        raise ValueError(f"{what} was found {plural(len(places), 'time')}; exactly one is expected")
    return places[0]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _calls(statement: ast.stmt, method: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == method for node in ast.walk(statement))


def is_converted(model: Any) -> bool:
    """Whether transformers may save weights of this model under names that differ from those in the model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return False
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # below 5.0
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    of_model = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return bool(getattr(model, "_weight_conversions", None) or of_model)


def build_mappings(model_type: str) -> None:
    """Make transformers build its mappings of weight names now. The first call in a process takes 0.2 s."""
    with contextlib.suppress(TypeError, ImportError, AttributeError):  # transformers below 5.0
        mappings: Any = importlib.import_module("transformers.conversion_mapping")
        mappings.get_checkpoint_conversion_mapping(model_type)


def writes_safetensors(args: Any) -> bool:
    """Whether the Trainer writes weights as safetensors. From release 5.0 on, it always does."""
    return bool(getattr(args, "save_safetensors", True))


def loadable(map_location: Any) -> Any:
    """Return `map_location` for `torch.load`: `cpu` instead of `cpu:0`, and any other device unchanged."""
    is_cpu = isinstance(map_location, torch.device) and map_location.type == "cpu"
    return "cpu" if is_cpu else map_location
