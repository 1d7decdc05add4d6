"""`TransformersTrainer`: has the parameters and rules of Red Hat's trainer of this name, and more parameters."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from safepoint.errors import UnsupportedError, UsageError
from safepoint.foundation.field_types import FLAG, NAMED, PATH, SECONDS, TEXT, Kind, check_fields, texts, whole
from safepoint.foundation.quantities import parse_whole
from safepoint.sdk.checks import check_resources, is_of_fork
from safepoint.sdk.pod_function import PodRun, original_of, pod_function
from safepoint.sdk.upstream import constants, types
from safepoint.settings.run_settings import SAVE_STRATEGIES, RunSettings
from safepoint.settings.wording import in_sdk_words
from safepoint.storage.location import parse_location

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", re.DOTALL)
_SLIP = re.compile(r"\s*(s3|pvc)(?::/?(?!/)|//|:\\|\\\\)", re.IGNORECASE)
"""A mistyped beginning of a location, such as `s3:/`, where `s3://` or `pvc://` is needed."""
_FORMS = "pvc://<claim>/<path>, s3://<bucket>/<prefix> or a path"
_NAMES = {"pvc": "claim", "s3": "bucket"}


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or whole().fits(value)


def _are_steps(value: Any) -> bool:
    if whole().fits(value):
        return value > 0
    return isinstance(value, str) and (value == "auto" or (parse_whole(value) or 0) > 0)


CUSTOM_TRAINER = {
    "func_args": NAMED.optional,
    "image": TEXT.optional,
    "packages_to_install": texts("a list of requirements").optional,
    "pip_index_urls": texts("a list of addresses"),
    "num_nodes": whole(1).optional,
    "resources_per_node": NAMED.optional,
    "env": NAMED.optional,
}
"""The fields of Kubeflow's `CustomTrainer`, with their kinds. Kubeflow itself does not check them."""

TRANSFORMERS_TRAINER = CUSTOM_TRAINER | {
    "enable_progression_tracking": FLAG,
    "metrics_port": whole(1024, 65535),
    "metrics_poll_interval_seconds": whole(5, 300),
    "enable_jit_checkpoint": FLAG,
    "output_dir": TEXT.optional,
    "data_connection_name": TEXT.optional,
    "verify_cloud_storage_access": FLAG,
    "verify_cloud_storage_ssl": FLAG,
    "grace_period_seconds": SECONDS.optional,
    "retention": Kind(
        words="a string or a mapping", fits=lambda value: TEXT.fits(value) or NAMED.fits(value)
    ).optional,
    "staging_size": Kind(words="a size in bytes, or a string such as 8Gi", fits=_is_size).optional,
    "local_limit": Kind(words="a size in bytes, a string such as 200Gi, or 'none'", fits=_is_size).optional,
    "shared_memory": Kind(words="a size in bytes, or a string such as 8Gi", fits=_is_size).optional,
    "ca_bundle": PATH.optional,
    "save_every": Kind(words="a string such as 10m, or auto", fits=TEXT.fits).optional,
    "on_upload_failure": TEXT,
    "freeze_as_last_resort": FLAG,
    "resume": TEXT,
    "from_scratch": FLAG,
    "allow_batch_change": FLAG,
    "extra_files_limit": Kind(words="a size in bytes, or a string such as 1Gi", fits=_is_size).optional,
    "snapshot_steps": Kind(words="a positive number of steps, or auto", fits=_are_steps).optional,
}

PERIODIC_CHECKPOINT_CONFIG = {"save_steps": whole(1).optional, "save_total_limit": whole(1).optional}


@dataclass
class PeriodicCheckpointConfig:
    """When to save periodically. A job that receives a request to stop saves in any case.

    Args:
        save_strategy: `steps`, `epoch`, or `no`.
        save_steps: optimizer steps between two checkpoints; required with `steps`.
        save_total_limit: how many checkpoints to keep in the output folder; None for all. With an object store, the
            limit applies to the local folder only. The newest valid checkpoint is never deleted.

    Raises:
        ValueError: a field is invalid.
    """

    save_strategy: str = "epoch"
    save_steps: int | None = None
    save_total_limit: int | None = 3

    def __post_init__(self) -> None:
        check_fields(self, PERIODIC_CHECKPOINT_CONFIG)
        if self.save_strategy not in SAVE_STRATEGIES:
            raise ValueError(f"save_strategy {self.save_strategy!r} must be one of {', '.join(SAVE_STRATEGIES)}")
        if self.save_strategy == "steps" and self.save_steps is None:
            raise ValueError("save_steps must be given with save_strategy='steps'")


@dataclass
class TransformersTrainer(types.CustomTrainer):
    """A training that saves when it is preempted, and resumes later.

    The code of the training uses a trainer of Hugging Face or TRL, or `safepoint.session`.

    This class is a subclass of Kubeflow's `CustomTrainer`.

    Args:
        func: the training: a function whose body imports and defines everything that the function needs, the path of
            a script, or the name of a module.
        func_args: the arguments of the function, as plain values by name. For a script or module, they become
            options: `{"lr": 1e-4}` becomes `--lr 0.0001`.
        packages_to_install: packages to install for this job before it runs.
        pip_index_urls: the package indexes for these packages.
        num_nodes: number of nodes; 1 when None.
        resources_per_node: `{"nvidia.com/gpu": 1, "cpu": 4, "memory": "16Gi"}`. A node has one rank for each
            GPU, or, if it requests no GPU, one for each CPU.
        env: environment variables for the training; they must not contain secrets.
        enable_progression_tracking: serve the progress of the training over HTTP.
        metrics_port: the port on the first node at which the progress is served; 1024-65535.
        metrics_poll_interval_seconds: the seconds between two reads of the progress by a cluster's controller; 5-300.
        enable_jit_checkpoint: what a job does if Kubeflow's own client submits it, and its image lacks Safepoint.
            True: the job fails. False: the job trains without Safepoint; but it fails if `save_every` is set, or if
            `func` is a script or a module. An `output_dir` sets this field to True. A job that runs under Safepoint
            saves when it receives a request to stop, even if the field is False.
        output_dir: where to write checkpoints: `pvc://<claim>/<path>`, `s3://<bucket>/<prefix>`, or a path. None
            leaves the choice to the script.
        periodic_checkpoint_config: when to save periodically; None leaves this to the script's own arguments.
        data_connection_name: the name of the Secret that has the access keys for `s3://`; on this machine, the name
            of a table in ~/.config/safepoint/connections.toml.
        verify_cloud_storage_access: before the model is loaded, check that the object store can be read and written.
        verify_cloud_storage_ssl: False accepts any certificate of the object store.
        image: the container image; it has no effect on this machine.
        grace_period_seconds: the time between SIGTERM and SIGKILL on the platform. None means 30 on this machine, and
            on a cluster the time that the runtime sets.
        retention: the checkpoints to keep in the output folder and in the object store, as policies:
            `newest=2,every=1000,best=1:eval_loss`. `{"local": …, "store": …}` sets them separately.
        staging_size: maximum memory for all snapshots of a node, as a number of bytes or a string such as `8Gi`.
        local_limit: with `s3://` on a cluster, the size limit of the local folder for checkpoints, as a number of
            bytes or a string such as `200Gi`; `none` for no limit. With None, the limit is computed from the model if
            `func_args` or the initializer names a model that is on this machine. If they name no such model, there is
            no limit.
        shared_memory: on a cluster, the size limit of /dev/shm in each pod, as a number of bytes or a string such as
            `8Gi`. Files in /dev/shm are a part of the pod's memory. With None, this memory is the only limit.
        ca_bundle: a PEM file with the CA certificates for the object store. For a job on a cluster, Safepoint sends
            the file to the pods; a path that does not exist on this machine is used as a path in the pods.
        save_every: the time between two periodic checkpoints, such as `10m`. With `auto`, Safepoint chooses the time
            from the cost of a save and the number of failures.
        snapshot_steps: the number of optimizer steps between two snapshots in memory, or `auto`.
        extra_files_limit: with `s3://`, other files in the output folder (plots, metrics, a model that the function
            saves) are uploaded when the job ends or is interrupted. This is the maximum size of these files together:
            a number of bytes, or a string such as `1Gi`; 0 for no such files. None means 10Gi.
        freeze_as_last_resort: freeze the ranks into a process image if they cannot save within the grace period; see
            docs/process-images.md. Needs root and CRIU. On a cluster, this is possible only if the job has one pod,
            and its output location is in a claim.
        on_upload_failure: when uploads fail, `continue` the training, or save and `stop` it.
        resume: where the first start of a job begins: `auto` for the newest valid checkpoint, `never` for step 0, or
            the path of a checkpoint. With `never`, all checkpoints in the output folder are moved aside. With a path,
            newer checkpoints in the output folder are moved aside. If the path names a checkpoint of Safepoint in
            another folder, all checkpoints in the output folder are moved aside. With `s3://`, `never` and a path are
            refused if the location already holds checkpoints. One exception: the path may name another
            program's checkpoint in the store, if the store holds no newer checkpoint of Safepoint.
        from_scratch: on the first start of a job, begin a new run at step 0, and move the checkpoints in the output
            folder aside. With `s3://`, the start is refused if the location already holds checkpoints.
        allow_batch_change: resume even if the number of samples per step has changed since the checkpoint.

    Raises:
        ValueError: a field is invalid.
    """

    func: Callable[..., Any] | str = field(compare=False)  # pyright: ignore[reportIncompatibleMethodOverride]
    func_args: dict[str, Any] | None = None
    image: str | None = field(default=None, kw_only=True)
    packages_to_install: list[str] | None = None
    pip_index_urls: list[str] = field(default_factory=lambda: list(constants.DEFAULT_PIP_INDEX_URLS))
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None
    enable_progression_tracking: bool = True
    metrics_port: int = 28080
    metrics_poll_interval_seconds: int = 30
    enable_jit_checkpoint: bool = False
    output_dir: str | None = None
    periodic_checkpoint_config: PeriodicCheckpointConfig | None = None
    data_connection_name: str | None = None
    verify_cloud_storage_access: bool = True
    verify_cloud_storage_ssl: bool = True
    grace_period_seconds: float | None = field(default=None, kw_only=True)
    retention: str | Mapping[str, str] | None = field(default=None, kw_only=True)
    staging_size: int | str | None = field(default=None, kw_only=True)
    local_limit: int | str | None = field(default=None, kw_only=True)
    shared_memory: int | str | None = field(default=None, kw_only=True)
    ca_bundle: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    save_every: str | None = field(default=None, kw_only=True)
    snapshot_steps: int | str | None = field(default=None, kw_only=True)
    extra_files_limit: int | str | None = field(default=None, kw_only=True)
    on_upload_failure: str = field(default="continue", kw_only=True)
    freeze_as_last_resort: bool = field(default=False, kw_only=True)
    resume: str = field(default="auto", kw_only=True)
    from_scratch: bool = field(default=False, kw_only=True)
    allow_batch_change: bool = field(default=False, kw_only=True)
    function: Callable[..., Any] | str = field(init=False, repr=False)
    """The value that was given as `func`. The field `func` holds a pod function for it; see `pod_function`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "func":
            object.__setattr__(self, "function", original_of(value))
            value = pod_function(self.function, self._pod_run)
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "func"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # The assignment makes a pod function that uses the fields of this copy.
        self.func = state["function"]  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the fields. `train` repeats this check, because fields may have been assigned since the first check.

        Raises:
            ValueError: a field is invalid.
        """
        given: Any = self.function
        if not callable(given) and not (isinstance(given, str) and given.strip()):
            raise ValueError(f"func must be a function, the path of a script or the name of a module, not {given!r}")
        check_fields(self, TRANSFORMERS_TRAINER)
        if self.output_dir:
            self.output_dir = normalize_output_dir(self.output_dir)
            self.enable_jit_checkpoint = True
        self._check_connection()
        check_resources(self.resources_per_node)
        self._check_config()
        self._check_retention()
        try:
            settings = self.run_settings()
        except UsageError as error:
            raise ValueError(in_sdk_words(str(error))) from error
        if settings.snapshot_bytes == 0:
            raise ValueError(f"staging_size {self.staging_size!r} must be more than 0")

    def _check_connection(self) -> None:
        connection, is_remote = self.data_connection_name, (self.output_dir or "").startswith("s3://")
        if is_remote and not (connection or "").strip():
            raise ValueError(
                f"output_dir {self.output_dir!r} requires data_connection_name, the name of the data connection "
                "with the object store's keys"
            )
        if connection and not is_remote:
            raise ValueError(
                f"data_connection_name {connection!r} has no effect, because output_dir is {self.output_dir!r}: "
                "remove data_connection_name, or use an output_dir s3://<bucket>/<prefix>"
            )

    def _check_config(self) -> None:
        config = self.periodic_checkpoint_config
        if config is None:
            return
        names = [item.name for item in dataclasses.fields(PeriodicCheckpointConfig)]
        if isinstance(config, type):
            name = config.__name__
            raise ValueError(f"periodic_checkpoint_config is the class {name}: use {name}()")  # noqa: TRY004  as above
        if not all(hasattr(config, name) for name in names):
            raise ValueError(f"periodic_checkpoint_config must be a PeriodicCheckpointConfig, not {config!r}")
        # Check the fields here, because an object of another class may not have checked them.
        check_fields(config, PERIODIC_CHECKPOINT_CONFIG)
        if self.save_every is not None and config.save_strategy != "no":
            raise ValueError(
                f"save_every {self.save_every!r} contradicts save_strategy {config.save_strategy!r} of "
                "periodic_checkpoint_config: remove one of them, or set save_strategy='no'"
            )

    def _check_retention(self) -> None:
        if isinstance(self.retention, Mapping):
            unknown = set(self.retention) - {"local", "store"}
            if unknown:
                keys = ", ".join(map(repr, sorted(unknown)))
                raise ValueError(f"retention has the unknown key {keys}; its keys are 'local' and 'store'")
            for name, policies in self.retention.items():
                TEXT.optional.check(f"retention[{name!r}]", policies)

    def _policies(self) -> tuple[str | None, str | None]:
        """The retention policies for the output folder and for the object store; None if there are no policies."""
        if self.retention is None or isinstance(self.retention, str):
            return self.retention, self.retention if (self.output_dir or "").startswith("s3://") else None
        return self.retention.get("local"), self.retention.get("store")

    @property
    def checkpoint_config(self) -> PeriodicCheckpointConfig | None:
        """The field `periodic_checkpoint_config`. If only `save_every` is set: a config with the strategy `no`."""
        if self.periodic_checkpoint_config is None and self.save_every is not None:
            return PeriodicCheckpointConfig(save_strategy="no")
        return self.periodic_checkpoint_config

    def run_settings(self, base: RunSettings | None = None) -> RunSettings:
        """The settings of the run.

        Args:
            base: the values of the settings that this trainer does not set; None for the defaults.

        Raises:
            UsageError: an option is invalid.
        """
        config = self.checkpoint_config
        keep, store_keep = self._policies()
        given: dict[str, Any] = {
            "output_dir": self.output_dir or None,
            "save_every": self.save_every,
            "keep": keep,
            "store_keep": store_keep,
            "grace_s": None if self.grace_period_seconds is None else float(self.grace_period_seconds),
            "snapshot_steps": None if self.snapshot_steps is None else str(self.snapshot_steps),
            "extra_files_limit": None if self.extra_files_limit is None else str(self.extra_files_limit),
            "snapshot_memory": None if self.staging_size is None else str(self.staging_size),
            "metrics_port": self.metrics_port if self.enable_progression_tracking else None,
            "verify_access": None if self.verify_cloud_storage_access else False,
            "on_upload_failure": None if self.on_upload_failure == "continue" else self.on_upload_failure,
            "freeze_as_last_resort": self.freeze_as_last_resort or None,
            "resume": None if self.resume == "auto" else self.resume,
            "from_scratch": self.from_scratch or None,
            "allow_batch_change": self.allow_batch_change or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if config is not None or self.save_every is not None:
            given |= dict.fromkeys(("save_strategy", "save_steps")) | {"save_every": self.save_every}
        if config is not None:
            given["save_total_limit"] = config.save_total_limit
            if self.save_every is None:
                given["save_strategy"] = config.save_strategy
            if config.save_strategy == "steps":
                given["save_steps"] = config.save_steps
        return dataclasses.replace(base or RunSettings(), **given)

    def _pod_run(self) -> PodRun:
        defaults = RunSettings().to_environment()
        settings = dataclasses.replace(self.run_settings(), wording="sdk").to_environment().items()
        environ = {variable: text for variable, text in settings if text and text != defaults[variable]}
        return PodRun(
            func_args=self.func_args,
            environ=environ | self.storage_environment(),
            needs_safepoint=bool(self.enable_jit_checkpoint or self.save_every or isinstance(self.function, str)),
        )

    def storage_environment(self) -> dict[str, str]:
        """Environment variables for the connection to the object store. They contain no keys."""
        environ = {} if self.verify_cloud_storage_ssl else {"SAFEPOINT_VERIFY_TLS": "0"}
        if self.ca_bundle is not None:
            environ["AWS_CA_BUNDLE"] = os.path.abspath(self.ca_bundle)
        return environ


def own_trainer(trainer: Any, *, is_accepted: Callable[[Any], bool] = lambda trainer: False) -> Any:
    """Convert the `TransformersTrainer` of Red Hat's version of the SDK; return a trainer of another SDK unchanged.

    Args:
        trainer: the trainer.
        is_accepted: returns whether the backend takes another trainer of Red Hat's version; such a trainer is
            returned unchanged.

    Raises:
        UnsupportedError: this is a trainer of Red Hat's version, but not its `TransformersTrainer`.
        ValueError: a field is invalid.
    """
    if isinstance(trainer, types.CustomTrainer) or not is_of_fork(trainer) or is_accepted(trainer):
        return trainer
    name = type(trainer).__name__
    if name != TransformersTrainer.__name__:
        raise UnsupportedError(
            f"{name} of Red Hat's SDK is not supported; nothing was started",
            hint="call the training from a function, and pass it to a TransformersTrainer",
        )
    own = {item.name for item in dataclasses.fields(TransformersTrainer) if item.init}
    given = cast("dict[str, Any]", vars(trainer))
    return TransformersTrainer(**{name: value for name, value in given.items() if name in own})


def normalize_output_dir(text: str) -> str:
    """Check an output location. Return it with a lower-case scheme, without extra slashes; a path is unchanged.

    Raises:
        ValueError: the scheme is not supported, the bucket or claim is missing, or the location is invalid.
    """
    if text != text.strip():
        raise ValueError(f"output_dir {text!r} begins or ends with white space; use {_FORMS}, or None")
    match = _SCHEME.fullmatch(text)
    slip = _SLIP.match(text)
    if slip is not None and (match is None or match[2] is None):
        scheme, rest = slip[1].lower(), text[slip.end() :]
        raise ValueError(f"output_dir {text!r} must begin with {scheme}://, as in {scheme}://{rest}")
    if match is None:
        return text
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if scheme not in _NAMES or slashes is None:
        raise ValueError(f"output_dir {text!r} has the scheme {scheme!r}, which is not supported; use {_FORMS}")
    if not rest.partition("/")[0].strip():
        raise ValueError(f"output_dir {text!r} has no {_NAMES[scheme]}; use {_FORMS}")
    try:
        return str(parse_location(f"{scheme}://{rest}"))
    except ValueError as error:
        raise ValueError(f"output_dir: {error}") from error
