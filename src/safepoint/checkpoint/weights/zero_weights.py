"""Finds the full-precision weights in a checkpoint of DeepSpeed's ZeRO. Each rank stores a partition of the weights.

Stages 1 and 2 concatenate the weights of one group of the optimizer and cut the result into one part for each rank.
Stage 3 cuts each weight into one part for each rank. DeepSpeed 0.19 reads this layout in `utils/zero_to_fp32.py`.
"""

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from safepoint.checkpoint.weights.budget import Budget, Cost
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
    """The folder with the partitions: the folder that the file `latest` names, or `folder` itself. None if neither
    has partitions."""
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


def zero_weights(folder: ReadablePath, budget: Budget | None = None) -> list[StoredWeight]:
    """The model's weights.

    Args:
        folder: see `zero_folder`.
        budget: the budget of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks a rank's file, was made with model parallelism, or costs
            more than `budget` allows.
        OSError: a file cannot be read.
    """
    budget = budget or Budget()
    partitions, models = zero_files(folder)
    states = [read_torch_file(path, budget=budget)["optimizer_state_dict"] for path in partitions]
    model = [read_torch_file(path, budget=budget) for path in models]
    if _count(states[0]["partition_count"]) != len(states):
        raise CheckpointError(f"{folder.name} has {len(states)} of {_count(states[0]['partition_count'])} partitions")
    stage = _count(states[0]["zero_stage"])
    trained = (_trained_in_stage_3 if stage == 3 else _trained)(states, model[0], budget)
    weights = {weight.shape.name: weight for weight in trained}
    for weight in _frozen(model, stage, budget):
        weights.setdefault(weight.shape.name, weight)
    for alias, name in _pairs(model[0].get("shared_params")):
        if name in weights and alias not in weights:
            known = weights[name]
            budget.spend(Cost.WEIGHTS)
            budget.spend(Cost.RUNS, len(known.runs))  # count the runs again, because the export reads them once more
            weights[alias] = StoredWeight(known.shape._replace(name=alias), known.runs)
    for weight in _others(model[0], stage, budget):
        weights.setdefault(weight.shape.name, weight)
    return list(weights.values())


def _by_rank(pattern: re.Pattern[str], files: Sequence[_Path]) -> dict[int, _Path]:
    found = {path: pattern.fullmatch(path.name) for path in files}
    return {int(match[1] or 0): path for path, match in found.items() if match is not None}


def _count(value: Any) -> int:
    if isinstance(value, Inert):  # a member of an enumeration, made from its value
        value = value.args[0]
    return max(numbers_of(value)) if isinstance(value, list | tuple) else int(value)


class _Flats:
    """Flat tensors, as one sequence of elements.

    Args:
        tensors: the tensors, in the order of the sequence.
        budget: the budget of the checkpoint. Tensors and runs count against it.
    """

    def __init__(self, tensors: Iterable[StoredTensor], budget: Budget) -> None:
        every = list(tensors)
        budget.spend(Cost.STEPS, len(every))
        self.dtype = every[0].dtype
        self._tensors = [tensor for tensor in every if tensor.count]
        self._begins = list(itertools.accumulate((tensor.count for tensor in self._tensors), initial=0))
        self._budget = budget

    @property
    def count(self) -> int:
        """How many elements the tensors have."""
        return self._begins[-1]

    def runs(self, first: int, count: int, begin: int = 0) -> Iterator[Run]:
        """The runs of elements `first` to `first + count`, one for each tensor that has some of them.

        Args:
            first: the first element.
            count: how many elements.
            begin: the position of the first element in the weight, in bytes.
        """
        done = 0
        for number in range(max(0, bisect_right(self._begins, first) - 1), len(self._tensors)):
            tensor, start = self._tensors[number], self._begins[number]
            low, high = max(first, start), min(first + count, start + tensor.count)
            if low >= high:
                return
            self._budget.spend(Cost.RUNS)
            yield tensor.run(low - start, high - low, begin + done * ITEM_BYTES[tensor.dtype])
            done += high - low


def _shapes(model: Mapping[str, Any], budget: Budget) -> Iterator[Mapping[str, tuple[int, ...]]]:
    """The names and sizes of the trained weights, for each group of the optimizer."""
    for group in model["param_shapes"]:
        budget.spend(Cost.WEIGHTS, len(group))  # counted for each entry, because one group may be listed many times
        yield {name: numbers_of(sizes) for name, sizes in group.items()}


def _trained(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any], budget: Budget) -> Iterator[StoredWeight]:
    """The trained weights under stages 1 and 2."""
    paddings: Any = states[0].get("param_alignment_paddings")
    for number, group in enumerate(_shapes(model, budget)):
        flats = _Flats((state["single_partition_of_fp32_groups"][number] for state in states), budget)
        after = [0] * len(group) if paddings is None else paddings[number]
        first = 0
        for (name, sizes), padding in zip(group.items(), after, strict=True):
            count = math.prod(sizes)
            yield StoredWeight.of(name, flats.dtype, sizes, flats.runs(first, count))
            first += count + int(padding)
        _check_all_used(first, flats.count, align=2 * len(states))


def _trained_in_stage_3(
    states: Sequence[Mapping[str, Any]], model: Mapping[str, Any], budget: Budget
) -> Iterator[StoredWeight]:
    flats = [_Flats(state["fp32_flat_groups"], budget) for state in states]
    first = 0
    for group in _shapes(model, budget):
        for name, sizes in group.items():
            yield StoredWeight.of(name, flats[0].dtype, sizes, _cut_runs(flats, first, math.prod(sizes)))
            first += -(-math.prod(sizes) // len(flats))
    _check_all_used(first, flats[0].count, 1)


def _cut_runs(flats: Sequence[_Flats], first: int, count: int) -> Iterator[Run]:
    """The runs of a weight of `count` elements. Each rank has a part of the weight, from element `first` of the
    rank's flat tensors on."""
    part = -(-count // len(flats))
    for rank, begin in enumerate(range(0, count, max(part, 1))):  # the last ranks may have no element
        flat = flats[rank]
        yield from flat.runs(first, min(part, count - begin), begin * ITEM_BYTES[flat.dtype])


def _check_all_used(used: int, stored: int, align: int) -> None:
    """Check that the unused rest of a flat group of `stored` elements is only padding to a multiple of `align`."""
    if -(-used // align) != -(-stored // align):
        raise CheckpointError(
            f"the checkpoint lists weights with {used} elements, and {stored} are stored; padding does not explain "
            "the difference, so the layout is not known"
        )


def _frozen(models: Sequence[Mapping[str, Any]], stage: int, budget: Budget) -> Iterator[StoredWeight]:
    """The weights that are not trained; none if the checkpoint does not store such weights."""
    shapes: dict[str, Any] = models[0].get("frozen_param_shapes") or {}
    budget.spend(Cost.WEIGHTS, len(shapes))
    for name, stated in shapes.items():
        fragments = (model["frozen_param_fragments"][name] for model in (models if stage == 3 else models[:1]))
        flats = _Flats(fragments, budget)
        sizes = numbers_of(stated)
        yield StoredWeight.of(name, flats.dtype, sizes, flats.runs(0, math.prod(sizes)))


def _others(model: Mapping[str, Any], stage: int, budget: Budget) -> Iterator[StoredWeight]:
    """The buffers. Below stage 3, each rank has the whole model, so all other tensors of the model are included."""
    module: dict[str, Any] = model.get("module") or {}
    buffers: set[str] = {name for name in model.get("buffer_names") or () if type(name) is str}
    budget.spend(Cost.WEIGHTS, len(module))
    budget.spend(Cost.RUNS, len(module))
    for name, tensor in module.items():
        if isinstance(tensor, StoredTensor) and (stage < 3 or name in buffers):
            yield StoredWeight.of(name, tensor.dtype, tensor.sizes, [tensor.run(0, tensor.count, 0)])


def _pairs(shared: Any) -> list[tuple[str, str]]:
    items = shared.items() if isinstance(shared, dict) else shared or ()  # pyright: ignore
    return [(alias, name) for alias, name in items if type(alias) is str and type(name) is str]  # pyright: ignore
