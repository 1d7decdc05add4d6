"""Checks the arguments of the client before anything starts. Each message names the argument and the fix."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from safepoint.foundation.quantities import parse_bytes, parse_count
from safepoint.sdk.failures import InvalidRequestError
from safepoint.sdk.upstream import types

_TRAINERS = (types.CustomTrainer, types.CustomTrainerContainer, types.BuiltinTrainer)
_SIZES = ("memory", "storage", "ephemeral-storage")
_LEAST_MEMORY = 4 << 20
"""Every Python process needs more memory than this. A smaller number probably lacks its unit."""


def check_config(backend_config: Any) -> None:
    """Raise InvalidRequestError if the argument of `TrainerClient` is a class, a string, a number or a mapping."""
    if isinstance(backend_config, type):
        name = backend_config.__name__
        raise InvalidRequestError(
            f"backend_config is the class {name}, not an object of it", hint=f"use TrainerClient({name}())"
        )
    if isinstance(backend_config, str | int | float | Mapping):
        raise InvalidRequestError(
            f"backend_config must be a configuration of a backend, not {_shown(backend_config)}",
            hint="use TrainerClient(LocalConfig()) for this machine, or TrainerClient(KubernetesBackendConfig())",
        )


def check_train(runtime: Any, initializer: Any, trainer: Any, options: Any) -> None:
    """Raise InvalidRequestError if an argument of `train` has the wrong type."""
    if isinstance(runtime, _TRAINERS) or is_of_fork(runtime):
        raise InvalidRequestError(
            f"the first argument of train must be the runtime, but you passed a {type(runtime).__name__}",
            hint="pass the trainer by name: train(trainer=…)",
        )
    _check("runtime", runtime, str | types.Runtime, "the name of a runtime, or what get_runtime returns")
    _check("initializer", initializer, types.Initializer, "an Initializer(dataset=…, model=…)")
    if callable(trainer) and not isinstance(trainer, type):
        raise InvalidRequestError(
            "trainer must be a trainer, not a function", hint="use train(trainer=TransformersTrainer(func=…))"
        )
    if not is_of_fork(trainer):
        _check("trainer", trainer, _TRAINERS, "a TransformersTrainer or one of Kubeflow's trainers")
    check_resources(getattr(trainer, "resources_per_node", None))
    if options is None:
        return
    if not isinstance(options, list | tuple):
        what = type(options).__name__
        raise InvalidRequestError(f"options must be a list, not {_shown(options)}", hint=f"use options=[{what}(…)]")
    for option in cast("list[Any]", options):
        if isinstance(option, type) or not callable(option):
            example = option.__name__ if isinstance(option, type) else "Name"
            raise InvalidRequestError(
                f"options has {_shown(option)}, which is not an option", hint=f"use options=[{example}(…)]"
            )


def check_name(name: Any) -> None:
    """Raise InvalidRequestError if the name of a job is not a string."""
    if not isinstance(name, str) or not name.strip():
        hint = "use job.name" if isinstance(name, types.TrainJob) else "use the name that train returned"
        raise InvalidRequestError(f"name must be the name of a job, not {_shown(name)}", hint=hint)


def check_wait(status: Any, timeout: Any, polling_interval: Any) -> None:
    """Raise InvalidRequestError if an argument of `wait_for_job_status` has the wrong type."""
    if isinstance(status, str):
        raise InvalidRequestError(
            f"status must be a set of states, not the string {status!r}", hint=f"use status={{{status!r}}}"
        )
    is_collection = isinstance(status, set | frozenset | list | tuple)
    if not is_collection or not all(isinstance(one, str) for one in cast("list[Any]", status)):
        raise InvalidRequestError(
            f"status must be a set of states, not {_shown(status)}", hint="use status={'Complete'}"
        )
    for argument, value in (("timeout", timeout), ("polling_interval", polling_interval)):
        _check_seconds(argument, value, usual=600)


def check_interval(polling_interval: Any) -> None:
    """Raise InvalidRequestError if the argument of `watch_job` is not a number of seconds above 0."""
    _check_seconds("polling_interval", polling_interval, usual=2)
    if not 0 < polling_interval < float("inf"):
        raise InvalidRequestError(
            f"polling_interval {polling_interval} must be more than 0, and finite", hint="use polling_interval=2"
        )


def _check_seconds(argument: str, value: Any, *, usual: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(
            f"{argument} must be a number of seconds, not {_shown(value)}", hint=f"use {argument}={usual}"
        )


def check_resources(resources: Any) -> None:
    """Raise InvalidRequestError if a value of `resources_per_node` is not a quantity, or is too small to run."""
    given = cast("dict[Any, Any]", resources if isinstance(resources, Mapping) else {})
    for name, value in given.items():
        field, plain = f"resources_per_node[{name!r}]", str(name).lower()
        try:
            if plain in _SIZES:
                least = _LEAST_MEMORY
                is_enough = parse_bytes(value) >= least
                hint = "write a size with its unit, such as '16Gi'"
            else:
                least = 1 if plain == "cpu" else 0
                is_enough = parse_count(value) >= least
                hint = f"write {least} or more"
        except ValueError as error:
            raise InvalidRequestError(f"{field}: {error}") from error
        if not is_enough:
            unit = " bytes" if plain in _SIZES else ""
            raise InvalidRequestError(f"{field} is {value!r}, which is less than {least}{unit}", hint=hint)


def _check(name: str, value: Any, kinds: Any, words: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InvalidRequestError(f"{name} must be {words}, not {_shown(value)}")


def is_of_fork(value: Any) -> bool:
    """Whether the value is a trainer of Red Hat's version of the SDK. Its class does not derive from Kubeflow's."""
    return type(value).__module__.startswith("kubeflow.trainer.rhai")


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return "a function"
    is_plain = value is None or isinstance(value, str | int | float)
    return repr(value) if is_plain else f"a {type(value).__name__}"
