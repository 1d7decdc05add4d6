"""Converts the `TrainingHubTrainer` of Red Hat's version of the SDK into a trainer for a job of this machine.

In a pod, one process calls a function of the library training-hub, and this function starts the ranks by itself. A
job on this machine does the same: the job has one rank, and this rank calls the function. The class is recognized by
its name and its fields, because Red Hat's version is in no package index.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from safepoint.errors import UnsupportedError, UsageError
from safepoint.foundation.environment import is_importable
from safepoint.foundation.field_types import NAMED
from safepoint.foundation.quantities import parse_whole
from safepoint.jobs.local.slots import count_slots
from safepoint.sdk.checks import is_of_fork
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.upstream import constants, types

_NAME = "TrainingHubTrainer"
_LIBRARY = "training-hub"


@dataclass
class TrainingHubJob(types.CustomTrainer):
    """A `CustomTrainer` for a job with one rank, which starts further processes by itself."""


START = """\
    import os

    # training-hub starts ranks of its own. It must not take the address of this rank's rendezvous for theirs.
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "PET_")) or name in (
            *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
            *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        ):
            del os.environ[name]
"""
"""The lines that the script of such a job runs before the function: they delete variables that pods do not have."""


def run_algorithm(algorithm: str, arguments: dict[str, object]) -> None:
    """Call an algorithm of training-hub. The source of this function is sent to the job."""
    try:
        import training_hub  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "training_hub":
            raise
        raise SystemExit(
            "the module training_hub is not installed where this job runs; nothing was trained: "
            "pip install training-hub, or set packages_to_install=['training-hub']"
        ) from error
    if not hasattr(training_hub, algorithm):
        raise SystemExit(f"training-hub has no algorithm {algorithm}; nothing was trained: install another release")
    getattr(training_hub, algorithm)(**arguments)


def is_training_hub(trainer: Any) -> bool:
    """Whether the value is the `TrainingHubTrainer` of Red Hat's version."""
    fields = ("func", "func_args", "algorithm")
    return is_of_fork(trainer) and type(trainer).__name__ == _NAME and all(hasattr(trainer, one) for one in fields)


def training_hub_job(trainer: Any, config: LocalConfig) -> TrainingHubJob:
    """The trainer for a job of this machine.

    Raises:
        UnsupportedError: training-hub is not installed, or the trainer needs several nodes.
        UsageError: a field is invalid.
    """
    try:
        NAMED.optional.check("func_args", trainer.func_args)
    except ValueError as error:
        raise UsageError(f"{error}; nothing was started") from error
    arguments: dict[str, Any] = trainer.func_args or {}
    packages: list[str] = list(trainer.packages_to_install or ())
    if arguments.get("nnodes", 1) != 1:
        raise UnsupportedError(
            f"func_args has nnodes={arguments['nnodes']!r}, and training-hub has one node on this machine; nothing "
            "was started",
            hint="set nproc_per_node, and leave out nnodes",
        )
    is_here = is_importable("training_hub", config.folder)
    if config.python == sys.executable and not packages and not is_here:
        raise UnsupportedError(
            f"{_NAME} needs {_LIBRARY}, which is not installed here; nothing was started",
            hint=f"pip install {_LIBRARY}, or set packages_to_install=['{_LIBRARY}']",
        )
    function, given = _function(trainer, arguments)
    return TrainingHubJob(
        func=function,
        func_args=given,
        packages_to_install=packages or None,
        pip_index_urls=list(getattr(trainer, "pip_index_urls", None) or constants.DEFAULT_PIP_INDEX_URLS),
        num_nodes=1,
        resources_per_node=trainer.resources_per_node or _resources(arguments.get("nproc_per_node", 1)),
        env=getattr(trainer, "env", None),
    )


def _resources(ranks: Any) -> dict[str, int]:
    """The resources for a trainer that names none: a GPU for each process, or a CPU if this machine has no GPU."""
    num_gpus = count_slots().gpu
    if isinstance(ranks, str):
        ranks = parse_whole(ranks.strip())
    if not isinstance(ranks, int) or ranks < 1:  # `auto` and `gpu` stand for all GPUs
        ranks = num_gpus or 1
    return {"gpu" if num_gpus else "cpu": ranks}


def _function(trainer: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The function that the rank calls, and its arguments by name."""
    if trainer.func is None:
        algorithm: Any = getattr(trainer.algorithm, "value", trainer.algorithm)
        if not isinstance(algorithm, str) or not algorithm.isidentifier() or algorithm.startswith("_"):
            raise UsageError(
                f"algorithm is {algorithm!r}; nothing was started", hint="set algorithm, such as 'sft', or func"
            )
        return run_algorithm, {"algorithm": algorithm, "arguments": arguments}
    if trainer.func_args is None or not callable(trainer.func):
        return trainer.func, None
    # Red Hat's version passes all arguments as one dict, by position.
    names = list(inspect.signature(trainer.func).parameters)
    if not names:
        raise UsageError(
            f"func takes no argument, and {_NAME} passes func_args to it as one dict; nothing was started",
            hint="write def train(func_args): …, or leave out func_args",
        )
    return trainer.func, {names[0]: arguments}
