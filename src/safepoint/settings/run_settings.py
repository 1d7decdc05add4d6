"""The options of a run, which the ranks receive as SAFEPOINT_* variables, and the location of the run's output."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from safepoint.checkpoint.local.retention import parse_policies
from safepoint.errors import UsageError
from safepoint.foundation.configuration import xdg_folder
from safepoint.foundation.events.stream import EVENTS_NAME
from safepoint.foundation.quantities import parse_bytes, parse_duration, parse_flag, parse_whole
from safepoint.storage.location import CLAIMS, Location, parse_location, resolve_claim

SAVE_STRATEGIES = ("steps", "epoch", "no")
STATUS_URL = "KUBEFLOW_TRAINER_SERVER_URL"
"""The variable with the URL to which a job sends its status. A cluster sets this variable."""
UPLOAD_FAILURE_ANSWERS = ("continue", "stop")
_PREFIX = "SAFEPOINT_"
_MARK = re.compile(r"[A-Za-z0-9-]{1,64}")
_LEAVE_OUT = "leave one of them out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The options of a run. None leaves the script's own setting in effect."""

    output_dir: str | None = None
    """The location of the checkpoints, instead of the script's own output_dir."""
    save_strategy: str | None = None
    """`steps`, `epoch`, or `no` for no periodic checkpoints. After a stop signal, the run saves in any case."""
    save_steps: int | None = None
    """Optimizer steps between periodic checkpoints; implies `steps`."""
    save_every: str | None = None
    """Time between periodic checkpoints, such as `10m`, or `auto`; replaces steps and epochs."""
    save_total_limit: int | None = None
    """How many checkpoints to keep. The newest valid checkpoint is never deleted."""
    local_dir: str | None = None
    """With an object store, the folder that checkpoints are written to before they are uploaded; None chooses a
    folder below the user's cache folder."""
    keep: str | None = None
    """Which checkpoints stay in the folder, in addition to the checkpoints that `save_total_limit` keeps. An example:
    `newest=2,every=1000,best=1:eval_loss`."""
    store_keep: str | None = None
    """Which checkpoints stay in the object store, in the syntax of `keep`; None keeps all."""
    extra_files_limit: str = "10Gi"
    """The limit for the total size of the other files in the output folder, such as plots, that are uploaded at the
    end; 0 uploads none."""
    on_upload_failure: str = "continue"
    """When uploads fail: `continue` the training, or save and `stop` it."""
    verify_access: bool = True
    """Before the model is loaded, write, read, list and delete one small object in the object store."""
    grace_s: float = 30.0
    """Seconds that the platform grants between SIGTERM and SIGKILL."""
    freeze_as_last_resort: bool = False
    """After a stop signal, make a process image if the ranks cannot save before the deadline."""
    resume: str = "auto"
    """Where to start. `auto`: from the newest valid checkpoint. `never`: at step 0. Or the path of a checkpoint."""
    from_scratch: bool = False
    """Start a new run, and move the checkpoints in the folder aside. A restart of the ranks does not repeat this."""
    allow_batch_change: bool = False
    """Resume even if a step has another number of samples than in the run that wrote the checkpoint."""
    peer_timeout_s: float = 1800.0
    """How long, in seconds, a rank waits for another rank that is running but does not answer."""
    snapshot_steps: str | None = None
    """Optimizer steps between snapshots in memory. With `auto`, snapshots are as frequent as possible while they cost
    at most 1 % of the time. With None, there is a snapshot for each save only."""
    snapshot_slots: int | None = None
    """How many snapshots host memory may hold; 0 makes saves synchronous, None chooses by the size of the state."""
    metrics_port: int | None = None
    """The port on which the first node's launcher serves the progress of the run; 0 or None for none."""
    metrics_host: str | None = None
    """The address that `metrics_port` listens on. None: all addresses in a pod, 127.0.0.1 elsewhere."""
    termination_log: str | None = None
    """The file for the termination message; None for /dev/termination-log, if that file exists."""
    snapshot_memory: str | None = None
    """How much memory all snapshots of one node may take, such as `8Gi`. If None, `snapshot_slots` is the limit."""
    preload: bool = True
    """Copy the ranks of a node from one process that has imported their packages."""
    verbosity: int = 0
    """0: one line per event; more: details."""
    wording: str = "options"
    """How messages name options: as `options`, or as the fields of the SDK; one of `wording.WORDINGS`."""
    record_folder: str | None = None
    """The folder in which each rank records its end for the launcher; set by the launcher."""
    launcher_pid: int | None = None
    """The pid of the launcher; set by the launcher. If the launcher dies, the rank ends."""
    keeper: str | None = field(default=None, repr=False)
    """The key by which ranks find the node's keeper (the process that writes snapshots to disk); set by the
    launcher."""
    has_begun: bool = False
    """Whether an earlier launcher of the job has started training. If so, `resume` and `from_scratch` have been
    applied already, and are not applied again."""
    first_start: str | None = None
    """For a job whose starts all have the same options: the name of a mark, a small file or object that the job's
    first start leaves in the output location. Starts that find the mark do not apply `resume` and `from_scratch`."""
    job_dir: str | None = None
    """A folder of the job for its progress and its events; set by the process that starts the launcher."""

    def __post_init__(self) -> None:
        for option, text, parse in (
            ("--output-dir", self.output_dir, parse_location),
            ("--keep", self.keep, parse_policies),
            ("--store-keep", self.store_keep, parse_policies),
            ("--snapshot-memory", self.snapshot_memory, parse_bytes),
            ("--extra-files-limit", self.extra_files_limit, parse_bytes),
        ):
            try:
                if text is not None:
                    parse(text)
            except ValueError as error:
                raise UsageError(f"{option}: {error}") from error
        self._check_saves()
        steps, slots, port = self.snapshot_steps, self.snapshot_slots, self.metrics_port
        is_interval = steps is None or steps == "auto" or bool(parse_whole(steps))
        _check(is_interval, f"--snapshot-steps {steps!r} must be a positive number of steps, or auto")
        _check(slots is None or 0 <= slots <= 8, f"--snapshot-slots {slots} must be from 0 to 8")
        _check(slots != 0 or steps is None, "--snapshot-slots 0 contradicts --snapshot-steps", hint=_LEAVE_OUT)
        is_port = port is None or 0 <= port < 65536
        _check(is_port, f"--metrics-port {port} must be a port number, or 0 for none")
        for option, seconds in (("--grace", self.grace_s), ("SAFEPOINT_PEER_TIMEOUT", self.peer_timeout_s)):
            _check(0 < seconds < float("inf"), f"{option} {seconds} must be a positive number of seconds")
        first = self.first_start
        _check(
            first is None or bool(_MARK.fullmatch(first)),
            f"SAFEPOINT_FIRST_START {first!r} must be 1 to 64 letters, digits and dashes",
        )
        _check(bool(self.resume), "--resume is empty", hint="use auto, never, or the path of a checkpoint")
        is_new_run = not self.from_scratch or self.resume in {"auto", "never"}
        _check(is_new_run, f"--from-scratch contradicts --resume {self.resume}", hint=_LEAVE_OUT)

    def _check_saves(self) -> None:
        steps, strategy, every, limit = self.save_steps, self.save_strategy, self.save_every, self.save_total_limit
        for option, value, known in (
            ("--on-upload-failure", self.on_upload_failure, UPLOAD_FAILURE_ANSWERS),
            ("--save-strategy", strategy, (None, *SAVE_STRATEGIES)),
        ):
            _check(
                value in known, f"{option} {value!r} is unknown", hint=f"use one of {', '.join(filter(None, known))}"
            )
        _check(
            steps is None or steps >= 1,
            f"--save-steps {steps} must be at least 1",
            hint="use --save-strategy no for no periodic checkpoints",
        )
        _check(
            steps is None or strategy in {None, "steps"},
            f"--save-steps {steps} contradicts --save-strategy {strategy}",
            hint=_LEAVE_OUT,
        )
        _check(
            limit is None or limit >= 1,
            f"--save-total-limit {limit} must be at least 1",
            hint="leave it out to keep every checkpoint",
        )
        if every is None:
            return
        other = f"--save-strategy {strategy}" if steps is None else "--save-steps"
        is_only = steps is None and strategy is None
        _check(is_only, f"--save-every {every} contradicts {other}", hint=_LEAVE_OUT)
        try:
            every_s = float("inf") if every == "auto" else parse_duration(every)
        except ValueError as error:
            raise UsageError(f"--save-every: {error}", hint="write a time such as 10m, or auto") from error
        _check(every_s > 0, f"--save-every {every} must be longer than 0 s")

    @property
    def snapshot_bytes(self) -> int | None:
        """`snapshot_memory` in bytes; None if it is not set."""
        return None if self.snapshot_memory is None else parse_bytes(self.snapshot_memory)

    @property
    def job_events(self) -> Path | None:
        """The file of the job's own stream of events; None if the job has no folder."""
        return Path(self.job_dir) / EVENTS_NAME if self.job_dir else None

    @property
    def progress_places(self) -> list[Path]:
        """The files for the first rank's progress, in addition to the file in the output folder."""
        # This import is not at the top, because all commands and the SDK import this module.
        from safepoint.progress.record import PROGRESS_NAME

        return [Path(folder) / PROGRESS_NAME for folder in (self.record_folder, self.job_dir) if folder]

    @property
    def margin_s(self) -> float:
        """Every rank has to exit this many seconds before the platform's SIGKILL: a fifth of `grace_s`, at most 3."""
        return min(3.0, 0.2 * self.grace_s)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "RunSettings":
        """Read SAFEPOINT_* variables. If a variable is unset or empty, the setting has its default.

        Raises:
            UsageError: a value is invalid.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for setting in fields(cls):
            text = environ.get(variable(setting.name), "")
            if text.strip():
                values[setting.name] = _parse(variable(setting.name), text, _kind(setting.type))
        return cls(**values)  # pyright: ignore[reportArgumentType]

    def of_job(self) -> "RunSettings":
        """These settings for a job.

        A job has several starts, and `never` applies to the first start only. So `from_scratch` replaces `never`.
        """
        if self.resume != "never":
            return self
        return replace(self, resume="auto", from_scratch=True)

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` reads equal settings. An empty string stands for None."""
        texts: dict[str, str] = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            texts[variable(setting.name)] = "" if value is None else str(int(value) if value is True else value)
        return texts


def variable(setting: str) -> str:
    """The environment variable of a setting: `grace_s` → `SAFEPOINT_GRACE`."""
    return _PREFIX + setting.removesuffix("_s").upper()


def _check(is_valid: bool, message: str, *, hint: str | None = None) -> None:
    if not is_valid:
        raise UsageError(message, hint=hint)


def _kind(annotation: object) -> str:
    """The first type that an annotation names: `int | None` → `int`."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" | ")[0]


def _parse(name: str, text: str, kind: str) -> object:
    try:
        if kind == "bool":
            return parse_flag(name, text)
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError as error:
        what = {"bool": "1 or 0", "int": "a whole number", "float": "a number of seconds"}[kind]
        raise UsageError(f"{name}={text!r} must be {what}") from error
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """The folder, and the object store if there is one, to which a run writes its checkpoints.

    Args:
        folder: the folder that the ranks write to and commit in.
        remote: the object store that committed checkpoints are published to; None if they stay in `folder`.
    """

    folder: Path
    remote: Location | None = None


def place_output(text: str, *, local_dir: str | None, environ: Mapping[str, str] | None = None) -> OutputPlace:
    """The folder and the object store for the checkpoints of a run with this `--output-dir`.

    Args:
        text: a path, `file://`, `pvc://`, `s3://`, `gs://` or `az://`.
        local_dir: with an object store, the folder that checkpoints are written to before they are uploaded. None
            chooses a folder below the user's cache folder: always the same folder for the same location.
        environ: the environment with the variables for claims (volumes) and the cache folder; None for the
            environment of this process.

    Raises:
        UsageError: `text` is invalid, names a claim that has no folder on this machine, or names a location inside
            a checkpoint in an object store.
    """
    environ = os.environ if environ is None else environ
    try:
        location = resolve_claim(parse_location(text), environ.get(CLAIMS, ""))
    except ValueError as error:
        raise UsageError(f"{error}; training was not started") from error
    if not location.is_remote:
        return OutputPlace(folder=location.folder)
    # This import is not at the top, because every command imports this module.
    from safepoint.checkpoint.format.catalog import step_of

    if any(step_of(Path(name)) is not None for name in location.path.split("/")):
        raise UsageError(
            f"{text} is inside a checkpoint, and further objects there would make it invalid; nothing was written",
            hint="name the location that contains the checkpoint",
        )
    return OutputPlace(folder=Path(local_dir) if local_dir else _cache_folder(location, environ), remote=location)


def _cache_folder(location: Location, environ: Mapping[str, str]) -> Path:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{location.bucket}-{location.path}").strip("-")[:60]
    unique = hashlib.sha256(str(location).encode()).hexdigest()[:8]
    return xdg_folder("XDG_CACHE_HOME", ".cache", environ) / "safepoint" / "outputs" / f"{readable}-{unique}"
