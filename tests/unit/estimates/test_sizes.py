"""Optimizer states, shards and partitions have the sizes that torch, bitsandbytes and DeepSpeed give them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import Adafactor

from safepoint.estimates.sizes import (
    DTYPE_BYTES,
    OPTIMIZERS,
    Strategy,
    flat_of_zero2,
    flat_of_zero3,
    optimizer_named,
    quantized_bytes,
    rows_of_shard,
    training_memory,
)
from tests.support.jobs import environment

_SHAPES = ((6, 5), (7,), (2, 3, 4))
_MADE: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.1, scale_parameter=False, relative_step=False),
}


@pytest.mark.parametrize("name", _MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_the_optimizer(name: str, dtype: torch.dtype) -> None:
    """Each tensor of its state after a step, by name, shape and bytes."""
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in _SHAPES]
    optimizer = _MADE[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        theirs = {
            key: (tuple(value.shape), value.element_size())
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        ours = {
            state.name: (state.sizes, state.item_bytes)
            for state in OPTIMIZERS[name].states(tuple(parameter.shape), parameter.element_size())
        }
        assert ours == theirs


def test_types_have_their_sizes() -> None:
    for name, size in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size


@given(rows=st.integers(1, 5000), num_ranks=st.integers(1, 300))
def test_a_shard_is_that_of_torch_chunk(rows: int, num_ranks: int) -> None:
    pieces = torch.empty(rows, device="meta").chunk(num_ranks)
    assert rows_of_shard((rows, 3), num_ranks=num_ranks) == (len(pieces[0]), len(pieces))


@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), num_ranks=st.integers(1, 64))
def test_partitions_hold_all_elements(counts: list[int], num_ranks: int) -> None:
    """Stage 1 and 2 divide one flat buffer evenly; stage 3 rounds up for each weight."""
    flat = flat_of_zero2(counts, num_ranks=num_ranks)
    assert flat % num_ranks == 0
    assert sum(counts) <= flat < sum(counts) + 2 * num_ranks
    part = flat_of_zero3(counts, num_ranks=num_ranks)
    assert sum(counts) <= part * num_ranks <= sum(counts) + len(counts) * (num_ranks - 1)


def test_states_in_8_bits() -> None:
    """A byte for each element and a scale for 256 of them; small weights stay in 32 bits."""
    states = OPTIMIZERS["adamw-8bit"].states((64, 128), 2)
    assert sum(state.num_bytes for state in states) == 2 * (8192 + 4 * 32)
    small = OPTIMIZERS["adamw-8bit"].states((128,), 2)
    assert sum(state.num_bytes for state in small) == 2 * 4 * 128


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("adamw-8bit", "AdamW8bit"), ("adamw-32bit-paged", "AdamW32bit"), ("lion-8bit", "Lion8bit")],
)
def test_states_are_those_of_bitsandbytes(name: str, optimizer: str) -> None:
    """In an interpreter of its own: see the group `bitsandbytes` in pyproject.toml."""
    folder = Path(sys.prefix) / "bitsandbytes"
    if not folder.is_dir():
        pytest.skip(f"bitsandbytes is not in {folder}: run `make venv`")
    code = (
        "import json, sys, torch\n"
        "import bitsandbytes.optim\n"
        "made = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in ((64, 128), (100,))]\n"
        "optimizer = getattr(bitsandbytes.optim, sys.argv[1])(made, lr=1e-3)\n"
        "for one in made: one.grad = torch.ones_like(one)\n"
        "optimizer.step()\n"
        "states = [optimizer.state[one] for one in made]\n"
        "print(json.dumps([{k: v.nbytes for k, v in s.items() if hasattr(v, 'nbytes')} for s in states]))\n"
    )
    command = [sys.executable, "-c", code, optimizer]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(folder)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for shape, theirs in zip(((64, 128), (100,)), json.loads(done.stdout.splitlines()[-1]), strict=True):
        ours = {state.name: state.num_bytes for state in OPTIMIZERS[name].states(shape, 2)}
        # The maps of 8 bits to values are the same tensors for all weights: 2 kB in all.
        assert ours == {key: size for key, size in theirs.items() if not key.startswith("qmap")}


@pytest.mark.parametrize(("name", "num_bytes"), [("adamw-8bit", 8), ("lion-8bit", 4), ("adamw", 8)])
def test_the_trainer_keeps_embeddings_in_32_bits(name: str, num_bytes: int) -> None:
    """`Trainer.create_optimizer` overrides the bits of each nn.Embedding."""
    item = 4 if name == "adamw" else 2
    states = OPTIMIZERS[name].states_of((128, 64), item, is_embedding=True)
    assert sum(state.num_bytes for state in states if state.sizes) == 128 * 64 * num_bytes


def test_optimizers_have_other_names() -> None:
    names = {alias: optimizer_named(alias) for one in OPTIMIZERS.values() for alias in (one.name, *one.also)}
    assert None not in names.values()
    assert optimizer_named("adamw_bnb_8bit") is OPTIMIZERS["adamw-8bit"]
    assert optimizer_named("no-such") is None


@given(num_ranks=st.integers(1, 512))
def test_each_stage_of_zero_shares_more(num_ranks: int) -> None:
    """ZeRO's paper, section 3: 16 bytes for each parameter of a model in 16 bits, shared step by step."""

    def total(strategy: Strategy) -> int:
        return training_memory(
            strategy=strategy,
            frozen_bytes=0,
            trained=[(1024, 1024)],
            item_bytes=2,
            optimizer=OPTIMIZERS["adamw"],
            num_ranks=num_ranks,
        ).total_bytes

    count = 1 << 20
    assert total(Strategy.ZERO1) == pytest.approx(4 * count + 12 * count / num_ranks, abs=1)
    assert total(Strategy.ZERO2) == pytest.approx(2 * count + 14 * count / num_ranks, abs=2)
    assert total(Strategy.ZERO3) == pytest.approx(16 * count / num_ranks, abs=3)


def test_weights_in_4_bits() -> None:
    """QLoRA's paper: 0.127 bits for the scales with double quantization, 0.5 without."""
    count = 1_000_000
    assert quantized_bytes(count) == math.ceil(count * 4.127 / 8)
    assert quantized_bytes(count, is_double=False) == math.ceil(count * 4.5 / 8)
