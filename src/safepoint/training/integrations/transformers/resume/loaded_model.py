"""Makes sure that a run resumes with the model of the checkpoint. In four cases, the Trainer does not ensure this.

- The Trainer loads weights by name, and only warns about a weight that it does not find. This weight would keep the
  initial values that the script gave it, but its moments in the optimizer would come from the checkpoint. In some
  mixture-of-experts models, all experts are one tensor in memory, and many tensors in the files. The files of these
  models have other names and shapes than the model, and the Trainer finds none of these weights.
- PEFT scales an adapter's output by settings of the script. If the checkpoint was trained with other settings, the
  weights still fit, and no error is raised.
- PEFT loads the weights of an adapter by name, too. A weight of the base model in the file of an adapter would
  replace the frozen weight, and an adapter without weights in its file would keep its initial values.
- A callback may add an adapter, such as the teacher adapter of TRL's SDFT trainer, when training begins. The Trainer
  would add this adapter earlier, with the settings in the checkpoint, and the callback would fail.
"""

import contextlib
import copy
import importlib
import json
import logging
import re
import warnings
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any, cast

import torch

from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import ConflictError, printable
from safepoint.foundation.bounded_json import read_object
from safepoint.training.compatibility.transformers_releases import is_converted
from safepoint.training.state.data_only import only_data

_log = logging.getLogger("safepoint")
_SCALING = ("peft_type", "lora_alpha", "alpha", "alpha_pattern", "use_rslora", "use_dora")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_DEFAULT = "default"
"""PEFT's name for an adapter that the script has not named. The files of this adapter are directly in the
checkpoint's folder, and not in a subfolder."""
_MOST_CHARACTERS = 300


def complete_load(model: Any, missing: Iterable[str], folder: Path, *, step: int) -> None:
    """Load the weights that the Trainer did not find, if transformers can derive their names in the files.

    Args:
        model: the model as the Trainer has loaded it, not yet wrapped for training.
        missing: the names of the weights that the Trainer did not find.
        folder: the folder of the checkpoint.
        step: the step of the checkpoint.

    Raises:
        ConflictError: a weight is not in the checkpoint.
    """
    lost = lost_weights(model, missing)
    if not lost:
        return
    # If there are adapters, do not call from_pretrained: it would load the adapters, too.
    if is_converted(model) and not (folder / "adapter_config.json").exists():
        try:
            lost = lost_weights(model, _load_converted(model, folder))
        except Exception as error:  # noqa: BLE001  the error below names what is missing
            _log.warning("from_pretrained cannot load %s: %s", folder, error)
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConflictError(
            f"the checkpoint of step {step} lacks the model's weight {lost[0]}{others}; training was not "
            "started, because missing weights would keep their initial values",
            hint="create the model as in the run that wrote the checkpoint, or start from the beginning with "
            "--from-scratch",
        )


def lost_weights(model: Any, missing: Iterable[str]) -> list[str]:
    """The names in `missing` that a checkpoint should contain, without weights that are tied to a found weight."""
    names = set(missing)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found = {id(parameter) for name, parameter in parameters.items() if name not in names}
    found |= {parameter.data_ptr() for name, parameter in parameters.items() if name not in names}
    left_out = [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    left_out += getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return [
        name
        for name, parameter in parameters.items()
        if name in names
        and parameter.numel()
        and not {id(parameter), parameter.data_ptr()} & found
        and not any(re.search(pattern, name) for pattern in left_out)
    ]


def _load_converted(model: Any, folder: Path) -> list[str]:
    """Load through `from_pretrained`, which converts names. Return the names that are still missing.

    During this call, a second model is in memory. The second model has the widest type of the first model's weights,
    so no precision is lost.
    """
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    widest = max(types, key=lambda kind: (kind.itemsize, kind is not torch.float16)) if types else torch.float32
    if {torch.float16, torch.bfloat16} <= types and widest.itemsize == torch.float16.itemsize:
        widest = torch.float32
    _log.info("the weights of %s have other names than the model's: loading them with from_pretrained", folder.name)
    kind = cast("Any", type(model))
    # Use the model's own configuration: the checkpoint's configuration may name code, kernels or adapters to load.
    own = copy.deepcopy(model.config)
    other, report = kind.from_pretrained(folder, config=own, dtype=widest, output_loading_info=True)
    fresh: set[str] = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    state = {name: tensor for name, tensor in other.state_dict().items() if name not in fresh}
    return model.load_state_dict(state, strict=False).missing_keys


def check_adapter_settings(model: Any, folder: Path, *, step: int) -> None:
    """Compare the settings of adapters in a checkpoint with the settings in the script.

    Settings that only the checkpoint or only the script has are ignored.

    Args:
        model: the model to train, not yet wrapped for training.
        folder: the folder of the checkpoint.
        step: the step of the checkpoint.

    Raises:
        ConflictError: an adapter has another scale, or another type.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return
    for name, config in cast("dict[str, Any]", configs).items():
        file = (folder if name == _DEFAULT else folder / name) / "adapter_config.json"
        try:
            saved = read_object(file, constant=float)
        except (OSError, ValueError):
            continue
        now = json.loads(json.dumps(config.to_dict(), default=str))
        for setting in _SCALING:
            before, after = saved.get(setting), now.get(setting)
            if setting in saved and setting in now and (before or after) and before != after:
                raise ConflictError(
                    f"in the checkpoint of step {step}, the adapter {name!r} has {setting}={before!s:.80}; in this "
                    f"run it has {setting}={after!s:.80}; training was not started",
                    hint="create the adapter as in the run that wrote the checkpoint, or start from the beginning "
                    "with --from-scratch",
                )


@contextlib.contextmanager
def only_own_adapters(model: Any) -> Generator[None]:
    """While the block runs, the Trainer loads only the adapters that the model has, each with exactly its weights.

    Raises:
        ConflictError: the file of an adapter has other weights than the adapter; see `_exactly`.
    """
    load: Any = getattr(model, "load_adapter", None)
    configs: Any = getattr(model, "peft_config", None)
    if load is None or not isinstance(configs, dict):
        yield
        return
    own = set(cast("dict[str, Any]", configs))

    def load_own(path: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in own:
            return None
        with _exactly(model, name, Path(path)):
            return load(path, name, *args, **kwargs)

    with temporarily(model, load_adapter=load_own):
        yield


def load_later_adapters(model: Any, loaded: Collection[str], folder: Path, *, step: int) -> None:
    """Load the adapters that callbacks have added after the Trainer had loaded the other adapters.

    Args:
        model: the model to train.
        loaded: the names of the adapters that the Trainer has loaded.
        folder: the folder of the checkpoint.
        step: the step of the checkpoint.

    Raises:
        ConflictError: the checkpoint has an adapter that the model does not have, or the file of an adapter has other
            weights than the adapter.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return
    stored, own = _adapters_in(folder), set(cast("dict[str, Any]", configs))
    others = sorted(stored - own) if stored - {_DEFAULT} else []
    if others:
        raise ConflictError(
            f"the checkpoint of step {step} has an adapter {printable(others[0])}, which this run's model does not "
            "have; training was not started",
            hint="create the adapters as in the run that wrote the checkpoint, or start from the beginning with "
            "--from-scratch",
        )
    for name in sorted((stored & own) - set(loaded)):
        place = folder if name == _DEFAULT else folder / name
        peft = importlib.import_module("peft")
        with only_data(place):
            weights = peft.load_peft_weights(str(place), device="cpu")
        with checked_modules(place), _exactly(model, name, place):
            peft.set_peft_model_state_dict(model, weights, adapter_name=name)


@contextlib.contextmanager
def _exactly(model: Any, adapter: str, place: Path) -> Generator[None]:
    """While the block runs, PEFT may load only a state that has exactly the weights of one adapter.

    PEFT decides the names: it converts the names of its own state in the same way as the names in the file. The state
    may also have frozen weights of the base model if they equal the weights of the model. PEFT saves such weights if
    the script requests that, or if the vocabulary was resized.

    Raises:
        ConflictError: the state lacks a weight of the adapter, or would change a weight of the base model.
    """
    load = model.load_state_dict
    needed = _loaded_names(model, adapter, save_embedding_layers=False)
    allowed = needed | _loaded_names(model, adapter)

    def load_exactly(state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        missing = sorted(needed - state.keys())
        if missing:
            raise _other_weights(place, f"lacks the weight {missing[0]}")
        own: dict[str, Any] = model.state_dict()
        for name in sorted(state.keys() - allowed):
            if name not in own or not _are_same(state[name], own[name]):
                raise _other_weights(place, f"has the weight {name}, which does not belong to the adapter")
        return load({name: one for name, one in state.items() if name in allowed}, *args, **kwargs)

    with temporarily(model, load_state_dict=load_exactly):
        try:
            yield
        except KeyError as error:  # PEFT looks up each weight of `modules_to_save`
            raise _other_weights(place, f"lacks the weight {error.args[0] if error.args else ''}") from error


def _loaded_names(model: Any, adapter: str, **options: Any) -> set[str]:
    """The names of the weights that PEFT loads when it loads the state that it saves for an adapter."""
    found: set[str] = set()

    def record(state: dict[str, Any], *_: Any, **__: Any) -> Any:
        found.update(state)
        return torch.nn.Module().load_state_dict({})

    peft: Any = importlib.import_module("peft")
    with warnings.catch_warnings(action="ignore"), temporarily(model, load_state_dict=record):
        state: dict[str, Any] = peft.get_peft_model_state_dict(model, adapter_name=adapter, **options)
        peft.set_peft_model_state_dict(model, state, adapter_name=adapter)
    return found


def _are_same(one: Any, own: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(own, torch.Tensor) or one.shape != own.shape:
        return False
    return torch.equal(one.to(own.device, own.dtype), own)


def _other_weights(place: Path, difference: str) -> ConflictError:
    return ConflictError(
        f"the file of the adapter in {place} {printable(difference)[:_MOST_CHARACTERS]}; training was not started",
        hint="create the adapter as in the run that wrote the checkpoint, or start from the beginning with "
        "--from-scratch",
    )


def _adapters_in(folder: Path) -> set[str]:
    """The names of the adapters that the Trainer would load from a checkpoint.

    The adapter `default` is in the checkpoint's folder itself. Every other adapter is in a subfolder.
    """
    places = {_DEFAULT: folder, **{path.name: path for path in folder.iterdir()}}
    return {name for name, place in places.items() if any((place / file).is_file() for file in _ADAPTERS)}
