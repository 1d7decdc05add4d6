"""The function that Kubeflow's client sends to pods instead of the function of a `TransformersTrainer`.

Kubeflow's client reads the source of a function with `inspect`, passes it through a shell, and runs it with torchrun.
The pod function has two behaviours. If it is called on this machine, it calls the original function. If `inspect`
reads the source of the pod function, it gets another source, made from `_SOURCE`. This source contains the training
as base64, which a shell does not change, and runs the training under Safepoint on every rank. Kubeflow's client
appends a line that calls the pod function. This call passes the arguments by name or, in Kubeflow's local processes,
as one mapping.
"""

import base64
import itertools
import json
import linecache
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safepoint.jobs.model.function_source import as_options, take_function
from safepoint.sdk.failures import NotSupportedHereError, as_kubeflow_raises

_ORIGINAL = "__safepoint_function__"
_numbers = itertools.count()
# This source must have no character that a shell interprets: no dollar, no back-tick, no backslash.
_SOURCE = """\
def {name}(by_position=None, /, **func_args):
    import base64, importlib.util, json, os, runpy, sys, tempfile

    func_args = by_position or func_args
    plan = json.loads(base64.b64decode("{plan}"))
    for variable, text in plan["environ"].items():
        os.environ.setdefault(variable, text)
    program = plan["program"]
    if plan["script"] is not None:
        program = [os.path.join(tempfile.mkdtemp(prefix="safepoint-"), plan["file"]), *program]
        with open(program[0], "w", encoding="utf-8") as file:
            file.write(repr(func_args).join(plan["script"]))
    if importlib.util.find_spec("safepoint") is not None:
        os.execv(sys.executable, [sys.executable, "-P", "-u", "-m", "safepoint.training", *program])
    missing = "Safepoint is not installed in this image: add it to the image or to packages_to_install"
    if plan["is_needed"]:
        sys.exit(missing + "; nothing was trained")
    print("warning: " + missing + "; this training is not saved when it is interrupted", file=sys.stderr, flush=True)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
"""
_ARGUMENTS = "SAFEPOINT_FUNC_ARGS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRun:
    """How a function runs in a pod.

    Args:
        func_args: the arguments of the function, by name.
        environ: environment variables to set, unless the pod has set them already.
        needs_safepoint: whether a pod fails if its image lacks Safepoint. If False, the pod trains without Safepoint.
    """

    func_args: dict[str, Any] | None
    environ: Mapping[str, str] = field(repr=False)
    needs_safepoint: bool


def pod_function(function: Callable[..., Any] | str, run: Callable[[], PodRun]) -> Callable[..., Any]:
    """A pod function for `function`. If `function` cannot be sent to a pod, reading the source raises an error.

    Args:
        function: the original function, or the path of a script, or the name of a module.
        run: returns how the function runs in a pod. It is called when the source is read.
    """
    name = "train" if isinstance(function, str) else getattr(function, "__name__", "train")
    name = name if name.isidentifier() else "train"

    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(function, str):
            raise NotSupportedHereError(
                f"func {function!r} is a script or a module, which cannot be called",
                hint="pass the trainer to a TrainerClient",
            )
        return function(*args, **kwargs)

    def source() -> str:
        with as_kubeflow_raises():
            return _source(function, name, run())

    file = f"safepoint_{name}_{next(_numbers)}.py"
    call.__code__ = call.__code__.replace(co_filename=file, co_firstlineno=1, co_name=name)
    call.__name__ = call.__qualname__ = name
    setattr(call, _ORIGINAL, function)
    linecache.cache[file] = (source,)  # `inspect` reads the source here
    return call


def original_of(function: Any) -> Any:
    """The original function, script or module of a pod function; any other value is returned unchanged."""
    return getattr(function, _ORIGINAL, function)


def _source(function: Callable[..., Any] | str, name: str, run: PodRun) -> str:
    script, program, file = None, list[str](), f"{name}.py"
    if not isinstance(function, str):
        shipment = take_function(function, run.func_args)
        before, _, after = shipment.script(arguments=_ARGUMENTS).rpartition(_ARGUMENTS)
        script = [before, after]
    elif function.endswith(".py") or os.sep in function:
        script, file = [Path(function).read_text(encoding="utf-8")], Path(function).name
        program = as_options(run.func_args)
    else:
        program = ["-m", function, *as_options(run.func_args)]
    plan = {
        "environ": dict(run.environ),
        "program": program,
        "script": script,
        "file": file,
        "is_needed": run.needs_safepoint,
    }
    encoded = base64.b64encode(json.dumps(plan).encode()).decode()
    return _SOURCE.format(name=name, plan=encoded)
