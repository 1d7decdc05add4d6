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
from safepoint.foundation.quantities import parse_count
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.slots import Slots, count_slots
from safepoint.jobs.model.function_source import as_options, take_function
from safepoint.jobs.model.spec import JobSpec, check_name, name_from, names_of_secrets
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.trainers import CUSTOM_TRAINER, TRANSFORMERS_TRAINER, TransformersTrainer
from safepoint.sdk.upstream import types
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import CLAIMS, parse_location

SCRIPT = "train.py"
_STORAGE = (CLAIMS, "SAFEPOINT_VERIFY_TLS")
_DEFAULT_INDEX = ["https://pypi.org/simple"]
_GPUS = ("gpu", "nvidia.com/gpu", "amd.com/gpu")
_MIG = ("mig-", "nvidia.com/mig-")
_WITHOUT_CASE = ("cpu", "memory", "gpu", "storage", "ephemeral-storage")
_UNLIMITED = ("memory", "storage", "ephemeral-storage")
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


# ---- resources_per_node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The share of this machine that one node of a job gets.

    Args:
        ranks: processes; one for each GPU that was asked for, else for each processor, as Kubeflow Trainer's
            `nproc_per_node: auto` has it.
        cpu: slots.
        gpu: devices.
        remarks: how that differs from the request, and why.
    """

    ranks: int
    cpu: int
    gpu: int
    remarks: tuple[str, ...] = ()


def share_for(resources: Mapping[str, Any] | None, *, num_nodes: int, machine: Slots) -> NodeShare:
    """The share of this machine that each node gets, by the rules of Kubernetes and Kubeflow Trainer.

    Args:
        resources: `resources_per_node` of a trainer.
        num_nodes: how many nodes there are.
        machine: the slots of this machine.

    Raises:
        ValueError: a resource is invalid, or this machine does not have it.
    """
    asked = {_resource_name(name): value for name, value in (resources or {}).items()}
    gpus = {name: _count(name, asked.pop(name)) for name in list(asked) if name in _GPUS or name.startswith(_MIG)}
    cpus = _count("cpu", asked.pop("cpu")) if "cpu" in asked else 0
    requested = {name: count for name, count in gpus.items() if count}
    if len(requested) > 1:
        raise ValueError(
            f"resources_per_node has {' and '.join(sorted(requested))}; only one kind of GPU can be requested"
        )
    gpu = sum(requested.values())
    ranks = gpu or max(1, cpus)
    remarks: list[str] = []
    unlimited = sorted(name for name in asked if name in _UNLIMITED)
    if unlimited:
        remarks.append(f"{' and '.join(unlimited)} of resources_per_node is not limited on this machine")
    other = sorted(set(asked) - set(unlimited))
    if other:
        raise ValueError(f"resources_per_node has {', '.join(other)}, which this machine does not have; remove it")
    if gpu and not machine.gpu:
        name = next(iter(requested))
        remarks.append(f"this machine has no GPU for {name}: {gpu}; each node's {gpu} rank(s) run on the CPU")
        gpu = 0
    elif any(name.startswith(_MIG) for name in requested):
        raise ValueError(
            f"resources_per_node has {next(iter(requested))}: this machine cannot give a job a part of a GPU; "
            "request a whole one"
        )
    elif num_nodes * gpu > machine.gpu:
        raise ValueError(
            f"{num_nodes} node(s) with {gpu} GPU(s) need {num_nodes * gpu}, and this machine has {machine.gpu}; "
            "request fewer"
        )
    cpu = cpus or ranks
    if num_nodes * cpu > machine.cpu:
        remarks.append(
            f"{num_nodes} node(s) with {cpu} cpu need {num_nodes * cpu}, and this machine has {machine.cpu}: the "
            "ranks share them"
        )
    return NodeShare(ranks=ranks, cpu=cpu, gpu=gpu, remarks=tuple(remarks))


def _resource_name(name: str) -> str:
    lower = name.lower()
    return lower if lower in _WITHOUT_CASE or lower.startswith("mig-") else name


def _count(name: str, value: Any) -> int:
    try:
        return parse_count(value)
    except ValueError as error:
        raise ValueError(f"resources_per_node[{name!r}]: {error}") from error
