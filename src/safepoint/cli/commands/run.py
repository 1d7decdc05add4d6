"""`safepoint run`: runs an unchanged training script on the ranks of this node."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safepoint.cli.commands.run_options import RunOptions, with_options
from safepoint.cli.failures import report_to_program
from safepoint.cli.place import Connection
from safepoint.errors import UnsupportedError, require_torch

if TYPE_CHECKING:
    from safepoint.settings.run_settings import RunSettings
    from safepoint.training.launcher.launch_plan import LaunchPlan


@with_options
def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The training script and its own arguments. Options of Safepoint come before SCRIPT.",
        ),
    ],
    module: Annotated[
        bool,
        typer.Option(
            "-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.", show_default=False
        ),
    ] = False,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            metavar="N|auto|cpu|gpu",
            envvar=["SAFEPOINT_NPROC_PER_NODE", "PET_NPROC_PER_NODE"],
            help="Number of ranks (training processes) on this node. cpu: one per core. gpu: one per GPU. auto: one "
            "per accelerator, or one per core on a node without accelerators.",
        ),
    ] = "1",
    nnodes: Annotated[
        int, typer.Option(metavar="N", envvar=["SAFEPOINT_NNODES", "PET_NNODES"], help="Number of nodes.")
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option(
            metavar="R", envvar=["SAFEPOINT_NODE_RANK", "PET_NODE_RANK"], help="Number of this node. The first is 0."
        ),
    ] = 0,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            envvar=["SAFEPOINT_MASTER_ADDR", "PET_MASTER_ADDR"],
            help="Host name of node 0. Required with several nodes.",
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar=["SAFEPOINT_MASTER_PORT", "PET_MASTER_PORT"],
            help="A free port on node 0.",
            show_default="29500 with several nodes",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar=["SAFEPOINT_MAX_RESTARTS", "PET_MAX_RESTARTS"],
            help="Maximum number of restarts of the ranks after a rank has failed.",
        ),
    ] = 3,
    connection: Connection = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Report a failure as one line of JSON on stderr. On stdout, print only the script's output.",
        ),
    ] = False,
    *,
    options: RunOptions,
) -> None:
    """Run an unchanged training script so that it can be interrupted and resumed.

    The command starts the ranks (training processes). When the command or one of the ranks receives SIGTERM or
    Ctrl-C, all ranks save one checkpoint at the same step and exit with code 75. Run the same command again to resume
    from this checkpoint. SIGUSR1 saves a checkpoint without stopping.

    Exit codes: 0 finished; 75 interrupted and saved, run the command again; 143 terminated without a save, run the
    command again; 2, 10, 11, 13, 14, 16 something has to be fixed first, see the message; 130 stopped by Ctrl-C
    without a save; 128 + n signal n killed a rank; any other code is the exit code of the script.
    """
    from safepoint.checkpoint.local.output_folder import OutputFolder
    from safepoint.settings.run_settings import place_output
    from safepoint.training.launcher.launch import launch
    from safepoint.training.launcher.launch_plan import LaunchPlan

    require_torch("safepoint run")
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
    if settings.output_dir is not None:  # report an unusable location now, before the ranks load a model
        OutputFolder(place_output(settings.output_dir, local_dir=settings.local_dir).folder).prepare()
    report = report_to_program if as_json else None
    if settings.freeze_as_last_resort:
        code = _run_watched()(plan, settings)
    else:
        code = launch(plan, settings, on_exit=report, reports_slow_start=not as_json)
    if report is not None:
        report(code)
    # If stdout is closed, or no process reads it any more, the exit code stays `code`.
    with contextlib.suppress(AttributeError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_watched() -> Callable[["LaunchPlan", "RunSettings"], int]:
    try:
        from safepoint.jobs.local.images.watched_run import run_watched
    except ModuleNotFoundError as error:  # most pods have only a part of Safepoint
        raise UnsupportedError(
            "--freeze-as-last-resort: this pod has no modules for process images; nothing was started",
            hint="give the option when the job is submitted, or leave it out",
        ) from error
    return run_watched


def check_resume(resume: str) -> None:
    """Raise UsageError if `resume` is a path that names neither a folder nor a checkpoint in an object store.

    The ranks verify the contents of the checkpoint.
    """
    from safepoint.checkpoint.format.catalog import step_of
    from safepoint.errors import UsageError
    from safepoint.storage.location import parse_location

    if "://" in resume:
        try:
            named = parse_location(resume)
        except ValueError as error:
            raise UsageError(f"--resume: {error}") from error
        if named.is_remote and step_of(Path(named.name)) is not None:
            return
    if resume not in {"auto", "never"} and not os.path.isdir(resume):
        raise UsageError(
            f"--resume {resume}: there is no such folder or checkpoint",
            hint="use auto, never, or the path or the URI of a checkpoint",
        )
