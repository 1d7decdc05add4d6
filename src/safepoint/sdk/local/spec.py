"""Converts a trainer of the SDK into a job of this machine."""

import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safepoint.errors import UnsupportedError, UsageError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.environment import is_importable
from safepoint.foundation.field_types import check_fields
from safepoint.foundation.quantities import parse_count
from safepoint.foundation.units import plural
from safepoint.jobs.local.attempt.workspace import provide_workspace
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.slots import Slots, count_slots, remark_on
from safepoint.jobs.model.function_source import as_options, take_function
from safepoint.jobs.model.identity import keys_among
from safepoint.jobs.model.spec import JobSpec, check_name, name_from, names_of_secrets
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.local.inputs import inputs_of
from safepoint.sdk.local.pod_folder import provide_pod_folder
from safepoint.sdk.local.training_hub import START, TrainingHubJob
from safepoint.sdk.trainers import CUSTOM_TRAINER, TRANSFORMERS_TRAINER, TransformersTrainer
from safepoint.sdk.upstream import types
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import CLAIMS, parse_location, resolve_claim

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
    """A job to submit on this machine.

    Args:
        spec: its specification.
        files: the files to write into the job's folder, by name.
    """

    spec: JobSpec
    files: Mapping[str, bytes] = field(repr=False)  # not in `repr`, because the files may contain keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    name: str
    command: tuple[str, ...]
    is_module: bool = False
    script: str | None = None


def checked_trainer(trainer: Any) -> types.CustomTrainer:
    """The trainer, if this machine can run it.

    Raises:
        UnsupportedError: this machine cannot run a trainer of this type.
    """
    if isinstance(trainer, types.CustomTrainer):
        return trainer
    hint = "use train(trainer=TransformersTrainer(func=…)) or a CustomTrainer"
    if trainer is None:
        raise UnsupportedError(
            "trainer is None: on a cluster, the runtime's program would run; on this machine, a runtime has no "
            "program; nothing was started",
            hint=hint,
        )
    if isinstance(trainer, types.CustomTrainerContainer):
        why = "a container with its own image"
        hint = f"give the image's program as the path of a script: {hint.replace('func=…', 'func=<path>')}"
    elif isinstance(trainer, types.BuiltinTrainer):
        why, hint = "TorchTune, which reports no steps", f"write the training as a function: {hint}"
    else:
        why = "an unknown kind of trainer"
    raise UnsupportedError(
        f"trainer is a {type(trainer).__name__}, {why}, which cannot run on this machine; nothing was started",
        hint=hint,
    )


def local_job(
    trainer: types.CustomTrainer,
    config: LocalConfig,
    name: str | None,
    initializer: types.Initializer | None = None,
) -> LocalJob:
    """The job that `train` submits. Logs a warning for fields of the trainer that have no effect on this machine.

    Args:
        trainer: describes the training.
        config: how jobs run on this machine.
        name: the name of the job; derived from the program's name when None.
        initializer: names the data that is downloaded before the ranks start; None if there is no such data.

    Raises:
        UsageError: a field is invalid, or not supported on this machine.
        UnsupportedError: an initializer needs a cluster.
    """
    try:
        return _local_job(trainer, config, name, initializer)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _local_job(
    trainer: types.CustomTrainer, config: LocalConfig, name: str | None, initializer: types.Initializer | None
) -> LocalJob:
    transformers = trainer if isinstance(trainer, TransformersTrainer) else None
    untyped: Any = trainer  # Kubeflow declares no types for some fields
    if transformers is not None:
        transformers.check()  # check again, because fields may have been assigned since the trainer was made
    check_fields(trainer, CUSTOM_TRAINER if transformers is None else TRANSFORMERS_TRAINER)
    machine = count_slots()
    share = share_for(untyped.resources_per_node, machine=machine)
    if isinstance(trainer, TrainingHubJob):
        share = replace(share, ranks=1)
    for remark in share.remarks:
        _log.warning("%s", remark)
    if trainer.image:
        _log.warning("image %s has no effect: jobs of this machine run with %s", trainer.image, config.python)
    program = _program(untyped.func if transformers is None else transformers.function, trainer, config)
    name = name_from(program.name, secrets.token_hex(2)) if name is None else name
    check_name(name)
    settings, env = _settings(_checked(untyped.env, has_connection=transformers is not None), transformers)
    secret_names = names_of_secrets(env)
    if secret_names:
        _log.warning(
            "env has %s; values of env are stored in the job history: keep secrets in connections.toml or a file",
            ", ".join(secret_names),
        )
    env |= _claims(settings.output_dir, config, env)
    texts = [program.script or _text_of(program), repr(untyped.func_args), *env.values()]
    provide_pod_folder(texts, _claim_folder(settings.output_dir, env))
    if transformers is not None:
        env |= transformers.storage_environment()
        if transformers.ca_bundle is not None and not os.path.isfile(transformers.ca_bundle):
            raise UsageError(
                f"ca_bundle {os.fspath(transformers.ca_bundle)} is not a file", hint="give the path of a PEM file"
            )
    inputs = inputs_of(initializer, config.folder, lambda uri: _folder_of(uri, config, env))
    script = str(job_folder(name) / SCRIPT)
    spec = JobSpec(
        name=name,
        program=program.command if program.script is None else (script,),
        is_module=program.is_module,
        python=config.python,
        working_dir=config.folder,
        num_nodes=1 if trainer.num_nodes is None else trainer.num_nodes,
        ranks_per_node=share.ranks,
        cpu_per_node=share.cpu,
        gpu_per_node=share.gpu,
        settings=settings,
        env=env,
        data_connection=transformers.data_connection_name if transformers is not None else None,
        priority=config.priority,
        packages=tuple(trainer.packages_to_install or ()),
        # If the trainer has the default, there are no indexes here. Then pip uses the indexes of its configuration.
        package_indexes=() if list(trainer.pip_index_urls) == _DEFAULT_INDEX else tuple(trainer.pip_index_urls),
        inputs=inputs.inputs,
    )
    provide_workspace(one.target for one in spec.inputs)
    if remark := remark_on(spec, machine):
        _log.warning("%s", remark)
    files = {} if program.script is None else {SCRIPT: program.script.encode()}
    return LocalJob(spec=spec, files=files | inputs.files)


def _program(function: Any, trainer: Any, config: LocalConfig) -> _Program:
    arguments: dict[str, Any] | None = trainer.func_args
    folder = config.folder
    if not isinstance(function, str):
        shipment = take_function(function, arguments)
        before = START if isinstance(trainer, TrainingHubJob) else ""
        return _Program(name=shipment.name, command=(), script=shipment.script(look_in=folder, before=before))
    path = Path(folder, function)
    options = as_options(arguments)
    if path.is_file():
        return _Program(name=path.stem, command=(str(path), *options))
    if function.endswith(".py") or os.sep in function:
        raise UsageError(
            f"there is no script {path}", hint="check the path; a relative path starts at LocalConfig.working_dir"
        )
    if not all(part.isidentifier() for part in function.split(".")):
        raise UsageError(f"func {function!r} is neither the path of a script nor the name of a module")
    # If another interpreter runs the job, or the job installs packages, the job may have modules that this process
    # does not have. Then the module is not looked up.
    is_ours = config.python == sys.executable and not trainer.packages_to_install
    if is_ours and not is_importable(function, folder):
        raise UsageError(f"there is no module {function}", hint="check its name and PYTHONPATH")
    return _Program(name=function.rpartition(".")[2], command=(function, *options), is_module=True)


def _checked(env: Mapping[str, Any] | None, *, has_connection: bool) -> dict[str, str]:
    """The variables of `env`. A variable with the value None is left out, because None means that it is not set."""
    found = {name: text for name, text in (env or {}).items() if text is not None}
    for name, text in found.items():
        if not isinstance(text, str):
            raise UsageError(f"env[{name!r}] is {text!r}; its value must be a string")
    keys = keys_among(found)
    if keys:
        trainer = "" if has_connection else " of a TransformersTrainer"
        raise UsageError(
            f"env has {', '.join(keys)}, and env is stored in the job history; nothing was submitted",
            hint="remove them from env, and set them in the environment of this program (os.environ): jobs of this "
            f"machine inherit it. For an output_dir in s3://, write them into connections.toml, and name their table "
            f"with data_connection_name{trainer}",
        )
    return found


def _settings(env: Mapping[str, str], transformers: TransformersTrainer | None) -> tuple[RunSettings, dict[str, str]]:
    """The settings of the run, and the variables of `env` that are not settings.

    Fields of the trainer override settings in `env`.
    """
    known = RunSettings().to_environment()
    settings = RunSettings.from_environment({name: text for name, text in env.items() if name in known})
    rest = {name: text for name, text in env.items() if name not in known}
    unknown = sorted(name for name in rest if name.startswith("SAFEPOINT_") and name not in _STORAGE)
    if unknown:
        _log.warning("env has SAFEPOINT_ variables that do not exist and have no effect: %s", ", ".join(unknown))
    settings = settings if transformers is None else transformers.run_settings(settings)
    return replace(settings, wording="sdk"), rest


def _text_of(program: _Program) -> str:
    """The text of a script; empty for a module, which may be anywhere."""
    try:
        return "" if program.is_module else Path(program.command[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _claim_folder(output: str | None, env: Mapping[str, str]) -> str | None:
    """The folder for the claim (volume) of a `pvc://` location; None for other locations."""
    location = parse_location(output) if output is not None else None
    if location is None or location.claim is None:
        return None
    return resolve_claim(replace(location, path=""), env.get(CLAIMS, "")).path


def _folder_of(location: str, config: LocalConfig, env: Mapping[str, str]) -> str:
    """The folder of this machine for a location `pvc://<claim>/<path>`."""
    claims = {**env, **_claims(location, config, env)}.get(CLAIMS, "")
    return resolve_claim(parse_location(location), claims).path


def _claims(output: str | None, config: LocalConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The variable that names the folder for the claim of a `pvc://` location, and its value.

    Empty if the location is in no claim, or if `env` names the folder already.
    """
    claim = parse_location(output).claim if output is not None else None
    if claim is None or f"{claim}=" in env.get(CLAIMS, ""):
        return {}
    folder = config.pvc.get(claim)
    if folder is not None:
        return {CLAIMS: f"{claim}={os.path.abspath(folder)}"}
    if f"{claim}=" in os.environ.get(CLAIMS, ""):
        return {CLAIMS: os.environ[CLAIMS]}
    configuration = Configuration.load(Path(config.folder))
    for warning in configuration.ignored:
        _log.warning("%s", warning)
    configured = configuration.pvc.get(claim)
    if configured is not None:
        return {CLAIMS: f"{claim}={configured}"}
    raise UsageError(
        f"no folder on this machine is configured for the claim {claim!r} of {output}",
        hint=f"use LocalConfig(pvc={{{claim!r}: '/some/folder'}}), or a table [pvc] in safepoint.toml",
    )


# ---- resources_per_node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The resources of this machine for one node of a job.

    Args:
        ranks: the number of ranks. As with `nproc_per_node: auto` of Kubeflow Trainer: one for each requested GPU; if
            no GPU is requested, one for each requested CPU.
        cpu: the number of CPU slots.
        gpu: the number of GPU slots.
        remarks: how these resources differ from the request, and why.
    """

    ranks: int
    cpu: int
    gpu: int
    remarks: tuple[str, ...] = ()


def share_for(resources: Mapping[str, Any] | None, *, machine: Slots) -> NodeShare:
    """The resources of this machine for each node of a job, by the rules of Kubernetes and Kubeflow Trainer.

    Args:
        resources: the field `resources_per_node` of a trainer.
        machine: the slots of this machine.

    Raises:
        ValueError: a resource is invalid, or this machine does not have it.
    """
    asked = {_resource_name(name): value for name, value in (resources or {}).items()}
    gpus = {name: _count(name, asked.pop(name)) for name in list(asked) if name in _GPUS or name.startswith(_MIG)}
    cpus = _count("cpu", asked.pop("cpu")) if "cpu" in asked else 0
    requested = {name: count for name, count in gpus.items() if count}
    if len(requested) > 1:
        raise ValueError(f"resources_per_node has {' and '.join(sorted(requested))}; request only one kind of GPU")
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
        remarks.append(
            f"resources_per_node has {name}={gpu}, but this machine has no GPU; "
            f"each node has {plural(gpu, 'rank')}, on the CPU"
        )
        gpu = 0
    elif any(name.startswith(_MIG) for name in requested):
        raise ValueError(
            f"resources_per_node has {next(iter(requested))}: a job of this machine cannot use a part of a GPU; "
            "request a whole GPU"
        )
    return NodeShare(ranks=ranks, cpu=cpus or ranks, gpu=gpu, remarks=tuple(remarks))


def _resource_name(name: str) -> str:
    lower = name.lower()
    return lower if lower in _WITHOUT_CASE or lower.startswith("mig-") else name


def _count(name: str, value: Any) -> int:
    try:
        return parse_count(value)
    except ValueError as error:
        raise ValueError(f"resources_per_node[{name!r}]: {error}") from error
