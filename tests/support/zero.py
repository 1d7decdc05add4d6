"""Makes checkpoints in the layout of DeepSpeed's ZeRO, for any number of ranks, without DeepSpeed."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WEIGHTS = {
    "embed.weight": (7, 3),
    "layer.weight": (4, 5),
    "layer.bias": (5,),
    "head.weight": (1, 11),
    "scale": (1,),
    "norm.weight": (6,),
}
GROUPS = (("embed.weight", "layer.weight", "head.weight"), ("layer.bias", "scale", "norm.weight"))
MOMENTS = ("exp_avg", "exp_avg_sq")
States = dict[str, dict[str, torch.Tensor]]


def random_states(moments: Sequence[str] = MOMENTS) -> States:
    """Random values for each weight: the weight as `fp32`, and its moments."""
    return {name: {state: torch.randn(shape) for state in ("fp32", *moments)} for name, shape in WEIGHTS.items()}


def write_zero(
    folder: Path,
    states: States,
    *,
    stage: int,
    ranks: int,
    steps: Sequence[float] = (5.0, 5.0),
    alignment: int = 1,
    module: Mapping[str, torch.Tensor] | None = None,
    buffers: Sequence[str] = (),
    frozen: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the files of `ranks` ranks into the checkpoint `folder`.

    Args:
        folder: of the checkpoint; it is made.
        states: see `random_states`.
        stage: 1, 2 or 3.
        ranks: how many.
        steps: of each of `GROUPS`.
        alignment: each weight begins at a multiple of it, below stage 3.
        module: what is not trained and whole in the model's file, besides the weights themselves.
        buffers: names of those in `module` that are buffers.
        frozen: weights that are not trained, which stage 3 cuts.
    """
    place = folder / "global_step5"
    place.mkdir(parents=True)
    (folder / "latest").write_text(place.name)
    shapes = [{name: torch.Size(WEIGHTS[name]) for name in group} for group in GROUPS]
    paddings = [_paddings(group, alignment) for group in GROUPS]
    kept = [state for state in next(iter(states.values())) if state != "fp32"]
    cut = _cut_weights if stage == 3 else _cut_group
    flats = {
        state: [
            cut([states[name][state] for name in group], ranks, paddings[number])
            for number, group in enumerate(GROUPS)
        ]
        for state in ("fp32", *kept)
    }
    for rank in range(ranks):
        base = {
            "state": {
                number: {"step": torch.tensor(steps[number]), **{state: flats[state][number][rank] for state in kept}}
                for number in range(len(GROUPS))
            },
            "param_groups": [
                {"lr": 0.25, "weight_decay": 0.1 / (number + 1), "params": [number]} for number in range(len(GROUPS))
            ],
        }
        common: dict[str, Any] = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False}
        if stage == 3:
            optimizer = {
                **common,
                "zero_stage": 3,
                "partition_count": ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": [flats["fp32"][number][rank] for number in range(len(GROUPS))],
            }
        else:
            lengths = [
                sum(math.prod(shape) for shape in group.values()) + sum(p)
                for group, p in zip(shapes, paddings, strict=True)
            ]
            padding = [
                len(flats["fp32"][number][0]) * ranks - length if rank == ranks - 1 else 0
                for number, length in enumerate(lengths)
            ]
            optimizer = {
                **common,
                "zero_stage": stage,
                "ds_version": "0.19.8",
                "clip_grad": 1.0,
                "partition_count": [ranks] * len(GROUPS),
                "group_paddings": padding,
                "param_alignment_paddings": paddings,
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [
                    flats["fp32"][number][rank][: len(flats["fp32"][number][rank]) - padding[number]]
                    for number in range(len(GROUPS))
                ],
            }
        torch.save({"optimizer_state_dict": optimizer}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if rank and stage != 3:
            continue
        whole = {name: torch.empty(0) if stage == 3 else one["fp32"] for name, one in states.items()}
        fragments = {name: _cut_weights([one], ranks, [0])[rank] for name, one in (frozen or {}).items()}
        model = {
            "module": {**whole, **(module or {})},
            "buffer_names": list(buffers),
            "param_shapes": shapes,
            "frozen_param_shapes": {name: one.shape for name, one in (frozen or {}).items()},
            "frozen_param_fragments": fragments,
            "shared_params": {},
            "lr_scheduler": {"last_epoch": 5},
            "global_steps": 5,
            "dp_world_size": ranks,
            "mp_world_size": 1,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, place / name)
    return place


def _paddings(group: Sequence[str], alignment: int) -> list[int]:
    paddings, first = [], 0
    for index, name in enumerate(group):
        first += math.prod(WEIGHTS[name])
        paddings.append(0 if index == len(group) - 1 else -first % alignment)
        first += paddings[-1]
    return paddings


def _cut_group(tensors: Sequence[torch.Tensor], ranks: int, paddings: Sequence[int]) -> list[torch.Tensor]:
    """The weights one after the other, divided into equal parts."""
    pieces = [
        torch.nn.functional.pad(one.flatten(), (0, after)) for one, after in zip(tensors, paddings, strict=True)
    ]
    flat = torch.cat(pieces)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % (2 * ranks)))
    return [part.clone() for part in flat.chunk(ranks)]


def _cut_weights(tensors: Sequence[torch.Tensor], ranks: int, _: Sequence[int]) -> list[torch.Tensor]:
    """Each weight divided into equal parts."""
    cut = [torch.nn.functional.pad(one.flatten(), (0, -one.numel() % ranks)).chunk(ranks) for one in tensors]
    return [torch.cat([parts[rank] for parts in cut]) for rank in range(ranks)]
