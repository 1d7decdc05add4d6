"""`holdfast run`: an unchanged training script, on the ranks of this node."""

import os
import sys
from typing import Annotated

import typer

from holdfast.checkpoint.output_folder import OutputFolder
from holdfast.errors import UsageError
from holdfast.training.launch import LaunchPlan, launch
from holdfast.training.output_place import place_output
from holdfast.training.settings import RunSettings


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
            envvar=["HOLDFAST_NPROC_PER_NODE", "PET_NPROC_PER_NODE"],
            help="Ranks on this node; auto: one per accelerator, or per core without one.",
        ),
    ] = "1",
    nnodes: Annotated[
        int, typer.Option(metavar="N", envvar=["HOLDFAST_NNODES", "PET_NNODES"], help="Number of nodes.")
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option(metavar="R", envvar=["HOLDFAST_NODE_RANK", "PET_NODE_RANK"], help="This node's number, from 0."),
    ] = 0,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            envvar=["HOLDFAST_MASTER_ADDR", "PET_MASTER_ADDR"],
            help="Host of node 0, for several nodes.",
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", envvar=["HOLDFAST_MASTER_PORT", "PET_MASTER_PORT"], help="A free port on it.  [29500]"
        ),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="HOLDFAST_OUTPUT_DIR",
            help="Where checkpoints go, instead of the script's own folder: a path, s3://, gs://, az:// or pvc://.",
        ),
    ] = None,
    save_strategy: Annotated[
        str | None,
        typer.Option(
            metavar="steps|epoch|no",
            envvar="HOLDFAST_SAVE_STRATEGY",
            help="When to save periodically. A termination signal always saves.",
        ),
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="HOLDFAST_SAVE_STEPS",
            help="Save every N optimizer steps; implies --save-strategy steps.",
        ),
    ] = None,
    save_total_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="HOLDFAST_SAVE_TOTAL_LIMIT",
            help="Keep the newest N checkpoints; the last good one is never deleted.",
        ),
    ] = None,
    local_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="HOLDFAST_LOCAL_DIR",
            help="The folder in front of an object store.  [one below ~/.cache/holdfast]",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="HOLDFAST_KEEP",
            help="Keep these in the folder: newest=N, every=STEPS, best=N:METRIC[:max], younger=2h; commas add.",
        ),
    ] = None,
    store_keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="HOLDFAST_STORE_KEEP",
            help="Keep these in the object store, likewise.  [all]",
        ),
    ] = None,
    on_upload_failure: Annotated[
        str,
        typer.Option(
            metavar="continue|stop",
            envvar="HOLDFAST_ON_UPLOAD_FAILURE",
            help="What to do when checkpoints do not arrive in the object store.",
        ),
    ] = "continue",
    snapshot_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            envvar="HOLDFAST_SNAPSHOT_STEPS",
            help="Take a snapshot in memory every N steps, besides those of saves; auto: as often as they cost less "
            "than 1 %.",
        ),
    ] = None,
    snapshot_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="HOLDFAST_SNAPSHOT_SLOTS",
            help="How many snapshots host memory may hold; 0: training waits for every save.  [by the state's size]",
        ),
    ] = None,
    snapshot_sharing: Annotated[
        str,
        typer.Option(
            metavar="auto|on|off",
            envvar="HOLDFAST_SNAPSHOT_SHARING",
            help="Under DDP the ranks of a node copy each snapshot together; auto: from CUDA devices.",
        ),
    ] = "auto",
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            envvar="HOLDFAST_GRACE",
            help="Time between SIGTERM and SIGKILL that the platform grants.",
        ),
    ] = 30.0,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar=["HOLDFAST_MAX_RESTARTS", "PET_MAX_RESTARTS"],
            help="Restarts after a failure of a rank.",
        ),
    ] = 3,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            envvar="HOLDFAST_RESUME",
            help="Where to begin: the newest valid checkpoint, step 0, or one checkpoint.",
        ),
    ] = "auto",
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            envvar="HOLDFAST_FROM_SCRATCH",
            help="Begin a new run; checkpoints in the folder are moved aside, not deleted.",
        ),
    ] = False,
    allow_batch_change: Annotated[
        bool,
        typer.Option(
            "--allow-batch-change",
            envvar="HOLDFAST_ALLOW_BATCH_CHANGE",
            help="Resume although a step would see another number of samples.",
        ),
    ] = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more.", show_default=False)] = 0,
) -> None:
    """Run a training script that survives preemption.

    The script is not changed. On SIGTERM to the launcher, to one agent or to one rank, all ranks save one
    checkpoint at one step and leave with exit code 75; the same command goes on from there. SIGUSR1 only saves.

    Exit codes: 0 finished, 75 interrupted and saved (run again), 143 terminated without a save, 14 only damaged
    checkpoints exist, otherwise the script's own.
    """
    environment = RunSettings.from_environment()
    settings = RunSettings(
        output_dir=output_dir,
        save_strategy=save_strategy,
        save_steps=save_steps,
        save_total_limit=save_total_limit,
        local_dir=local_dir,
        keep=keep,
        store_keep=store_keep,
        on_upload_failure=on_upload_failure,
        snapshot_steps=snapshot_steps,
        snapshot_slots=snapshot_slots,
        snapshot_sharing=snapshot_sharing,
        grace_s=grace,
        resume=resume,
        from_scratch=from_scratch,
        allow_batch_change=allow_batch_change,
        peer_timeout_s=environment.peer_timeout_s,
        verbosity=max(verbose, environment.verbosity),
    )
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
    _check_places(settings)
    code = launch(plan, settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_places(settings: RunSettings) -> None:
    """Before ranks load a model for nothing; what the folders hold is verified by them.

    Raises:
        UsageError: the checkpoint to resume from is no folder.
        StorageError: the output folder cannot be written.
    """
    if settings.resume not in {"auto", "never"} and not os.path.isdir(settings.resume):
        raise UsageError(f"--resume {settings.resume}: there is no such folder", hint="name a checkpoint")
    if settings.output_dir is not None:
        place = place_output(settings.output_dir, local_dir=settings.local_dir)
        OutputFolder(place.folder).prepare()


__all__ = ["run"]
