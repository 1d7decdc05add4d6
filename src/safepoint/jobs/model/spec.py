"""The specification of a job; it holds no secret and nothing of the machine's environment."""

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from safepoint.errors import UsageError
from safepoint.foundation.field_types import FLAG, TEXT, VARIABLES, Kind, check_fields, texts, whole
from safepoint.jobs.model.connections import IDENTITY
from safepoint.settings.run_settings import RunSettings

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|CREDENTIAL", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"(?P<scheme>[\w+.-]+)://(?P<user>[^/\s]*)@")
_TEXTS = Kind(words="a tuple of texts", fits=lambda value: isinstance(value, tuple) and texts().fits(value))
_KINDS = {
    "name": TEXT,
    "program": _TEXTS,
    "is_module": FLAG,
    "python": TEXT,
    "working_dir": TEXT,
    "num_nodes": whole(1),
    "ranks_per_node": whole(1),
    "cpu_per_node": whole(0),
    "gpu_per_node": whole(0),
    "settings": Kind(words="the run's settings", fits=lambda value: isinstance(value, RunSettings)),
    "max_restarts": whole(0),
    "env": VARIABLES,
    "data_connection": TEXT.optional,
    "priority": whole(),
    "packages": _TEXTS,
    "package_indexes": _TEXTS,
}
_LAUNCHERS_OWN = ("record_folder", "launcher_pid", "keeper", "job_dir", "has_begun")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job.

    Args:
        name: lower case letters, digits and dashes, 63 at most, as Kubernetes names objects.
        program: script and arguments, or module and arguments; a function's script lies in the job's folder.
        is_module: run the program as `python -m` does.
        python: the interpreter.
        working_dir: an absolute path.
        num_nodes: number of launchers.
        ranks_per_node: processes of each.
        cpu_per_node: slots that each takes.
        gpu_per_node: GPUs of each; as many devices are visible to it.
        settings: the options of the run.
        max_restarts: starts of the ranks after a failure, by the launcher.
        env: variables for the program.
        data_connection: the name of the keys of an object store; never their values.
        priority: jobs of a higher one start first, and preempt those of lower ones.
        packages: requirements to install for this job before the program runs.
        package_indexes: where to find them; the first one replaces the default.
    """

    name: str
    program: tuple[str, ...]
    is_module: bool = False
    python: str
    working_dir: str
    num_nodes: int = 1
    ranks_per_node: int = 1
    cpu_per_node: int = 1
    gpu_per_node: int = 0
    settings: RunSettings = field(default_factory=RunSettings)
    max_restarts: int = 3
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    data_connection: str | None = None
    priority: int = 0
    packages: tuple[str, ...] = ()
    package_indexes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            check_fields(self, _KINDS)
        except ValueError as error:
            raise UsageError(str(error)) from error
        check_name(self.name)
        if not self.program:
            raise UsageError("the job has no program", hint="name a script, a module or a function")
        if not os.path.isabs(self.working_dir):
            raise UsageError(f"working_dir {self.working_dir!r} must be an absolute path")
        for variable, text in self.env.items():
            if not _VARIABLE.fullmatch(variable) or "\0" in text:
                raise UsageError(f"env: {variable!r} is not a valid name of a variable, or its value has a NUL")
        keys = sorted(IDENTITY.intersection(self.env))
        if keys:
            raise UsageError(
                f"env has {', '.join(keys)}, and the values of env are stored; nothing was submitted",
                hint="put them into connections.toml and name it with --connection NAME, or data_connection_name",
            )
        self._check_packages()

    def _check_packages(self) -> None:
        # Messages do not show the values: they may have passwords in them.
        for what, given in (("the address of a package index", self.package_indexes), ("a package", self.packages)):
            if any(_has_credentials(text) for text in given):
                raise UsageError(
                    f"{what} has a user name or password in it, which would be stored; nothing was submitted",
                    hint="put the password into pip's configuration, ~/.netrc or PIP_INDEX_URL",
                )
            if any(not text.strip() or text.strip().startswith("-") for text in given):
                raise UsageError(
                    f"{what} is empty, or is an option of pip's",
                    hint="name packages only, such as 'peft>=0.20'; put options into pip's configuration",
                )

    def to_json(self) -> str:
        """A document that `from_json` reads."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _names(type(self)) if name != "settings"}
        record["env"] = dict(self.env)
        record["settings"] = {
            name: getattr(self.settings, name) for name in _names(RunSettings) if name not in _LAUNCHERS_OWN
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Read a document of this release or an older one; what a newer one added is ignored."""
        record: dict[str, Any] = json.loads(text)
        of_settings, of_job = _names(RunSettings), _names(cls)
        settings = {name: value for name, value in record.pop("settings").items() if name in of_settings}
        values = {name: value for name, value in record.items() if name in of_job}
        for name in ("program", "packages", "package_indexes"):
            # tuple() would split a string into letters.
            values[name] = tuple(values[name]) if isinstance(values.get(name), list) else values.get(name, ())
        return cls(settings=RunSettings(**settings), **values)


def _has_credentials(text: str) -> bool:
    """Whether it has an address with a name or a password in it; the user of `git+ssh://git@…` is no secret."""
    found = _USER_IN_ADDRESS.finditer(text)
    return any(":" in address["user"] or not address["scheme"].endswith("ssh") for address in found)


def names_of_secrets(env: Mapping[str, str]) -> list[str]:
    """The variables of `env` whose names suggest secrets; the history stores their values."""
    return sorted(name for name in env if _SECRET.search(name))


def check_name(name: str) -> None:
    """Raise UsageError when `name` is not a valid name of a job."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the job name {name!r} is invalid",
            hint="use up to 63 lower case letters, digits and dashes, beginning and ending with a letter or digit",
        )


def name_from(text: str, unique: str) -> str:
    """A name for a job that has none: its program's, in valid letters, and a unique ending."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-")
    return f"{plain or 'job'}-{unique}"


@functools.cache  # a list of jobs asks a thousand times
def _names(kind: type[Any]) -> Mapping[str, None]:
    return dict.fromkeys(item.name for item in fields(kind))  # in their order, and found at once
