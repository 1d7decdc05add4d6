"""The moment before an optimizer changes its parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_TORCH, _HOOKS = "torch.optim.", "_optimizer_step_pre_hooks"


def before_changes(call: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call `call` with each optimizer of the process when it steps, before anything is changed.

    An optimizer that is given a closure runs forward and backward inside of its step. Those of torch change nothing
    before the closure has returned. Others may, and so may hooks before a step: for these, `call` runs at the
    beginning of the step.

    Args:
        call: may raise; the step is then not done.

    Returns:
        What ends it, by `remove()`.
    """

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:2]), None)
        is_torchs = type(optimizer).step.__module__.startswith(_TORCH) and not vars(optimizer)[_HOOKS]
        if closure is None or not is_torchs:
            call(optimizer)
            return None

        def with_call() -> Any:
            loss = closure()
            call(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": with_call}
        return (args[0], with_call, *args[2:]), kwargs

    return register_optimizer_step_pre_hook(hook)
