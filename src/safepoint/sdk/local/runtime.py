"""The runtime of this machine, and the check whether it can be used in place of a runtime of a cluster."""

import logging
import re
from typing import Any

from safepoint.errors import NotFoundError, UnsupportedError
from safepoint.jobs.local.slots import count_slots
from safepoint.sdk.upstream import constants, types

_COMMAND = ("safepoint", "run")
_FRAMEWORK = "torch"
_OF_PYTORCH = re.compile(r"(?:^|-)(?:torch|pytorch|training-hub)(?![a-z])")
"""Found in the names of runtimes for PyTorch (`torch-distributed-rocm`), and not in `torchtune-llama3.2-1b`."""
_log = logging.getLogger("safepoint")


def local_runtime() -> types.Runtime:
    """The only runtime of this machine: the Python environment in which jobs run."""
    machine = count_slots()
    device, count = ("gpu", machine.gpu) if machine.gpu else ("cpu", machine.cpu)
    trainer = types.RuntimeTrainer(
        trainer_type=types.TrainerType.CUSTOM_TRAINER,
        framework=_FRAMEWORK,
        image="local",
        num_nodes=1,
        device=device,
        device_count=str(count),
    )
    trainer.set_command(_COMMAND)
    kinds = getattr(types, "RuntimeKind", None)  # Red Hat's 0.3 has none
    kind: dict[str, Any] = {} if kinds is None else {"kind": kinds.TRAINING_RUNTIME}
    return types.Runtime(name=constants.DEFAULT_TRAINING_RUNTIME, trainer=trainer, **kind)


def check_runtime(given: str | types.Runtime, python: str) -> None:
    """Check that the runtime of this machine can be used instead of `given`. Log a warning if it differs.

    Args:
        given: a runtime, or the name of a runtime. A runtime states its framework. For a name, the framework is
            derived from the name.
        python: the interpreter that runs the jobs.

    Raises:
        UnsupportedError: the framework of the runtime is not PyTorch.
        NotFoundError: there is no runtime of this name, and the name does not show that the runtime is for PyTorch.
    """
    own, name = constants.DEFAULT_TRAINING_RUNTIME, given if isinstance(given, str) else given.name
    if name == own:
        return
    hint = f"leave out the argument runtime, or use {own!r}"
    if not isinstance(given, str):
        framework = given.trainer.framework
        if framework != _FRAMEWORK:
            raise UnsupportedError(
                f"the runtime {name!r} is for {framework}, and jobs of this machine run PyTorch; nothing was started",
                hint=hint,
            )
    elif not _OF_PYTORCH.search(name):
        raise NotFoundError(f"there is no runtime {name!r} on this machine; nothing was started", hint=hint)
    _log.warning(
        "this machine has no runtime %r; %r is used in its place: its jobs run with %s, and not in an image",
        name,
        own,
        python,
    )
