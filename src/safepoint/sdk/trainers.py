"""`TransformersTrainer`: the parameters and rules of the trainer of this name by Red Hat, and additional ones."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from safepoint.errors import UsageError
from safepoint.foundation.field_types import FLAG, NAMED, PATH, SECONDS, TEXT, Kind, check_fields, texts, whole
from safepoint.sdk.pod_function import PodRun, original_of, pod_function
from safepoint.sdk.upstream import constants, types
from safepoint.settings.run_settings import SAVE_STRATEGIES, RunSettings
from safepoint.storage.location import parse_location

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", re.DOTALL)
_FORMS = "pvc://<claim>/<path>, s3://<bucket>/<prefix> or a path"
_NAMES = {"pvc": "claim", "s3": "bucket"}
_OPTION = re.compile(r"--[a-z-]+")
_FIELDS = {
    "--keep": "retention",
    "--store-keep": "retention",
    "--snapshot-memory": "staging_size",
    "--grace": "grace_period_seconds",
}
"""For an option of `safepoint run`: the field that sets it, if the field has another name than the option."""


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or whole().fits(value)


def _are_steps(value: Any) -> bool:
    text = str(value) if whole().fits(value) else value
    return isinstance(text, str) and (text == "auto" or (text.isdecimal() and int(text) > 0))


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
    "ca_bundle": PATH.optional,
    "save_every": Kind(words="a string such as 10m, or auto", fits=TEXT.fits).optional,
    "snapshot_steps": Kind(words="a positive number of steps, or auto", fits=_are_steps).optional,
}

PERIODIC_CHECKPOINT_CONFIG = {"save_steps": whole(1).optional, "save_total_limit": whole(1).optional}


@dataclass
class PeriodicCheckpointConfig:
    """When to save periodically. When the job is asked to stop, it always saves.

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
    """A training that survives preemption. Its code uses a trainer of Hugging Face or TRL, or `safepoint.session`.

    A subclass of Kubeflow's `CustomTrainer`.

    Args:
        func: the training: a function that imports and defines everything it needs inside it, the path of a script,
            or the name of a module.
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
        metrics_poll_interval_seconds: how often the controller of a cluster reads the progress; 5-300.
        enable_jit_checkpoint: save after each epoch if neither `periodic_checkpoint_config` nor `save_every` is set.
            An `output_dir` sets this field to True. When the job is asked to stop, Safepoint saves even if the field
            is False. There is one exception: Kubeflow's own client submits the job, the image lacks Safepoint, and
            `func` is a function. If the field is True or `save_every` is set, such a job fails; otherwise it trains
            without Safepoint.
        output_dir: where to write checkpoints: `pvc://<claim>/<path>`, `s3://<bucket>/<prefix>`, or a path. None
            leaves the choice to the script.
        periodic_checkpoint_config: when to save periodically.
        data_connection_name: the name of the Secret that has the access keys for `s3://`; on this machine, the name
            of a table in ~/.config/safepoint/connections.toml.
        verify_cloud_storage_access: before the model is loaded, check that the object store can be written.
        verify_cloud_storage_ssl: False accepts any certificate of the object store.
        image: the container image; it has no effect on this machine.
        grace_period_seconds: the time between SIGTERM and SIGKILL on the platform. None means 30 on this machine, and
            on a cluster the time that the runtime sets.
        retention: the checkpoints to keep in the output folder and in the object store, as policies:
            `newest=2,every=1000,best=1:eval_loss`. `{"local": …, "store": …}` sets them separately.
        staging_size: maximum memory for all snapshots of a node, as a number of bytes or a string such as `8Gi`.
        ca_bundle: a PEM file with the CA certificates for the object store. A job on a cluster brings it along; if
            there is no such file on this machine, it is a path in the pods.
        save_every: the time between two periodic checkpoints, such as `10m`. With `auto`, Safepoint chooses the time
            by the cost of a save.
        snapshot_steps: the number of optimizer steps between two snapshots in memory, or `auto`.

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
    ca_bundle: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    save_every: str | None = field(default=None, kw_only=True)
    snapshot_steps: int | str | None = field(default=None, kw_only=True)
    function: Callable[..., Any] | str = field(init=False, repr=False)
    """The value given as `func`. The field `func` is replaced by its pod function; see `pod_function`."""

    def __post_init__(self) -> None:
        self.function = original_of(self.func)
        given: Any = self.function
        if not callable(given) and not (isinstance(given, str) and given.strip()):
            raise ValueError(f"func must be a function, the path of a script or the name of a module, not {given!r}")
        check_fields(self, TRANSFORMERS_TRAINER)
        if self.output_dir:
            self.output_dir = normalize_output_dir(self.output_dir)
            self.enable_jit_checkpoint = True
            if self.output_dir.startswith("s3://") and not self.data_connection_name:
                raise ValueError(
                    f"output_dir {self.output_dir!r} requires data_connection_name, the name of the data connection "
                    "with the object store's keys"
                )
        self._check_config()
        self._check_retention()
        try:
            settings = self.run_settings()
        except UsageError as error:
            raise ValueError(_OPTION.sub(_field_of, str(error))) from error
        if settings.snapshot_bytes == 0:
            raise ValueError(f"staging_size {self.staging_size!r} must be more than 0")
        self.func = pod_function(self.function, self._pod_run)  # pyright: ignore[reportIncompatibleMethodOverride]

    def _check_config(self) -> None:
        config = self.periodic_checkpoint_config
        if config is None:
            return
        names = [item.name for item in dataclasses.fields(PeriodicCheckpointConfig)]
        if not all(hasattr(config, name) for name in names):
            raise ValueError(f"periodic_checkpoint_config must be a PeriodicCheckpointConfig, not {config!r}")
        check_fields(config, PERIODIC_CHECKPOINT_CONFIG)  # another class may not have checked its fields
        if self.save_every is not None and config.save_strategy != "no":
            raise ValueError(
                f"save_every {self.save_every!r} contradicts save_strategy {config.save_strategy!r} of "
                "periodic_checkpoint_config: remove one of them, or set save_strategy='no'"
            )

    def _check_retention(self) -> None:
        if isinstance(self.retention, Mapping):
            unknown = set(self.retention) - {"local", "store"}
            if unknown:
                raise ValueError(f"retention has {', '.join(map(repr, sorted(unknown)))}; use local and store")
            for name, policies in self.retention.items():
                TEXT.optional.check(f"retention[{name!r}]", policies)

    def _policies(self) -> tuple[str | None, str | None]:
        """The retention policies for the output folder, and those for the object store."""
        if self.retention is None or isinstance(self.retention, str):
            return self.retention, self.retention if (self.output_dir or "").startswith("s3://") else None
        return self.retention.get("local"), self.retention.get("store")

    @property
    def checkpoint_config(self) -> PeriodicCheckpointConfig | None:
        """When to save periodically, with defaults applied; None leaves this to the script."""
        if self.periodic_checkpoint_config is None and self.enable_jit_checkpoint:
            return PeriodicCheckpointConfig(save_strategy="no" if self.save_every is not None else "epoch")
        return self.periodic_checkpoint_config

    def run_settings(self, base: RunSettings | None = None) -> RunSettings:
        """The settings of the run.

        Args:
            base: gives the values of those settings that this trainer does not set.

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
            "snapshot_memory": None if self.staging_size is None else str(self.staging_size),
            "metrics_port": self.metrics_port if self.enable_progression_tracking else None,
            "verify_access": None if self.verify_cloud_storage_access else False,
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
        settings = self.run_settings().to_environment().items()
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


def normalize_output_dir(text: str) -> str:
    """Check an output location. Return it with a lower-case scheme, without extra slashes; a path is unchanged.

    Raises:
        ValueError: the scheme is not supported, the bucket or claim is missing, or the location is invalid.
    """
    match = _SCHEME.fullmatch(text)
    if match is None:
        return text
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if scheme not in _NAMES or slashes is None:
        raise ValueError(f"output_dir {text!r} has the scheme {scheme!r}, which is not supported; use {_FORMS}")
    if not rest.partition("/")[0]:
        raise ValueError(f"output_dir {text!r} has no {_NAMES[scheme]}; use {_FORMS}")
    try:
        return str(parse_location(f"{scheme}://{rest}"))
    except ValueError as error:
        raise ValueError(f"output_dir: {error}") from error


def _field_of(option: re.Match[str]) -> str:
    """The field that sets an option. It replaces the option in a message of `RunSettings`."""
    return _FIELDS.get(option[0], option[0].removeprefix("--").replace("-", "_"))
