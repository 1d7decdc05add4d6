"""Checks the values in `trainer_state.json`, and the files that describe the weights.

The Trainer itself reads its state from `trainer_state.json` without a check.
"""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transformers.trainer_callback import TrainerState

from safepoint.checkpoint.foreign import layout
from safepoint.checkpoint.foreign.contents import check_index, tensors_of
from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES
from safepoint.checkpoint.pickles.loading import refusal
from safepoint.errors import CheckpointError
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.field_types import FLAG, NAMED, NUMBER, TEXT, Kind, check_fields, finite, whole


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in cast("list[Any]", value))


def _are_callbacks(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    for states in cast("dict[str, Any]", value).values():
        for state in cast("list[Any]", states if isinstance(states, list) else [states]):
            if not isinstance(state, dict):
                return False
            parts = [cast("dict[str, Any]", state).get(name, {}) for name in ("args", "attributes")]
            if not all(isinstance(part, dict) for part in parts):
                return False
    return True


def _check_names(names: Collection[str]) -> None:
    unknown = set(names) - {one.name for one in dataclasses.fields(TrainerState)}
    if unknown:
        raise ValueError(f"it has the field {min(unknown)!r}, which this release of transformers does not know")


_MOST_BYTES = 8 << 20
"""How many bytes the state, without its log, may have when the Trainer writes it again."""


def _check_size(state: dict[str, Any]) -> None:
    """Refuse a large state. The Trainer writes the state with indentation, so nested lists may grow a hundredfold."""
    size = 0
    for text in json.JSONEncoder(indent=2).iterencode(state):
        size += len(text)
        if size > _MOST_BYTES:
            raise ValueError(
                f"without its log, it would have more than {_MOST_BYTES:,} bytes when the Trainer writes it again"
            )


_KINDS: dict[str, Kind] = {
    "epoch": finite(0).optional,
    "global_step": whole(0),
    "max_steps": whole(),
    "logging_steps": finite().optional,
    "eval_steps": finite().optional,
    "save_steps": finite().optional,
    "train_batch_size": whole(0),
    "num_train_epochs": finite().optional,
    "num_input_tokens_seen": finite(0).optional,
    "total_flos": NUMBER.optional,
    "log_history": Kind(words="a list of objects", fits=_are_records, is_optional=True),
    "best_metric": NUMBER.optional,
    "best_global_step": whole(0).optional,
    "best_model_checkpoint": TEXT.optional,
    "is_local_process_zero": FLAG,
    "is_world_process_zero": FLAG,
    "is_hyper_param_search": FLAG,
    "trial_name": TEXT.optional,
    "trial_params": NAMED.optional,
    "stateful_callbacks": Kind(words="states of callbacks, by their names", fits=_are_callbacks, is_optional=True),
}


def check_trainer_state(path: Path, *, step: int) -> None:
    """Check the state of a Trainer.

    Args:
        path: the path of `trainer_state.json`.
        step: the step of the checkpoint.

    Raises:
        CheckpointError: the file is not a JSON object or belongs to another step, or a field has an invalid value.
        OSError: the file cannot be read.
    """
    try:
        state = read_object(path, max_bytes=MAX_MANIFEST_BYTES, constant=float)
        known = SimpleNamespace(**{"train_batch_size": None, **state})  # the Trainer computes with this field
        check_fields(known, {name: kind for name, kind in _KINDS.items() if hasattr(known, name)})
        _check_names(state.keys())
        _check_size({name: one for name, one in state.items() if name != "log_history"})
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    found: Any = state.get("global_step")
    if found != step:
        raise CheckpointError(f"{path} says step {found!r}, but the checkpoint is of step {step}")


def check_weights(folder: Path, files: Collection[str]) -> None:
    """Check the lists of weights and the headers of safetensors files that the Trainer loads. No tensor is read.

    Args:
        folder: the folder of the checkpoint.
        files: the paths of its files.

    Raises:
        CheckpointError: a file is damaged.
        OSError: a file cannot be read.
    """
    for path in sorted(files):
        try:
            if path in {layout.SAFETENSORS_INDEX, layout.BIN_INDEX}:
                check_index(folder, path, files)
            elif layout.is_tensors(path):
                tensors_of(folder / path)
        except (OSError, MemoryError):
            raise
        except CheckpointError as error:
            raise refusal(folder / path, error.message) from error
        except Exception as error:  # hostile content may raise anything
            raise refusal(folder / path, f"it is damaged: {type(error).__name__}: {error}") from error
