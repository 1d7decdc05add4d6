"""Makes a job of this machine from a trainer of the SDK."""

import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safepoint.errors import UsageError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.environment import is_importable
from safepoint.foundation.field_types import check_fields
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.slots import count_slots
from safepoint.jobs.model.function_source import as_options, take_function
from safepoint.jobs.model.spec import JobSpec, check_name, name_from, names_of_secrets
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.resources import share_for
from safepoint.sdk.trainers import CUSTOM_TRAINER, TRANSFORMERS_TRAINER, TransformersTrainer
from safepoint.sdk.upstream import types
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import CLAIMS, parse_location

SCRIPT = "train.py"
_STORAGE = (CLAIMS, "SAFEPOINT_VERIFY_TLS")
_DEFAULT_INDEX = ["https://pypi.org/simple"]
_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """A job to submit.

    Args:
        spec: what it does.
        files: the files for its folder, by name.
    """

    spec: JobSpec
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    name: str
    command: tuple[str, ...]
    is_module: bool = False
    script: str | None = None


def local_job(trainer: types.CustomTrainer, config: LocalConfig, name: str | None) -> LocalJob:
    """The job that `train` submits; warns of what has no effect here.

    Args:
        trainer: the training.
        config: how jobs run here.
        name: the job's; made from the function's when None.

    Raises:
        UsageError: a field is invalid, or not supported on this machine.
    """
    try:
        return _local_job(trainer, config, name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _local_job(trainer: types.CustomTrainer, config: LocalConfig, name: str | None) -> LocalJob:
    own = trainer if isinstance(trainer, TransformersTrainer) else None
    plain: Any = trainer  # half of its fields have no type
    check_fields(trainer, CUSTOM_TRAINER if own is None else TRANSFORMERS_TRAINER)
    num_nodes = 1 if trainer.num_nodes is None else trainer.num_nodes
    share = share_for(plain.resources_per_node, num_nodes=num_nodes, machine=count_slots())
    for remark in share.remarks:
        _log.warning("%s", remark)
    if trainer.image:
        _log.warning("image %s has no effect: jobs of this machine run with %s", trainer.image, config.python)
    program = _program(plain.func if own is None else own.function, trainer, config)
    name = name_from(program.name, secrets.token_hex(2)) if name is None else name
    check_name(name)
    settings, env = _settings(_checked(plain.env), own)
    suspicious = names_of_secrets(env)
    if suspicious:
        _log.warning(
            "env has %s, and its values are stored in the job history: keep secrets in connections.toml or a file",
            ", ".join(suspicious),
        )
    env |= _claims(settings.output_dir, config, env)
    if own is not None:
        env |= own.storage_environment()
        if own.ca_bundle is not None and not os.path.isfile(own.ca_bundle):
            raise UsageError(
                f"ca_bundle {os.fspath(own.ca_bundle)} is not a file", hint="give the path of a PEM file"
            )
    script = str(job_folder(name) / SCRIPT)
    spec = JobSpec(
        name=name,
        program=program.command if program.script is None else (script,),
        is_module=program.is_module,
        python=config.python,
        working_dir=config.folder,
        num_nodes=num_nodes,
        ranks_per_node=share.ranks,
        cpu_per_node=share.cpu,
        gpu_per_node=share.gpu,
        settings=settings,
        env=env,
        data_connection=own.data_connection_name if own is not None else None,
        priority=config.priority,
        packages=tuple(trainer.packages_to_install or ()),
        # None for the default, so that pip's own configuration counts.
        package_indexes=() if list(trainer.pip_index_urls) == _DEFAULT_INDEX else tuple(trainer.pip_index_urls),
    )
    return LocalJob(spec=spec, files={} if program.script is None else {SCRIPT: program.script.encode()})


def _program(function: Any, trainer: Any, config: LocalConfig) -> _Program:
    arguments: dict[str, Any] | None = trainer.func_args
    folder = config.folder
    if not isinstance(function, str):
        shipment = take_function(function, arguments)
        return _Program(name=shipment.name, command=(), script=shipment.script(look_in=folder))
    path = Path(folder, function)
    options = as_options(arguments)
    if path.is_file():
        return _Program(name=path.stem, command=(str(path), *options))
    if function.endswith(".py") or os.sep in function:
        raise UsageError(
            f"there is no script {path}", hint="check the path; it is relative to LocalConfig.working_dir"
        )
    if not all(part.isidentifier() for part in function.split(".")):
        raise UsageError(f"func {function!r} is not the path of a script, and not the name of a module")
    is_ours = config.python == sys.executable and not trainer.packages_to_install  # its modules are unknown otherwise
    if is_ours and not is_importable(function, folder):
        raise UsageError(f"there is no module {function}", hint="check its name and PYTHONPATH")
    return _Program(name=function.rpartition(".")[2], command=(function, *options), is_module=True)


def _checked(env: Mapping[str, Any] | None) -> dict[str, str]:
    for name, text in (env or {}).items():
        if not isinstance(text, str):
            raise UsageError(f"env[{name!r}] is {text!r}; write its value as a string")
    return dict(env or {})


def _settings(env: Mapping[str, str], own: TransformersTrainer | None) -> tuple[RunSettings, dict[str, str]]:
    """The run's options, from the trainer and below it from SAFEPOINT_* variables, and the other variables."""
    known = RunSettings().to_environment()
    settings = RunSettings.from_environment({name: text for name, text in env.items() if name in known})
    rest = {name: text for name, text in env.items() if name not in known}
    unknown = sorted(name for name in rest if name.startswith("SAFEPOINT_") and name not in _STORAGE)
    if unknown:
        _log.warning("env has %s, which Safepoint does not know; they have no effect", ", ".join(unknown))
    return settings if own is None else own.run_settings(settings), rest


def _claims(output: str | None, config: LocalConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The folder that stands for the claim of a `pvc://` location, as a variable."""
    claim = parse_location(output).claim if output is not None else None
    if claim is None or f"{claim}=" in env.get(CLAIMS, ""):
        return {}
    folder = config.pvc.get(claim)
    if folder is not None:
        return {CLAIMS: f"{claim}={os.path.abspath(folder)}"}
    if f"{claim}=" in os.environ.get(CLAIMS, ""):
        return {CLAIMS: os.environ[CLAIMS]}
    configured = Configuration.load(Path(config.folder)).pvc.get(claim)
    if configured is not None:
        return {CLAIMS: f"{claim}={configured}"}
    raise UsageError(
        f"no folder on this machine is configured for the claim {claim!r} of {output}",
        hint=f"LocalConfig(pvc={{{claim!r}: '/some/folder'}}), or a table [pvc] in safepoint.toml",
    )
