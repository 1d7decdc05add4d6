"""What users and their programs rely on, written down: commands, options, variables, exit codes, JSON, events,
metrics, and the names and signatures of Python.

`make surface` writes it into `tests/unit/surface.json`; the diff of that file is what a change does to users.
New commands are found by themselves; to hold one to the keys of its JSON, give it a line in `documents`.
"""

import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from typer.core import TyperArgument, TyperCommand, TyperOption

import safepoint as package
from safepoint import sdk
from safepoint.cli.lazy import walk
from safepoint.cli.main import root
from safepoint.doctor import examination
from safepoint.errors import ExitCode
from safepoint.foundation import events
from safepoint.foundation.events.stream import Event
from safepoint.jobs.local import local_jobs
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.progress import prometheus_text
from safepoint.progress.record import PROGRESS_NAME, Progress, SaveStatistics, SpaceRecord, State
from safepoint.progress.trainer_status import TrainerStatus
from safepoint.sdk.upstream import trainer as kubeflow
from safepoint.settings.run_settings import RunSettings, variable
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.protection.keys import ImageKey
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.criu_images import add_image

SNAPSHOT = Path(__file__).parents[1] / "unit" / "surface.json"
_SOURCES = Path(package.__file__).parent
_VARIABLE = re.compile(r"\b(?:SAFEPOINT|PET|AWS|KUBEFLOW|XDG)_[A-Z0-9_]*[A-Z0-9]\b")
_READ = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"([A-Z][A-Z0-9_]*)\"""")
"""Any other variable, where it is read by name."""
_BETWEEN_PROCESSES = {"wording", "record_folder", "launcher_pid", "keeper", "has_begun", "first_start"}
"""Settings that no person sets: those of the launcher for its ranks, of `submit` for pods, and of the SDK."""
_METRICS = ("train_metrics", "eval_metrics", "trainMetrics", "evalMetrics")
_OPEN = {
    "libraries",
    "metrics",
    "base",
    "local",
    "pvc",
    "train_metrics",
    "eval_metrics",
    "trainMetrics",
    "evalMetrics",
}
"""Objects whose keys are data; those of `progress` are written down once, as `progress.json`."""


def surface() -> dict[str, Any]:
    """The whole surface, sorted."""
    return {
        "commands": {" ".join(path): _parameters(command) for path, command in walk(root())},
        "variables": sorted(_variables()),
        "exit_codes": {code.name: int(code) for code in ExitCode},
        "python": {name: _signatures(getattr(package, name)) for name in sorted({*package.__all__} - _KUBEFLOWS)}
        | {f"sdk.{name}": _signatures(getattr(sdk, name)) for name in sorted({*sdk.__all__} - {*package.__all__})},
        "events": {_event_name(kind): _fields(kind) for kind in sorted(_kinds_of_events(), key=_event_name)},
        "metrics": _metrics(),
        "json": {name: _shape(document) for name, document in sorted(_documents().items())},
    }


_KUBEFLOWS = {*kubeflow.__all__} - {"TrainerClient"}
"""Names that `safepoint` has from Kubeflow's SDK, whose signatures are those of its release."""


def _parameters(command: TyperCommand) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for param in command.params:
        if isinstance(param, TyperArgument):
            found[param.metavar or param.name] = {"argument": "required" if param.required else "optional"}
        elif isinstance(param, TyperOption):
            facts = {
                "also": [*param.opts[1:], *param.secondary_opts],
                "takes": None if param.is_flag or param.count else param.metavar or "text",
                "repeated": bool(param.multiple or param.count),
                "required": param.required,
                "default": param.default if isinstance(param.default, bool | int | float | str) else None,
                "variables": [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or []),
            }
            found[param.opts[0]] = {
                name: value
                for name, value in facts.items()
                if value is not None and value is not False and value != []
            }
    return found


def _signatures(value: Any) -> Any:
    """Signatures of a function, or of a class's own methods; values that differ by machine get a name."""
    if not isinstance(value, type):
        return _signature(value) if callable(value) else type(value).__name__
    methods = {name: method for name, method in vars(value).items() if not name.startswith("_") and callable(method)}
    return {"": _signature(value)} | {name: _signature(method) for name, method in methods.items()}


def _signature(function: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self":
            default = "required" if parameter.default is parameter.empty else _default(parameter.default)
            by_name = parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD}
            found[f"*, {name}" if by_name else name] = default
    return found


def _default(value: Any) -> str:
    if value == sys.executable:
        return "sys.executable"
    text = repr(value)
    return "computed" if "factory" in text or " at 0x" in text else text


def _kinds_of_events() -> list[type[Event]]:
    for module in pkgutil.iter_modules(events.__path__):
        importlib.import_module(f"{events.__name__}.{module.name}")
    return [kind for kind in Event.__subclasses__() if kind.__module__.startswith(f"{events.__name__}.")]


def _event_name(kind: type[Event]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _fields(kind: type[Any]) -> dict[str, str]:
    return {item.name: item.type if isinstance(item.type, str) else _type_name(item.type) for item in fields(kind)}


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


_PROGRESS = Progress(
    time="2026-01-31T09:30:00.000Z",
    state=State.TRAINING,
    step=40,
    max_steps=100,
    epoch=0.4,
    num_epochs=1.0,
    loss=2.5,
    train_metrics={"lr": 0.1},
    eval_metrics={"eval_loss": 2.5},
    step_s=0.5,
    samples_per_step=8,
    resumed_step=10,
    safe_step=30,
    safe_time="2026-01-31T09:29:00.000Z",
    snapshot_step=35,
    saves=SaveStatistics(
        count=2, last_stall_s=0.1, mean_stall_s=0.1, last_durable_s=1.5, last_bytes=9, expected_s=1.5
    ),
    space=(
        SpaceRecord(
            place="output folder", free_inodes=9, saves_left=3, remaining_s=2400.0, is_low=True, size_bytes=10**12
        ),
        SpaceRecord(place="temporary folder"),
    ),
)


def _metrics() -> dict[str, Any]:
    """What a run serves and posts, and `progress.json`."""
    status = TrainerStatus.of(_PROGRESS, has_ended=False)
    families = re.findall(r"^# TYPE (\S+) (\S+)$", prometheus_text.render(_PROGRESS, now_s=0), re.MULTILINE)
    return {
        "progress.json": _shape(json.loads(_PROGRESS.to_bytes()), json.loads(_EMPTY.to_bytes())),
        "/metrics": _shape(json.loads(status.to_bytes())),
        "status update": _shape(json.loads(status.to_request())),
        "/metrics/prometheus": dict(families),
    }


_EMPTY = Progress(time="", state=State.TRAINING)


def _variables() -> set[str]:
    found = {variable(item.name) for item in fields(RunSettings) if item.name not in _BETWEEN_PROCESSES}
    for path in _SOURCES.rglob("*.py"):
        text = path.read_text()
        found.update(_VARIABLE.findall(text), _READ.findall(text))
    return found - {variable(name) for name in _BETWEEN_PROCESSES}


def _documents() -> dict[str, Any]:
    """The `--json` output of every command, made in a folder of its own."""
    with tempfile.TemporaryDirectory() as text, mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("SAFEPOINT_", "PET_", "AWS_"))]:
            del os.environ[name]
        os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_STATE_HOME"] = text
        os.environ["SAFEPOINT_GPU_SLOTS"] = "0"
        here = os.getcwd()
        os.chdir(text)
        try:
            return _asked(Path(text))
        finally:
            os.chdir(here)


def _asked(folder: Path) -> dict[str, Any]:
    output = prepared(folder / "out")
    for step in (10, 20, 30):
        commit(output, step)
    (output.root / "checkpoint-20" / "model.safetensors").unlink()
    for number, key in enumerate((b"1", b"2")):
        location = ImageLocation(folder / "images", ImageKey(key * 32))
        add_image(location, folder / f"dump-{number}", {100: b"x" * 4096})
    (folder / "safepoint.toml").write_text("[run]\ngrace = 40\n")
    documents: dict[str, tuple[str, ...]] = {
        "checkpoints list": ("out",),
        "checkpoints show": ("out",),
        "checkpoints verify": ("out",),
        "checkpoints prune": ("out", "--keep", "newest=1", "--dry-run"),
        "checkpoints copy": ("out/checkpoint-10", "copy"),
        "checkpoints export": ("out", "model"),
        "checkpoints diff": ("out/checkpoint-10", "out/checkpoint-30"),
        "checkpoints repair": ("out", "--dry-run"),
        "images list": ("images",),
        "images show": ("images",),
        "images verify": ("images/image-1", "--deep"),
        "images copy": ("images", "copies"),
        "images prune": ("images", "--keep", "newest=1"),
        "config show": ("--all",),
        "doctor": ("--output-dir", "out"),
        "pack": ("-o", "safepoint.pyz"),
        "plan storage": ("--params", "8B", "--compare", "2x1", "1x2"),
        "plan interval": ("--mtbf", "4h", "--stall", "2s", "--svg", "interval.svg"),
        "plan cost": ("--interval", "1h", "--announced", "0.5", "--durable", "5h"),
        "plan simulate": ("--ranks", "8", "--days", "1", "--trials", "2", "--svg", "ettr.svg"),
    }
    found: dict[str, Any] = {}
    with mock.patch.object(examination, "look_at_torch", return_value=None):
        for name, arguments in documents.items():
            found[name] = safepoint(*name.split(), *arguments, "--json").document
    found |= _asked_of_jobs(folder)
    found["every failure, on stderr"] = safepoint("checkpoints", "list", "nowhere", "--json").exit_error
    return found


def _asked_of_jobs(folder: Path) -> dict[str, Any]:
    """The output of commands about jobs that are only in the history; no supervisor is started."""
    (folder / "train.py").touch()
    with (
        mock.patch.object(local_jobs, "start_supervisor"),
        mock.patch.object(local_jobs, "start_missing_supervisors"),
        mock.patch.object(LocalJobs, "_remove", _forget),
    ):
        found = {"submit": safepoint("submit", "--json", "--name", "tiny", "train.py").document}
        with History() as history:
            history.begin_attempt("tiny", 1, 1)
            history.end_attempt("tiny", 1, outcome="Suspended", exit_code=75)
            history.request("tiny", RequestedAction.SUSPEND, actor="me", cause="lunch")
            history.become("tiny", JobState.SUSPENDED, actor="me", safe_step=30, exit_code=75, attempt=1)
        logs = job_folder("tiny") / "logs"
        logs.mkdir()
        (logs / "rank-0.log").write_text("hello\n")
        (job_folder("tiny") / PROGRESS_NAME).write_bytes(_PROGRESS.to_bytes())
        for name, arguments in {
            "list": (),
            "status": ("tiny",),
            "logs": ("tiny",),
            "watch": ("tiny",),
            "events": ("tiny",),
            "suspend": ("tiny",),
            "scale": ("tiny", "--nnodes", "2"),
            "resume": ("tiny",),
            "delete": ("tiny",),
        }.items():
            outcome = safepoint(name, *arguments, "--json")
            assert outcome.code == 0, outcome.stderr
            found[name] = outcome.document
        # What happened has figures of its own.
        known = {"version", "time", "event", "actor", "cause"}
        found["events"] = [{key: event[key] for key in event if key in known} for event in found["events"]]
    return found


def _forget(jobs: LocalJobs, name: str) -> bool:
    """Replaces the start of a supervisor."""
    with History() as history:
        history.forget(name)
    return True


def _shape(*documents: Any) -> Any:
    """The keys and types of all values at one place."""
    objects = [document for document in documents if isinstance(document, dict)]
    lists = [document for document in documents if isinstance(document, list)]
    kinds = {_kind(document) for document in documents if not isinstance(document, dict | list)}
    if objects:
        keys = dict.fromkeys(key for document in objects for key in document)
        shape: Any = {
            key: "object" if key in _OPEN else _shape(*(one[key] for one in objects if key in one)) for key in keys
        }
    elif lists:
        items = [item for document in lists for item in document]
        shape = [_shape(*items)] if items else []
    else:
        return "|".join(sorted(kinds))
    return [*sorted(kinds), shape] if kinds else shape


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "text" if isinstance(value, str) else "number"


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{SNAPSHOT} is written\n")
