"""The options that `run` and `submit` share.

Typer makes options of a function's parameters. `with_options` lets a command take several of them as one value: for
Typer, each field of the value's class is a parameter of the command.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The settings of a run; the fields are those of `settings.run_settings.RunSettings`."""

    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="SAFEPOINT_OUTPUT_DIR",
            help="Where checkpoints go, instead of the script's own folder: a path, s3://, gs://, az:// or pvc://.",
        ),
    ] = None
    save_strategy: Annotated[
        str | None,
        typer.Option(
            metavar="steps|epoch|no",
            envvar="SAFEPOINT_SAVE_STRATEGY",
            help="When to save periodically. A termination signal always saves.",
        ),
    ] = None
    save_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SAVE_STEPS",
            help="Save every N optimizer steps; implies --save-strategy steps.",
        ),
    ] = None
    save_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|auto",
            envvar="SAFEPOINT_SAVE_EVERY",
            help="Save periodically by time, such as 10m; auto: the interval follows from the cost of a save. "
            "Excludes --save-steps and --save-strategy.",
        ),
    ] = None
    save_total_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SAVE_TOTAL_LIMIT",
            help="Keep the newest N checkpoints; the newest valid one is never deleted.",
        ),
    ] = None
    local_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="SAFEPOINT_LOCAL_DIR",
            help="The local folder that checkpoints are written to before they are uploaded to an object store.  "
            "[a folder in ~/.cache/safepoint]",
        ),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="SAFEPOINT_KEEP",
            help="Which checkpoints to keep in the folder: newest=N, every=STEPS, best=N:METRIC[:max], younger=2h; "
            "separate several policies by commas.",
        ),
    ] = None
    store_keep: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            envvar="SAFEPOINT_STORE_KEEP",
            help="Which checkpoints to keep in the object store; same form as --keep.  [all]",
        ),
    ] = None
    on_upload_failure: Annotated[
        str,
        typer.Option(
            metavar="continue|stop",
            envvar="SAFEPOINT_ON_UPLOAD_FAILURE",
            help="What to do when checkpoints cannot be uploaded to the object store.",
        ),
    ] = "continue"
    verify_access: Annotated[
        bool,
        typer.Option(
            "--verify-access/--no-verify-access",
            envvar="SAFEPOINT_VERIFY_ACCESS",
            help="Check that the object store can be written before the model is loaded.",
        ),
    ] = True
    snapshot_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            envvar="SAFEPOINT_SNAPSHOT_STEPS",
            help="Also take a snapshot in memory every N steps, between saves; auto: as often as possible at a cost "
            "below 1 % of the training time.",
        ),
    ] = None
    snapshot_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_SNAPSHOT_SLOTS",
            help="The most snapshots that host memory may hold; 0: training waits for every save.  "
            "[depends on the size of the state]",
        ),
    ] = None
    snapshot_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            envvar="SAFEPOINT_SNAPSHOT_MEMORY",
            help="The most memory that all snapshots of one node may take, such as 8Gi.  "
            "[depends on --snapshot-slots]",
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            envvar="SAFEPOINT_GRACE",
            help="Time that the platform grants between SIGTERM and SIGKILL.",
        ),
    ] = 30.0
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar="SAFEPOINT_METRICS_PORT",
            help="Serve the progress at http://…:PORT/metrics on node 0; 0: do not serve it.  [0]",
        ),
    ] = None
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            envvar="SAFEPOINT_RESUME",
            help="Start from the newest valid checkpoint (auto), from step 0 (never), or from one checkpoint.",
        ),
    ] = "auto"
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            envvar="SAFEPOINT_FROM_SCRATCH",
            help="Start a new run; checkpoints in the folder are moved aside, not deleted.",
        ),
    ] = False
    allow_batch_change: Annotated[
        bool,
        typer.Option(
            "--allow-batch-change",
            envvar="SAFEPOINT_ALLOW_BATCH_CHANGE",
            help="Resume although the number of samples per step has changed.",
        ),
    ] = False
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Print more messages.", show_default=False)
    ] = 0

    def settings(self) -> Any:
        """The `RunSettings`, with what only variables say.

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
            verbosity=max(values.pop("verbose"), environment.verbosity),
            **values,
        )


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the parameter `options` of a command into options, behind those that the command has."""
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
