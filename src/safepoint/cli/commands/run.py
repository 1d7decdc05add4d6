"""`safepoint run`: an unchanged training script, on the ranks of this node."""

import contextlib
import os
import sys
from typing import Annotated

import typer

from safepoint.cli.commands.run_options import RunOptions, with_options
from safepoint.cli.failures import report_to_program
from safepoint.cli.place import Connection


@with_options
def run(
    program: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The training script, unchanged, and its own arguments."),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.", show_default=False)
    ] = False,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            envvar=["SAFEPOINT_NPROC_PER_NODE", "PET_NPROC_PER_NODE"],
            help="Ranks on this node; auto: one per accelerator, or per core without one.",
        ),
    ] = "1",
    nnodes: Annotated[
        int, typer.Option(metavar="N", envvar=["SAFEPOINT_NNODES", "PET_NNODES"], help="Number of nodes.")
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option(
            metavar="R", envvar=["SAFEPOINT_NODE_RANK", "PET_NODE_RANK"], help="This node's number, from 0."
        ),
    ] = 0,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            envvar=["SAFEPOINT_MASTER_ADDR", "PET_MASTER_ADDR"],
            help="Host of node 0, for several nodes.",
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar=["SAFEPOINT_MASTER_PORT", "PET_MASTER_PORT"],
            help="A free port on that host.  [29500]",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar=["SAFEPOINT_MAX_RESTARTS", "PET_MAX_RESTARTS"],
            help="Restarts after a failure of a rank.",
        ),
    ] = 3,
    connection: Connection = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Report a failure in one line of JSON on stderr; stdout is the script's own."),
    ] = False,
    *,
    options: RunOptions,
) -> None:
    """Run a training script that survives preemption.

    The script is not changed. On SIGTERM to a launcher or to one rank, all ranks save one
    checkpoint at one step and exit with code 75; the same command continues from it. SIGUSR1 saves without stopping.

    Exit codes: 0 finished, 75 interrupted and saved (run again), 143 terminated without a save, 14 only damaged
    checkpoints exist, otherwise the script's own.
    """
    from safepoint.checkpoint.local.output_folder import OutputFolder
    from safepoint.settings.output_place import place_output
    from safepoint.training.launcher.launch import launch
    from safepoint.training.launcher.launch_plan import LaunchPlan

    settings = options.settings()
    plan = LaunchPlan(
        program=tuple(program),
        is_module=module,
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=max_restarts,
    )
    check_resume(settings.resume)
    if settings.output_dir is not None:  # before ranks load a model
        OutputFolder(place_output(settings.output_dir, local_dir=settings.local_dir).folder).prepare()
    report = report_to_program if as_json else None
    code = launch(plan, settings, on_exit=report)
    if report is not None:
        report(code)
    with contextlib.suppress(AttributeError, OSError):  # closed, or its reader is gone: the exit code stays
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def check_resume(resume: str) -> None:
    """Raise UsageError when the checkpoint to resume from is not a folder; the ranks verify its contents."""
    from safepoint.errors import UsageError

    if resume not in {"auto", "never"} and not os.path.isdir(resume):
        raise UsageError(
            f"--resume {resume}: there is no such folder", hint="give auto, never or the path of a checkpoint"
        )
