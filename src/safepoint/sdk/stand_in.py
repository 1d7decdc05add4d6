"""What Kubeflow's own client ships in the place of a `TransformersTrainer`'s function.

It takes a function's source with `inspect`, puts it through a shell, and runs it with torchrun. So what stands in for
the function does the same when it is called here, and has another source: one that keeps the training as base64, of
which a shell changes nothing, and runs it under Safepoint on every rank. Arguments come Kubeflow's own way.
"""

import base64
import itertools
import json
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safepoint.jobs.model.function_source import take_function
from safepoint.jobs.model.literals import as_options
from safepoint.sdk.failures import NotSupportedHereError, as_kubeflow_raises

if TYPE_CHECKING:
    from safepoint.sdk.trainers import TransformersTrainer

_ORIGINAL = "__safepoint_function__"
_numbers = itertools.count()
# Nothing in here may mean anything to a shell: no dollar, no back-tick, no backslash.
_SOURCE = """\
def {name}(**func_args):
    import base64, importlib.util, json, os, runpy, sys, tempfile

    plan = json.loads(base64.b64decode("{plan}"))
    for variable, text in plan["environ"].items():
        os.environ.setdefault(variable, text)
    program = plan["program"]
    if plan["script"] is not None:
        program = [os.path.join(tempfile.mkdtemp(prefix="safepoint-"), plan["file"]), *program]
        with open(program[0], "w", encoding="utf-8") as file:
            file.write(repr(func_args).join(plan["script"]))
    if importlib.util.find_spec("safepoint") is not None:
        os.execv(sys.executable, [sys.executable, "-u", "-m", "safepoint.training", *program])
    missing = "Safepoint is not installed in this image: put it there, or into packages_to_install"
    if plan["is_needed"]:
        sys.exit(missing + "; nothing was trained")
    print("warning: " + missing + "; this training is not saved when it is interrupted", file=sys.stderr, flush=True)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
"""
_ARGUMENTS = "SAFEPOINT_FUNC_ARGS"


def stand_in_for(trainer: "TransformersTrainer") -> Callable[..., Any]:
    """A function whose source Kubeflow's client can ship; what cannot be shipped is said when it does."""
    function = trainer.function
    name = _name(function)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if isinstance(function, str):
            raise NotSupportedHereError(f"{function} is a script, and not called here", hint="give it to a client")
        return function(*args, **kwargs)

    def source() -> str:
        with as_kubeflow_raises():
            return _source(trainer, name)

    file = f"safepoint_{name}_{next(_numbers)}.py"
    stand_in.__code__ = stand_in.__code__.replace(co_filename=file, co_firstlineno=1, co_name=name)
    stand_in.__name__ = stand_in.__qualname__ = name
    setattr(stand_in, _ORIGINAL, function)
    linecache.cache[file] = (source,)  # asked once somebody looks for it
    return stand_in


def original_of(function: Any) -> Any:
    """What a stand-in stands for; anything else is itself."""
    return getattr(function, _ORIGINAL, function)


def _name(function: Any) -> str:
    if isinstance(function, str):
        return "train"
    name = getattr(function, "__name__", "train")
    return name if name.isidentifier() else "train"


def _source(trainer: "TransformersTrainer", name: str) -> str:
    function, script, program, file = trainer.function, None, list[str](), f"{name}.py"
    if not isinstance(function, str):
        shipment = take_function(function, trainer.func_args)
        before, _, after = shipment.script(arguments=_ARGUMENTS).rpartition(_ARGUMENTS)
        script = [before, after]
    elif function.endswith(".py") or os.sep in function:
        script, file = [Path(function).read_text(encoding="utf-8")], Path(function).name
        program = as_options(trainer.func_args)
    else:
        program = ["-m", function, *as_options(trainer.func_args)]
    settings = trainer.run_settings()
    texts = settings.to_environment()
    defaults = type(settings)().to_environment()
    environ = {variable: text for variable, text in texts.items() if text and text != defaults[variable]}
    plan = {
        "environ": environ | trainer.storage_environment(),
        "program": program,
        "script": script,
        "file": file,
        "is_needed": bool(trainer.enable_jit_checkpoint or trainer.save_every or isinstance(function, str)),
    }
    encoded = base64.b64encode(json.dumps(plan).encode()).decode()
    return _SOURCE.format(name=name, plan=encoded)
