"""The specification of a job. The history stores it, so it must not contain access keys."""

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.foundation.field_types import FLAG, TEXT, VARIABLES, Kind, check_fields, texts, whole
from safepoint.jobs.model.identity import keys_among
from safepoint.jobs.model.inputs import Input
from safepoint.settings.run_settings import RunSettings

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|CREDENTIAL", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"(?P<scheme>[\w+.-]+)://(?P<user>[^/\s]*)@")
_TEXTS = Kind(words="a tuple of strings", fits=lambda value: isinstance(value, tuple) and texts().fits(value))
_INPUTS = Kind(
    words="a tuple of inputs",
    fits=lambda value: isinstance(value, tuple) and all(isinstance(one, Input) for one in cast("tuple[Any]", value)),
)
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
    "inputs": _INPUTS,
    "resume_mark": TEXT.optional,
    "origins": VARIABLES,
}
_LAUNCHERS_OWN = ("record_folder", "launcher_pid", "keeper", "job_dir", "has_begun", "first_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The specification of one job.

    Args:
        name: lower case letters, digits and dashes, 63 at most, as Kubernetes names objects.
        program: script or module, and arguments. For a function, the script is a file in the job's folder.
        is_module: run the program as `python -m` does.
        python: the interpreter.
        working_dir: the absolute path of the folder in which the job runs.
        num_nodes: number of launchers.
        ranks_per_node: number of ranks of each node.
        cpu_per_node: CPU slots of each node.
        gpu_per_node: GPUs of each node. The processes of the node can use only these GPUs.
        settings: the options of the run.
        max_restarts: how often a launcher restarts the ranks after a failure.
        env: variables for the program.
        data_connection: the name of the data connection, or None; the keys are not stored.
        priority: jobs with a higher priority start first, and preempt jobs with a lower priority.
        packages: requirements to install for this job before the program runs.
        package_indexes: the package indexes to use; the first index replaces the default.
        inputs: the data set and the model to fetch before the program runs.
        resume_mark: the name of a mark, if a person has resumed the job from a chosen checkpoint. The first start
            from this checkpoint leaves the mark in the output location; see `RunSettings.first_start`. None for other
            jobs.
        origins: for each option of `submit`, by its name, where it was set: on the command line, in a variable, or in
            a line of a file.
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
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    data_connection: str | None = None
    priority: int = 0
    packages: tuple[str, ...] = ()
    package_indexes: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    resume_mark: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        try:
            check_fields(self, _KINDS)
        except ValueError as error:
            raise UsageError(str(error)) from error
        check_name(self.name)
        if not self.program:
            raise UsageError("the job has no program", hint="give a script, a module or a function")
        if not os.path.isabs(self.working_dir):
            raise UsageError(f"working_dir {self.working_dir!r} must be an absolute path")
        check_variables(self.env)
        keys = keys_among(self.env)
        if keys:
            raise UsageError(
                f"env has {', '.join(keys)}, but env is stored in the job history, so it must not contain access "
                "keys; nothing was submitted",
                hint="set them in the environment of this command or program: jobs of this machine inherit it. Keys "
                "of S3 can also be in connections.toml: use --connection NAME or data_connection_name",
            )
        check_packages(self.packages, self.package_indexes)

    def to_json(self) -> str:
        """The document that `from_json` reads."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _names(type(self)) if name != "settings"}
        record["env"], record["origins"] = dict(self.env), dict(self.origins)
        record["inputs"] = [one.to_record() for one in self.inputs]
        record["settings"] = {
            name: getattr(self.settings, name) for name in _names(RunSettings) if name not in _LAUNCHERS_OWN
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Read a document of any release. Fields that this release does not know are ignored."""
        record: dict[str, Any] = json.loads(text)
        of_settings, of_job = _names(RunSettings), _names(cls)
        settings = {name: value for name, value in record.pop("settings").items() if name in of_settings}
        values = {name: value for name, value in record.items() if name in of_job}
        for name in ("program", "packages", "package_indexes"):
            # A string is left as it is, so that the check refuses it. tuple() would split it into letters.
            values[name] = tuple(values[name]) if isinstance(values.get(name), list) else values.get(name, ())
        values["inputs"] = tuple(Input.from_record(one) for one in values.get("inputs", ()))
        return cls(settings=RunSettings(**settings), **values)


def has_credentials(text: str) -> bool:
    """Whether the text has an address with a user or a password. The user of `git+ssh://git@…` does not count."""
    found = _USER_IN_ADDRESS.finditer(text)
    return any(":" in address["user"] or not address["scheme"].endswith("ssh") for address in found)


def names_of_secrets(env: Mapping[str, str]) -> list[str]:
    """The variables of `env` whose names suggest secrets, or whose values are addresses with a user or a password.
    The history would store their values."""
    return sorted(name for name, text in env.items() if _SECRET.search(name) or has_credentials(text))


def check_packages(
    packages: Sequence[str],
    indexes: Sequence[str],
    *,
    secret_hint: str = "put the password into pip's configuration, ~/.netrc or PIP_INDEX_URL",
) -> None:
    """Raise UsageError when a package or an index has a user name or a password, is empty, or is an option of pip.

    Args:
        packages: the requirements.
        indexes: the addresses of the package indexes.
        secret_hint: where to put a password instead.
    """
    # Messages do not show addresses and package names: they may contain passwords.
    index_hint = "give the index as an address, such as https://pypi.org/simple; put options into pip's configuration"
    package_hint = "give the package by its name, such as 'peft>=0.20'; put options into pip's configuration"
    for what, given, hint in (
        ("the address of a package index", indexes, index_hint),
        ("a package", packages, package_hint),
    ):
        if any(has_credentials(text) for text in given):
            raise UsageError(
                f"{what} contains a user name or a password, which would be stored; nothing was submitted",
                hint=secret_hint,
            )
        if any(not text.strip() or text.strip().startswith("-") for text in given):
            raise UsageError(f"{what} is empty or an option of pip", hint=hint)


def check_variables(env: Mapping[str, str]) -> None:
    """Raise UsageError when a variable has no valid name, or a value that no process can receive."""
    for variable, text in env.items():
        if not _VARIABLE.fullmatch(variable) or "\0" in text:
            raise UsageError(
                f"env: {variable!r} is not a valid variable name, or its value contains NUL; nothing was submitted",
                hint="use letters, digits and underscores, and no digit at the beginning",
            )


def check_name(name: str) -> None:
    """Raise UsageError when `name` is not a valid name of a job."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the job name {name!r} is invalid",
            hint="use up to 63 lower case letters, digits and dashes, beginning and ending with a letter or digit",
        )


def name_from(text: str, unique: str) -> str:
    """A name for a job whose user gave no name: the name of the program in valid characters, and a unique ending.

    The name is short enough, and begins with a letter, so that Kubernetes can derive the names of pods from it.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"job-{plain}".strip("-")
    return f"{plain[:40].strip('-')}-{unique}"


@functools.cache  # cached, because a list of jobs calls this function for every job
def _names(kind: type[Any]) -> Mapping[str, None]:
    return dict.fromkeys(item.name for item in fields(kind))  # a dict is ordered, and its lookup is fast
