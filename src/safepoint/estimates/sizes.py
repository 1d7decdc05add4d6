"""Bytes of weights, gradients and optimizer states, and how the strategies share them among ranks. Pure arithmetic.

The rules follow torch.optim, bitsandbytes, FSDP2 and DeepSpeed, as their checkpoints show (docs/planning.md).
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""The bytes of an element, by torch's name of its type."""
_BLOCK = 256
"""bitsandbytes keeps one scale for each block of this many elements."""
_LEAST_8BIT = 4096
"""bitsandbytes keeps the states of weights with fewer elements than this in 32 bits."""
_ZERO_ALIGNMENT = 2
"""ZeRO-1 and 2 pad each flat buffer to a multiple of this number times the number of ranks
(`nccl_start_alignment_factor`)."""


class Strategy(enum.StrEnum):
    """How the ranks share the model; docs/strategies.md."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_FULL = "fsdp-full"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @property
    def is_zero(self) -> bool:
        """Whether this is a strategy of DeepSpeed."""
        return self in {Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3}

    @property
    def is_fsdp(self) -> bool:
        """Whether this is a strategy of FSDP2."""
        return self in {Strategy.FSDP, Strategy.FSDP_FULL}


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state.

    Args:
        name: the name of the state, such as `exp_avg`.
        sizes: the sizes of its dimensions.
        item_bytes: bytes of an element.
    """

    name: str
    sizes: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.sizes) * self.item_bytes


_States = Callable[[tuple[int, ...], int], list[StateTensor]]


def _step() -> StateTensor:
    return StateTensor("step", (), 4)


def _like_weight(*names: str, has_step: bool = True) -> _States:
    def states(sizes: tuple[int, ...], item_bytes: int) -> list[StateTensor]:
        found = [StateTensor(name, sizes, item_bytes) for name in names]
        return [_step(), *found] if has_step else found

    return states


def _in_32bit(count: int) -> _States:
    """Optimizers of bitsandbytes: 32 bits for weights of any type."""

    def states(sizes: tuple[int, ...], item_bytes: int) -> list[StateTensor]:
        return [StateTensor(f"state{number}", sizes, 4) for number in range(1, count + 1)]

    return states


def _in_8bit(count: int) -> _States:
    def states(sizes: tuple[int, ...], item_bytes: int) -> list[StateTensor]:
        num_elements = math.prod(sizes)
        if num_elements < _LEAST_8BIT:
            return _in_32bit(count)(sizes, item_bytes)
        found: list[StateTensor] = []
        for number in range(1, count + 1):
            found.append(StateTensor(f"state{number}", sizes, 1))
            found.append(StateTensor(f"absmax{number}", (-(-num_elements // _BLOCK),), 4))
        return found

    return states


def _adafactor(sizes: tuple[int, ...], item_bytes: int) -> list[StateTensor]:
    # Transformers' class computes in 32 bits for weights of any type.
    rms = StateTensor("RMS", (), 4)
    if len(sizes) < 2:
        return [rms, StateTensor("exp_avg_sq", sizes, 4)]
    columns = (*sizes[:-2], sizes[-1])
    return [rms, StateTensor("exp_avg_sq_row", sizes[:-1], 4), StateTensor("exp_avg_sq_col", columns, 4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The state that an optimizer keeps for each parameter that it trains.

    Args:
        name: its name in `safepoint plan storage --optimizer`.
        states: returns the tensors for a parameter, from the parameter's sizes and the bytes of its elements.
        num_settings: how many settings a group of parameters has; each is an item of a checkpoint of DCP.
        moments: how many states in full precision ZeRO keeps for each trained parameter.
        also: the values of `TrainingArguments.optim` that select this optimizer.
        states_of_embeddings: the same as `states`, for the weight of an embedding; None if `states` applies to it.
    """

    name: str
    states: _States
    num_settings: int
    moments: int
    also: tuple[str, ...] = ()
    states_of_embeddings: _States | None = None

    def states_of(self, sizes: tuple[int, ...], item_bytes: int, *, is_embedding: bool) -> list[StateTensor]:
        """The tensors for a parameter, as the Trainer sets the optimizer up."""
        if is_embedding and self.states_of_embeddings is not None:
            return self.states_of_embeddings(sizes, item_bytes)
        return self.states(sizes, item_bytes)


OPTIMIZERS: dict[str, Optimizer] = {
    one.name: one
    for one in (
        Optimizer(
            name="adamw",
            states=_like_weight("exp_avg", "exp_avg_sq"),
            num_settings=13,
            moments=2,
            also=("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adam"),
        ),
        Optimizer(
            name="adamw-8bit",
            states=_in_8bit(2),
            num_settings=12,
            moments=2,
            also=("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
            # Under the Trainer, bitsandbytes keeps 32 bits for each nn.Embedding (`register_module_override`).
            states_of_embeddings=_in_32bit(2),
        ),
        Optimizer(
            name="adamw-32bit-paged",
            states=_in_32bit(2),
            num_settings=12,
            moments=2,
            also=("paged_adamw", "paged_adamw_32bit"),
        ),
        Optimizer(name="adafactor", states=_adafactor, num_settings=11, moments=1),
        Optimizer(name="adagrad", states=_like_weight("sum"), num_settings=11, moments=1),
        Optimizer(name="rmsprop", states=_like_weight("square_avg"), num_settings=11, moments=1),
        Optimizer(
            name="lion",
            states=_in_32bit(1),
            num_settings=11,
            moments=1,
            also=("lion_32bit", "paged_lion", "paged_lion_32bit"),
        ),
        Optimizer(
            name="lion-8bit",
            states=_in_8bit(1),
            num_settings=11,
            moments=1,
            also=("lion_8bit", "paged_lion_8bit"),
            states_of_embeddings=_in_32bit(1),
        ),
        Optimizer(name="sgd", states=_like_weight(has_step=False), num_settings=11, moments=0),
        Optimizer(
            name="sgd-momentum", states=_like_weight("momentum_buffer", has_step=False), num_settings=11, moments=1
        ),
    )
}
"""The optimizers by their names."""


def optimizer_named(name: str) -> Optimizer | None:
    """The optimizer with this name, or with this value of `TrainingArguments.optim`; None if it is not known."""
    key = name.strip().lower()
    found = OPTIMIZERS.get(key) or OPTIMIZERS.get(key.replace("_", "-"))
    return found or next((one for one in OPTIMIZERS.values() if key in one.also), None)


# ---- how ranks share tensors ---------------------------------------------------------------------------------------


def rows_of_shard(sizes: tuple[int, ...], *, num_ranks: int) -> tuple[int, int]:
    """How FSDP2 splits a tensor among ranks, along its first dimension, as `torch.chunk` does.

    Returns:
        The rows of the largest shard, which rank 0 has, and how many ranks have a shard that is not empty.
    """
    rows = sizes[0] if sizes else 1
    if rows == 0:
        return 0, 1
    largest = -(-rows // num_ranks)
    return largest, -(-rows // largest)


def flat_of_zero2(counts: Sequence[int], *, num_ranks: int) -> int:
    """The number of elements of the flat buffer in which ZeRO-1 and 2 hold trained weights, padded for all ranks."""
    total = sum(counts)
    return total + -total % (_ZERO_ALIGNMENT * num_ranks)


def flat_of_zero3(counts: Sequence[int], *, num_ranks: int) -> int:
    """How many elements one rank's partition has under ZeRO-3: an equal share of each weight, rounded up."""
    return sum(-(-count // num_ranks) for count in counts)


# ---- memory --------------------------------------------------------------------------------------------------------


class TrainingMemory(NamedTuple):
    """Bytes of one rank during training, without activations.

    Args:
        weights_bytes: the bytes of all weights that the rank holds.
        gradients_bytes: the bytes of the gradients of the trained weights.
        optimizer_bytes: the bytes of the optimizer's states and, under ZeRO, of the weights in full precision.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of weights, gradients and optimizer states together."""
        return sum(self)


def training_memory(
    *,
    strategy: Strategy,
    frozen_bytes: int,
    trained: Sequence[tuple[int, ...]],
    item_bytes: int,
    optimizer: Optimizer,
    num_ranks: int,
    embeddings: Sequence[tuple[int, ...]] = (),
) -> TrainingMemory:
    """The memory of the rank that needs the most memory.

    Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    section 3: stage 1 shares optimizer states, stage 2 also gradients, stage 3 also weights; FSDP shares all three.

    Args:
        strategy: how ranks share the model.
        frozen_bytes: the bytes of the weights that are not trained.
        trained: the sizes of the trained weights.
        item_bytes: bytes of an element of a trained weight.
        optimizer: the optimizer.
        num_ranks: how many ranks share the model.
        embeddings: the sizes of the trained embeddings, which are not in `trained`.
    """
    counts = [math.prod(sizes) for sizes in (*trained, *embeddings)]
    weights = sum(counts) * item_bytes
    if strategy.is_zero:
        states = 4 * (1 + optimizer.moments) * sum(counts)
    else:
        states = sum(
            state.num_bytes
            for group, is_embedding in ((trained, False), (embeddings, True))
            for sizes in group
            for state in optimizer.states_of(sizes, item_bytes, is_embedding=is_embedding)
        )
    share_all = strategy.is_fsdp or strategy is Strategy.ZERO3
    share_gradients = share_all or strategy is Strategy.ZERO2
    share_states = share_gradients or strategy is Strategy.ZERO1
    return TrainingMemory(
        weights_bytes=_share(frozen_bytes + weights, num_ranks if share_all else 1),
        gradients_bytes=_share(weights, num_ranks if share_gradients else 1),
        optimizer_bytes=_share(states, num_ranks if share_states else 1),
    )


def _share(num_bytes: int, num_ranks: int) -> int:
    return -(-num_bytes // num_ranks)


def quantized_bytes(num_parameters: int, *, is_double: bool = True) -> int:
    """The bytes of weights in 4 bits (QLoRA), with their scales.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023, section 3: one scale of 32
    bits for 64 weights, that is 0.5 bits for each weight; 0.127 bits with double quantization.
    """
    bits = 4 + (0.127 if is_double else 0.5)
    return math.ceil(num_parameters * bits / 8)
