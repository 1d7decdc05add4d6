"""Reads whole weights in full precision, and their moments, from the parts that ZeRO's ranks have written.

Moments are the tensors that the optimizer keeps for each weight, such as `exp_avg`.

Stages 1 and 2 of ZeRO concatenate the weights of each optimizer group, and split the result into equal parts: one for
each rank. Stage 3 splits each single weight into such parts. DeepSpeed 0.19 writes this layout. Files are mapped
into memory, so that only the requested parts are read. Pickles in the files are read as data: this module calls no
function or class that a pickle names.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.weights.torch_file import numbers_of
from safepoint.checkpoint.weights.zero_weights import zero_files, zero_folder
from safepoint.errors import CheckpointError, ConflictError, printable
from safepoint.foundation.units import plural
from safepoint.training.state.data_only import load_data

WEIGHT = "fp32"
"""DeepSpeed's name for the weight itself. The moments of the weight have other names."""
_KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")
_STEP = "step"
_NAME = re.compile(r"[^/\x00.][^/\x00]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a weight lies: the number of its group, its first element in the group's flat tensor, and its shape.

    Under stage 3, each rank has a flat tensor of its own. In all these tensors, `first` is the same.
    """

    group: int
    first: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class Partitions:
    """A checkpoint of ZeRO.

    Args:
        folder: the verified checkpoint.
        ranks: the number of ranks that the manifest of the checkpoint states.

    Raises:
        CheckpointError: the checkpoint's layout is unknown.
        ConflictError: the checkpoint cannot be divided among another number of ranks.
        OSError: the checkpoint cannot be read.
    """

    def __init__(self, folder: Path, *, ranks: int) -> None:
        place = zero_folder(folder)
        if place is None:
            raise CheckpointError(f"{folder} holds no partitions of DeepSpeed's ZeRO")
        self.name = place.name
        """The name of the folder with the files, such as `global_step5`; for DeepSpeed, the checkpoint's tag."""
        optimizers, models = zero_files(place)
        self._ranks = len(optimizers)
        self._models = [_read(path) for path in models]
        self._optimizers = [_read(path)["optimizer_state_dict"] for path in optimizers]
        first = self._optimizers[0]
        self.stage = 3 if "fp32_flat_groups" in first else 2
        """3 for stage 3; 2 for the stages 1 and 2, whose files have the same layout."""
        if self._ranks != ranks or int(self._models[0]["dp_world_size"]) != ranks:
            raise ConflictError(
                f"{place} has the partitions of {plural(self._ranks, 'rank')}, but {plural(ranks, 'rank')} wrote it. "
                "With sequence, tensor or pipeline parallelism, the number of ranks and the stage must not change"
            )
        counts: Any = first["partition_count"]
        if any(int(count) != ranks for count in (counts if self.stage < 3 else [counts])):
            raise ConflictError(f"{place} is split among fewer ranks (MiCS) than the {ranks} that wrote it")
        self._base = [
            state["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"] for state in self._optimizers
        ]
        if not isinstance(self._base[0], dict):
            raise ConflictError(f"{place} was written with DeepSpeed's elastic_checkpoint, which uses another layout")
        self._flat: list[Sequence[torch.Tensor]] = [
            state["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
            for state in self._optimizers
        ]
        self._places = dict(self._find())
        self.moments = self._check_moments()
        """The names of the moments, such as `exp_avg`. A moment is a tensor of the optimizer with the size of the
        weight."""

    # ---- trained weights ------------------------------------------------------------------------------------

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained weights by name, in DeepSpeed's order."""
        return {name: place.shape for name, place in self._places.items()}

    def tensor(self, name: str, state: str) -> torch.Tensor:
        """A whole tensor in the shape of the weight `name`: the weight (`state` is `WEIGHT`) or one of `moments`."""
        place = self._places[name]
        return torch.cat(self._pieces(place, state)).reshape(place.shape)

    def size_bytes(self, name: str) -> int:
        """The size of a weight and its moments together."""
        place = self._places[name]
        parts = [self._part(0, place.group, state) for state in (WEIGHT, *self.moments)]
        return sum(place.count * part.element_size() for part in parts)

    def step(self, name: str) -> Any:
        """The optimizer's step count for this weight; None if the optimizer keeps no count."""
        return self._state(0, self._places[name].group).get(_STEP)

    def steps(self) -> list[Any]:
        """The optimizer's step count of each group."""
        return [self._state(0, group).get(_STEP) for group in range(len(self._flat[0]))]

    # ---- the rest of the optimizer ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with learning rate and all other settings of a group."""
        return [dict(group) for group in self._base[0]["param_groups"]]

    def common(self) -> dict[str, Any]:
        """The optimizer's values that belong to no group and no weight, such as the loss scale."""
        known = {**self._models[0], **self._optimizers[0]}
        return {name: known[name] for name in _KEPT if name in known}

    def metadata(self) -> dict[str, Any]:
        """The engine's own state, such as steps, scheduler and versions. It contains no weights."""
        left_out = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "optimizer"}
        return {name: value for name, value in self._models[0].items() if name not in left_out}

    # ---- frozen weights and buffers --------------------------------------------------------------------------------

    def others(self) -> Iterator[tuple[str, int, Callable[[], torch.Tensor]]]:
        """The name of each saved buffer and frozen weight, its size in bytes, and a function that reads it."""
        model = self._models[0]
        module: Mapping[str, Any] = model.get("module") or {}
        buffers: list[str] = model.get("buffer_names") or []
        aliases: Mapping[str, Any] = model.get("shared_params") or {}
        for name, tensor in module.items():
            _check_name(name)
            is_whole = self.stage != 3 or name in buffers
            if is_whole and name not in self._places and name not in aliases and isinstance(tensor, torch.Tensor):
                yield name, tensor.numel() * tensor.element_size(), tensor.clone
        if self.stage != 3:
            return
        shapes: Mapping[str, Any] = model.get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            _check_name(name)
            fragments = [one["frozen_param_fragments"][name] for one in self._models]
            sizes = numbers_of(shape)
            count = math.prod(sizes)

            def whole(
                fragments: list[torch.Tensor] = fragments, count: int = count, sizes: Any = sizes
            ) -> torch.Tensor:
                return torch.cat([fragment.reshape(-1) for fragment in fragments])[:count].reshape(sizes)

            yield name, count * fragments[0].element_size(), whole

    # ---- the layout -----------------------------------------------------------------------------------------

    def _find(self) -> Iterator[tuple[str, _Place]]:
        paddings = self._optimizers[0].get("param_alignment_paddings")
        for number, group in enumerate(self._models[0]["param_shapes"]):
            after = [0] * len(group) if paddings is None else list(paddings[number])
            first = 0
            for (name, shape), padding in zip(group.items(), after, strict=True):
                _check_name(name)
                place = _Place(group=number, first=first, shape=numbers_of(shape))
                yield name, place
                first += self._length(place) if self.stage == 3 else place.count + sum(numbers_of([padding]))
            there = self._flat[0][number].numel() * (1 if self.stage == 3 else self._ranks)
            if first > there:
                raise CheckpointError(f"the weights of group {number} have {first} elements, but {there} were saved")

    def _length(self, place: _Place) -> int:
        """The number of elements of each rank's part of a weight, in stage 3."""
        return -(-place.count // self._ranks)

    def _pieces_in_stage_3(self, place: _Place, state: str) -> list[torch.Tensor]:
        length = self._length(place)
        counts = [max(0, min(length, place.count - rank * length)) for rank in range(self._ranks)]
        return [
            self._part(rank, place.group, state)[place.first : place.first + count]
            for rank, count in enumerate(counts)
        ]

    def _pieces(self, place: _Place, state: str) -> list[torch.Tensor]:
        """The pieces of a weight, or of one of its moments, in the order of the ranks that hold them."""
        if self.stage == 3:
            return self._pieces_in_stage_3(place, state)
        # All parts have this length. Only the last rank's part may be shorter, because it may lack the padding.
        length = self._flat[0][place.group].numel()
        pieces: list[torch.Tensor] = []
        for rank in range(self._ranks):
            low = max(place.first - rank * length, 0)
            high = place.first + place.count - rank * length
            high = high if rank == self._ranks - 1 else min(high, length)
            if low < high:
                pieces.append(self._part(rank, place.group, state)[low:high])
        return pieces or [self._part(0, place.group, state)[:0]]

    def _part(self, rank: int, group: int, state: str) -> torch.Tensor:
        return self._flat[rank][group] if state == WEIGHT else self._state(rank, group)[state]

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        return self._base[rank]["state"].get(group, {})

    # ---- checks --------------------------------------------------------------------------------

    def _check_moments(self) -> tuple[str, ...]:
        """The names of the moments.

        Raises:
            ConflictError: another number of ranks could not load a moment.
            CheckpointError: a weight or a moment has too few elements.
        """
        moments = {name for name in self._state(0, 0) if name != _STEP}
        for name in moments:
            _check_name(name)
        for rank in range(self._ranks):
            for group, flat in enumerate(self._flat[rank]):
                state = self._state(rank, group)
                length = min(self._flat[0][group].numel(), flat.numel())
                for name in moments | (set(state) - {_STEP}):
                    part = state.get(name)
                    if not isinstance(part, torch.Tensor) or part.dim() != 1 or part.numel() < length:
                        raise ConflictError(
                            f"the optimizer's {name!r} does not have one value for each element of the weights, so "
                            "only the same number of ranks can load it"
                        )
                if not _is_same(state.get(_STEP), self._state(0, group).get(_STEP)):
                    raise ConflictError("the optimizer has taken different numbers of steps on different ranks")
        for place in self._places.values():
            for state in (WEIGHT, *moments):
                found = sum(piece.numel() for piece in self._pieces(place, state))
                if found != place.count:
                    raise CheckpointError(f"a weight has {place.count} elements, but its saved {state} has {found}")
        return tuple(sorted(moments))


def _check_name(name: Any) -> None:
    """Check the name of a weight, a buffer or a moment, which becomes the name of a file.

    Raises:
        CheckpointError: the file would be in another folder.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"the weight's or moment's name {printable(repr(name))} cannot be used as the name of a file"
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return float(one) == float(other)


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_data(path, mmap=True)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
