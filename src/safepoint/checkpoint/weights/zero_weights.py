"""Finds the weights, in full precision, in a checkpoint of DeepSpeed's ZeRO. Each rank stores a partition of them.

Stages 1 and 2 concatenate the weights of one group of the optimizer and cut the result into one part for each rank.
Stage 3 cuts each weight into one part for each rank. The layout is that of DeepSpeed 0.19, `utils/zero_to_fp32.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from safepoint.checkpoint.weights.stored_weight import Run, StoredWeight
from safepoint.checkpoint.weights.torch_file import ITEM_BYTES, Inert, StoredTensor, numbers_of, read_torch_file
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath

_Path = TypeVar("_Path", bound=ReadablePath)
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_MAX_NAME_BYTES = 4096
_OTHER_RANKS = re.compile(r".*_mp_rank_(?!00_)\d+_.*\.pt|.*mp_rank_(?!00_)\d+_model_states\.pt")


def zero_folder(folder: _Path) -> _Path | None:
    """The folder with the partitions: the one that the file `latest` names, or `folder`. None if neither has them."""
    latest = folder / "latest"
    named = [folder]
    if latest.is_file():
        with latest.open("rb") as file:
            name = file.read(_MAX_NAME_BYTES).decode(errors="replace").strip()
        if re.fullmatch(r"[\w.-]+", name) and name not in {".", ".."}:
            named.insert(0, folder / name)
    for place in named:
        if place.is_dir() and any(_OPTIMIZER.fullmatch(path.name) for path in place.iterdir()):
            return place
    return None


def zero_files(folder: _Path) -> tuple[list[_Path], list[_Path]]:
    """The files of all ranks.

    Args:
        folder: see `zero_folder`.

    Returns:
        The partitions of the optimizer, and the files of the model, both sorted by rank. Below stage 3 there is only
        one file of the model.

    Raises:
        CheckpointError: a rank's file is missing, or the checkpoint was made with model parallelism.
        OSError: the folder cannot be read.
    """
    files = list(folder.iterdir())
    if any(_OTHER_RANKS.fullmatch(path.name) for path in files):
        raise CheckpointError(f"{folder.name} was made with model parallelism, which Safepoint cannot read")
    partitions = _by_rank(_OPTIMIZER, files)
    models = _by_rank(_MODEL, files)
    if sorted(partitions) != list(range(len(partitions))) or 0 not in models:
        raise CheckpointError(f"{folder.name} lacks the file of a rank")
    return [partitions[rank] for rank in sorted(partitions)], [models[rank] for rank in sorted(models)]


def zero_weights(folder: ReadablePath) -> list[StoredWeight]:
    """The model's weights.

    Args:
        folder: see `zero_folder`.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks a rank's file, or was made with model parallelism.
        OSError: a file cannot be read.
    """
    partitions, models = zero_files(folder)
    states = [read_torch_file(path)["optimizer_state_dict"] for path in partitions]
    model = [read_torch_file(path) for path in models]
    if _count(states[0]["partition_count"]) != len(states):
        raise CheckpointError(f"{folder.name} has {len(states)} of {_count(states[0]['partition_count'])} partitions")
    stage = _count(states[0]["zero_stage"])
    trained = _trained_in_stage_3(states, model[0]) if stage == 3 else _trained(states, model[0])
    weights = {weight.shape.name: weight for weight in trained}
    for weight in _frozen(model, stage):
        weights.setdefault(weight.shape.name, weight)
    for alias, name in _pairs(model[0].get("shared_params")):
        if name in weights and alias not in weights:
            known = weights[name]
            weights[alias] = StoredWeight(known.shape._replace(name=alias), known.runs)
    for weight in _others(model[0], stage):
        weights.setdefault(weight.shape.name, weight)
    return list(weights.values())


def _by_rank(pattern: re.Pattern[str], files: Sequence[_Path]) -> dict[int, _Path]:
    found = {path: pattern.fullmatch(path.name) for path in files}
    return {int(match[1] or 0): path for path, match in found.items() if match is not None}


def _count(value: Any) -> int:
    if isinstance(value, Inert):  # a member of an enumeration, made from its value
        value = value.args[0]
    return max(numbers_of(value)) if isinstance(value, list | tuple) else int(value)


def _shapes(model: Mapping[str, Any]) -> list[Mapping[str, tuple[int, ...]]]:
    return [{name: numbers_of(sizes) for name, sizes in group.items()} for group in model["param_shapes"]]


def _trained(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> Iterator[StoredWeight]:
    """The trained weights under stages 1 and 2."""
    paddings: Any = states[0].get("param_alignment_paddings")
    for number, group in enumerate(_shapes(model)):
        parts = [cast("StoredTensor", state["single_partition_of_fp32_groups"][number]) for state in states]
        after = [0] * len(group) if paddings is None else list(paddings[number])
        first = 0
        for (name, sizes), padding in zip(group.items(), after, strict=True):
            count = math.prod(sizes)
            yield StoredWeight.of(name, parts[0].dtype, sizes, _flat_runs(parts, first, count))
            first += count + int(padding)
        _check_all_used(first, sum(part.count for part in parts), align=2 * len(states))


def _trained_in_stage_3(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> Iterator[StoredWeight]:
    flats = [cast("list[StoredTensor]", list(state["fp32_flat_groups"])) for state in states]
    first = 0
    for group in _shapes(model):
        for name, sizes in group.items():
            count = math.prod(sizes)
            part = -(-count // len(flats))
            runs: list[Run] = []
            for rank, flat in enumerate(flats):
                mine = max(0, min(part, count - rank * part))
                item = ITEM_BYTES[flat[0].dtype]
                runs += [run._replace(begin=run.begin + rank * part * item) for run in _flat_runs(flat, first, mine)]
            yield StoredWeight.of(name, flats[0][0].dtype, sizes, runs)
            first += part
    _check_all_used(first, sum(tensor.count for tensor in flats[0]), 1)


def _check_all_used(used: int, stored: int, align: int) -> None:
    """Check that the unused rest of a flat group of `stored` elements is only padding to a multiple of `align`."""
    if -(-used // align) != -(-stored // align):
        raise CheckpointError(
            f"the checkpoint lists weights with {used} elements, and {stored} are stored; padding does not explain "
            "the difference, so the layout is not known"
        )


def _flat_runs(parts: Sequence[StoredTensor], first: int, count: int) -> list[Run]:
    """Where elements `first` to `first + count` of the concatenated flat tensors lie, as a `Run` for each tensor."""
    runs: list[Run] = []
    begin, done = 0, 0
    for part in parts:
        low, high = max(first, begin), min(first + count, begin + part.count)
        if low < high:
            runs.append(part.run(low - begin, high - low, done * ITEM_BYTES[part.dtype]))
            done += high - low
        begin += part.count
    return runs


def _frozen(models: Sequence[Mapping[str, Any]], stage: int) -> Iterator[StoredWeight]:
    """Weights that are not trained. A checkpoint may lack them."""
    shapes: dict[str, Any] = models[0].get("frozen_param_shapes") or {}
    for name, stated in shapes.items():
        fragments = [model["frozen_param_fragments"][name] for model in (models if stage == 3 else models[:1])]
        sizes = numbers_of(stated)
        count = math.prod(sizes)
        yield StoredWeight.of(name, fragments[0].dtype, sizes, _flat_runs(fragments, 0, count))


def _others(model: Mapping[str, Any], stage: int) -> Iterator[StoredWeight]:
    """The buffers. Below stage 3, where each rank has the whole model, also all other tensors of the model."""
    module: dict[str, Any] = model.get("module") or {}
    buffers: set[str] = {name for name in model.get("buffer_names") or () if type(name) is str}
    for name, tensor in module.items():
        if isinstance(tensor, StoredTensor) and (stage < 3 or name in buffers):
            yield StoredWeight.of(name, tensor.dtype, tensor.sizes, [tensor.run(0, tensor.count, 0)])


def _pairs(shared: Any) -> list[tuple[str, str]]:
    items = shared.items() if isinstance(shared, dict) else shared or ()  # pyright: ignore
    return [(alias, name) for alias, name in items if type(alias) is str and type(name) is str]  # pyright: ignore
