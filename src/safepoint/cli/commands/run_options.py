"""The options that `run` and `submit` share.

A command has one parameter for them, `options: RunOptions`. Typer needs one parameter for each option instead. So the
decorator `with_options` gives Typer a signature with one parameter for each field of `RunOptions`.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run. Most have the name of the field of `RunSettings` that they set."""

    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="SAFEPOINT_OUTPUT_DIR",
            help="Where to write checkpoints: a path, s3://, gs://, az:// or pvc://.",
            show_default="as the script sets",
        ),
    ] = None
    save_strategy: Annotated[
        str | None,
        typer.Option(
            metavar="steps|epoch|no",
            envvar="SAFEPOINT_SAVE_STRATEGY",
            help="When to save periodically. After SIGTERM, a run saves in any case.",
            show_default="as the script sets",
        ),
    ] = None
    save_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SAVE_STEPS",
            help="Save every N optimizer steps. Implies --save-strategy steps.",
        ),
    ] = None
    save_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|auto",
            envvar="SAFEPOINT_SAVE_EVERY",
            help="Save every TIME, such as 10m. auto: choose the interval from the cost of a save and the number of "
            "failures. Cannot be used with --save-steps or --save-strategy.",
        ),
    ] = None
    save_total_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SAVE_TOTAL_LIMIT",
            help="Keep only the newest N checkpoints. The newest valid checkpoint is never deleted.",
        ),
    ] = None
    local_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="SAFEPOINT_LOCAL_DIR",
            help="With an object store: the local folder to which checkpoints are written before their upload.",
            show_default="a folder in ~/.cache/safepoint",
        ),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="SAFEPOINT_KEEP",
            help="Which checkpoints to keep in the output folder. One or more policies, separated by commas: "
            "newest=N, every=STEPS, best=N:METRIC[:max], younger=2h.",
        ),
    ] = None
    store_keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="SAFEPOINT_STORE_KEEP",
            help="Which checkpoints to keep in the object store. POLICY has the syntax of --keep.",
            show_default="all",
        ),
    ] = None
    extra_files_limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            envvar="SAFEPOINT_EXTRA_FILES_LIMIT",
            help="With an object store: when the run ends or is interrupted, also upload other files in the output "
            "folder, such as plots, up to SIZE in total. The smallest files are uploaded first. 0: upload none.",
        ),
    ] = "10Gi"
    on_upload_failure: Annotated[
        str,
        typer.Option(
            metavar="continue|stop",
            envvar="SAFEPOINT_ON_UPLOAD_FAILURE",
            help="What to do if checkpoints cannot be uploaded: continue the training, or save and stop.",
        ),
    ] = "continue"
    verify_access: Annotated[
        bool,
        typer.Option(
            "--verify-access/--no-verify-access",
            envvar="SAFEPOINT_VERIFY_ACCESS",
            help="Before the model is loaded, check that the object store can be read and written.",
        ),
    ] = True
    snapshot_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            envvar="SAFEPOINT_SNAPSHOT_STEPS",
            help="Also take a snapshot (a copy of the training state in memory) every N steps. auto: as often as "
            "possible while snapshots cost less than 1 % of the training time.",
        ),
    ] = None
    snapshot_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SNAPSHOT_SLOTS",
            help="Maximum number of snapshots in memory. 0: no snapshots, and training waits for every save.",
            show_default="depends on the size of the state",
        ),
    ] = None
    snapshot_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            envvar="SAFEPOINT_SNAPSHOT_MEMORY",
            help="Maximum memory for all snapshots of a node, such as 8Gi.",
            show_default="depends on --snapshot-slots",
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            envvar="SAFEPOINT_GRACE",
            help="Grace period of the platform: the time between SIGTERM and SIGKILL. On a cluster, the default is "
            "the grace period in the training runtime (Kubeflow's template for the job's pods).",
        ),
    ] = 30.0
    freeze_as_last_resort: Annotated[
        bool,
        typer.Option(
            "--freeze-as-last-resort",
            envvar="SAFEPOINT_FREEZE_AS_LAST_RESORT",
            help="When the ranks cannot save within the grace period, freeze them into a process image, from which "
            "they can go on. Needs root and CRIU on this machine; without them, the command ends with exit code 16. "
            "On a cluster: possible only if the job has one pod, its output location is in a claim, and the pod has "
            "CRIU.",
        ),
    ] = False
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar="SAFEPOINT_METRICS_PORT",
            help="Serve the progress of the run on node 0 at http://HOST:PORT/metrics. 0: do not serve it.",
            show_default="0",
        ),
    ] = None
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            envvar="SAFEPOINT_RESUME",
            help="Where to start. auto: from the newest valid checkpoint. never: at step 0. With "
            "`run --resume never`, the ranks also begin at step 0 after each restart. With `submit --resume never`, "
            "only the first start of the job begins at step 0; later starts resume from the job's newest checkpoint. "
            "PATH: from this checkpoint, on the first start only. With never, all checkpoints in the output folder "
            "are moved aside. With PATH, newer checkpoints in the output folder are moved aside. If PATH is a "
            "checkpoint of Safepoint in another folder, all checkpoints in the output folder are moved aside. No "
            "checkpoint is deleted. With an object store, never and PATH are refused if the location already holds "
            "checkpoints. One exception: PATH may name another program's checkpoint in the store, if the store holds "
            "no newer checkpoint of Safepoint.",
        ),
    ] = "auto"
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            envvar="SAFEPOINT_FROM_SCRATCH",
            help="Start a new run at step 0. Existing checkpoints in the output folder are moved aside, not deleted. "
            "With an object store, this option is refused if the location already holds checkpoints.",
        ),
    ] = False
    allow_batch_change: Annotated[
        bool,
        typer.Option(
            "--allow-batch-change",
            envvar="SAFEPOINT_ALLOW_BATCH_CHANGE",
            help="Resume even if the number of samples per step has changed.",
        ),
    ] = False
    preload: Annotated[
        bool,
        typer.Option(
            "--preload/--no-preload",
            envvar="SAFEPOINT_PRELOAD",
            help="Import the packages of the script once on each node, in a separate process, and fork the ranks "
            "from that process: they start and restart faster. --no-preload: start each rank as a new process.",
        ),
    ] = True
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Print more messages.", show_default=False)
    ] = 0

    def settings(self) -> Any:
        """The `RunSettings`: the values of these options, and the values that only environment variables can set.

        Raises:
            UsageError: an option or a variable is invalid.
        """
        from safepoint.settings.run_settings import RunSettings

        environment, values = RunSettings.from_environment(), asdict(self)
        return RunSettings(
            grace_s=values.pop("grace"),
            peer_timeout_s=environment.peer_timeout_s,
            metrics_host=environment.metrics_host,
            termination_log=environment.termination_log,
            job_dir=environment.job_dir,
            first_start=environment.first_start,
            verbosity=max(values.pop("verbose"), environment.verbosity),
            **values,
        )


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give Typer a signature with one parameter for each field of `options`, in place of the parameter `options`."""
    own = dict(inspect.signature(command).parameters)
    options = own.pop("options").annotation
    shared = inspect.signature(options).parameters

    def with_values(**given: Any) -> Any:
        values = {name: given.pop(name) for name in shared}
        return command(**given, options=options(**values))

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values()]
    spread: Any = with_values
    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature([*parameters, *shared.values()])
    spread.__annotations__ = {name: parameter.annotation for name, parameter in (own | dict(shared)).items()}
    return spread
