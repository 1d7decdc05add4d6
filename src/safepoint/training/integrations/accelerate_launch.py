"""Makes `accelerate launch` run the script in the rank that calls it, and start no further processes.

Further processes are not needed, because the launcher of Safepoint has started the ranks already. In all other
respects, `accelerate launch` works as usual: it reads its options and its configuration file, and passes their values
to the script in variables (`ACCELERATE_MIXED_PRECISION`, …). TRL's command `trl sft …` starts its scripts through
`accelerate launch`.
"""

import copy
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from safepoint.errors import UsageError
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import
from safepoint.training.program import run_program

_OF_RANKS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
        *("MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    }
)
"""Variables that the launcher of Safepoint sets for each rank."""


def install(context: RankContext) -> None:
    """Hook `accelerate launch` when the program imports it."""
    after_import("accelerate.commands.launch", lambda module: _hook(context, module))


def _hook(context: RankContext, module: ModuleType) -> None:
    launcher: Any = module

    def run_simple(args: Any) -> None:
        _run(context, args, launcher.prepare_simple_launcher_cmd_env(copy.copy(args))[1])

    def run_multi_gpu(args: Any) -> None:
        _run(context, args, launcher.prepare_multi_gpu_env(_of_one_machine(args)))

    def run_deepspeed(args: Any) -> None:
        _run(context, args, launcher.prepare_deepspeed_cmd_env(_of_one_machine(args))[1])

    def refuse(*_: Any) -> None:
        raise UsageError("accelerate launch for TPUs and SageMaker does not run under Safepoint")

    launcher.simple_launcher, launcher.multi_gpu_launcher = run_simple, run_multi_gpu
    launcher.deepspeed_launcher = run_deepspeed
    launcher.tpu_launcher = launcher.tpu_pod_launcher = launcher.sagemaker_launcher = refuse


def _of_one_machine(args: Any) -> Any:
    """The options for one machine, with port 0, so that Accelerate does not refuse a port that is in use."""
    changed = copy.copy(args)
    changed.num_machines, changed.main_process_port = 1, 0
    return changed


def _run(context: RankContext, args: Any, variables: Mapping[str, str]) -> None:
    if args.no_python:
        raise UsageError("accelerate launch --no_python does not run under Safepoint", hint="name a Python script")
    num_ranks = context.place.world_size
    if args.num_processes not in {None, 1, num_ranks} and context.place.is_first:
        context.log.warning(
            "accelerate launch is configured for %s processes, and Safepoint has started %d: Accelerate's number has "
            "no effect; set --nproc-per-node of safepoint",
            args.num_processes,
            num_ranks,
        )
    new = {name: text for name, text in variables.items() if name not in _OF_RANKS and os.environ.get(name) != text}
    os.environ.update(new)
    run_program([args.training_script, *args.training_script_args], is_module=bool(args.module))
