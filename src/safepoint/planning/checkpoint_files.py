"""The files of a checkpoint and their sizes, computed without a save.

Promises: the sizes of tensors, headers, padding and archives come from the modules that also write the files
(`safetensors_layout`, `torch_archive`). Partitions and shards have the padding of DeepSpeed and torch. The sizes of
the pickles, of the metadata of DCP, and of the small files (random number states, the Trainer's state) were measured
once. docs/planning.md compares the sum with real checkpoints of each strategy.
"""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from safepoint.checkpoint.format.safetensors_layout import KINDS, SIZES, Shape, lay_out
from safepoint.estimates.sizes import (
    DTYPE_BYTES,
    Optimizer,
    Strategy,
    flat_of_zero2,
    flat_of_zero3,
    rows_of_shard,
)
from safepoint.planning.architectures.fields import Tensor
from safepoint.snapshot.images.torch_archive import StorageRecords
from safepoint.snapshot.images.torch_archive import lay_out as lay_out_archive

_MAX_SHARD_BYTES = 50 * 10**9
"""`save_pretrained` begins a new file after this size (Transformers 5)."""
# `torch_image` pickles each value of the outermost dictionary separately. In a state dict, each value is one tensor,
# so the names of classes are repeated for each tensor. In the state of an optimizer, one value contains all tensors,
# so each name occurs once.
_TENSOR_PICKLE_BYTES = 157
_STATE_PICKLE_BYTES = 78
_PICKLE_BYTES = 320
_DCP_PICKLE_BYTES = 157
_DCP_ALIGNMENT = 64
_DCP_VALUE_BYTES = 1261
_DCP_KEY_BYTES, _DCP_SHARD_BYTES = 90, 141
_ZERO_RECORD_BYTES = 2000
# The sizes of the small files, measured once in the tests of the strategies (docs/planning.md).
_RNG_BYTES = 14_083
_STATE_BYTES = 42_739
_CONFIG_BYTES, _GENERATION_BYTES = 763, 153
_TRAINER_STATE_BYTES, _SCHEDULER_BYTES, _ARGUMENTS_BYTES = 1_590, 1_145, 4_941
_ADAPTER_CONFIG_BYTES, _README_BYTES = 1_181, 5_128
_ZERO_SCRIPTS_BYTES, _ZERO_ARGUMENTS_BYTES, _FSDP_ARGUMENTS_BYTES = 38_580 + 2_490 + 13, 6_285, 5_325
_PART_BYTES = 64 << 20
_MANIFEST_BYTES, _ENTRY_BYTES, _PART_DIGEST_BYTES = 580, 125, 37


class Group(NamedTuple):
    """Files of one kind.

    Args:
        what: `weights`, `optimizer` or `other`.
        path: the path of the file, or a name for several files; `*` stands for a varying part, such as the number of
            a rank.
        total_bytes: the size of all files of the kind.
        largest_bytes: the bytes that rank 0 writes in files of this kind. No other rank writes more.
        num_files: the number of files. If only rank 0 writes files of this kind, they count as one.
        is_of_each_rank: whether each rank writes one of these files.
    """

    what: str
    path: str
    total_bytes: int
    largest_bytes: int
    num_files: int = 1
    is_of_each_rank: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The facts about a training that determine the files of its checkpoints.

    Args:
        tensors: the tensors of the model, without the adapter.
        dtype: the type of the model's weights, by its name in torch.
        adapter: the tensors of the adapter; empty without one. With an adapter, only the adapter is trained.
        strategy: how ranks share the model.
        optimizer: the optimizer; the sizes of its states depend on it.
        num_ranks: the number of ranks.
        is_mixed: whether TrainingArguments have `bf16=True` or `fp16=True`. A step then computes in 16 bits.
        tokenizer_bytes: the size of the tokenizer's files, which the Trainer saves if it has the tokenizer.
        tied: the additional names of tied weights, each with the sizes of its weight. FSDP2, ZeRO-1 and ZeRO-2 save
            the weight under each of these names, too.
    """

    tensors: Sequence[Tensor]
    dtype: str
    adapter: Sequence[Tensor]
    strategy: Strategy
    optimizer: Optimizer
    num_ranks: int
    is_mixed: bool = False
    tokenizer_bytes: int = 0
    tied: Sequence[Tensor] = ()

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained."""
        return [one for one in self.adapter or self.tensors if not one.is_buffer]

    @property
    def trained_dtype(self) -> str:
        """The type of the trained tensors, before DeepSpeed casts them.

        PEFT holds adapters in 32 bits. With FSDP2 and mixed precision, Accelerate holds all trained tensors in 32
        bits.
        """
        if self.adapter or (self.is_mixed and self.strategy.is_fsdp):
            return "float32"
        return self.dtype

    @property
    def computed_dtype(self) -> str:
        """The type of the trained tensors in a step. With DeepSpeed, this is the type after the cast.

        In a training in 16 bits, DeepSpeed casts the whole model to 16 bits, including an adapter.
        """
        if self.strategy.is_zero and (self.is_mixed or DTYPE_BYTES[self.dtype] == 2):
            return self.dtype if DTYPE_BYTES[self.dtype] == 2 else "bfloat16"
        return self.trained_dtype

    @property
    def bases_saved(self) -> list[Tensor]:
        """Weights of the model that PEFT saves with an adapter: embeddings and output layers that are adapted.

        Source: `get_peft_model_state_dict` with `save_embedding_layers="auto"`, and `EMBEDDING_LAYER_NAMES`.
        """
        adapted = {one.name.partition(".lora_")[0] for one in self.adapter}
        found: list[Tensor] = []
        for one in self.tensors:
            module = f"base_model.model.{one.name.removesuffix('.weight')}"
            if module in adapted and module.rsplit(".", 1)[-1] in {"embed_tokens", "lm_head"}:
                found.append(one._replace(name=f"{module}.base_layer.weight"))
        return found

    @property
    def base_dtype(self) -> str:
        """The type of the weights that are not trained. DeepSpeed casts them, too."""
        return self.computed_dtype if self.strategy.is_zero else self.dtype

    def tensors_saved(self) -> list[Tensor]:
        """The tensors of the adapter. Without an adapter: the model's tensors, with tied weights under each name."""
        return list(self.adapter or [*self.tensors, *self.tied])


def files_of(training: Training) -> list[Group]:
    """The files of one checkpoint, with its manifest."""
    strategy = training.strategy
    groups = _model_files(training)
    if strategy is Strategy.FSDP:
        groups += _sharded(training)
    elif strategy is Strategy.FSDP_FULL:
        saved = _saved(training)
        whole = [math.prod(one.sizes) * item for one, item in saved]
        names = [one.name for one, _ in saved]
        groups += [
            _first("weights", "pytorch_model_fsdp.bin", _state_dict_bytes("pytorch_model_fsdp", whole, names)),
            _first("optimizer", "optimizer.bin", _optimizer_bytes(training, "optimizer", by_name=True)),
        ]
    elif strategy.is_zero:
        groups += _partitions(training)
    else:
        groups.append(_first("optimizer", "optimizer.pt", _optimizer_bytes(training, "optimizer", by_name=False)))
    groups += _small_files(training)
    return [*groups, _manifest(groups)]


def _saved(training: Training) -> list[tuple[Tensor, int]]:
    """The tensors that FSDP saves, each with the bytes of one element."""
    own, base = DTYPE_BYTES[training.trained_dtype], DTYPE_BYTES[training.base_dtype]
    return [*((one, own) for one in training.tensors_saved()), *((one, base) for one in training.bases_saved)]


def checkpoint_bytes(groups: Iterable[Group]) -> int:
    """The size of a checkpoint."""
    return sum(group.total_bytes for group in groups)


def bytes_of_ranks(groups: Iterable[Group], *, ranks: int, has_first: bool) -> int:
    """An upper bound of the bytes that `ranks` ranks of one node write. If `has_first`, one of them is rank 0."""
    found = 0
    for group in groups:
        if group.is_of_each_rank:
            found += min(group.total_bytes, ranks * group.largest_bytes)
        elif has_first:
            found += group.total_bytes
    return found


def _first(what: str, path: str, size_bytes: int) -> Group:
    return Group(what, path, size_bytes, size_bytes)


def _each(what: str, path: str, sizes_bytes: int, count: int) -> Group:
    return Group(what, path, sizes_bytes * count, sizes_bytes, count, is_of_each_rank=True)


# ---- weights as from_pretrained reads them -------------------------------------------------------------------------


def _model_files(training: Training) -> list[Group]:
    """The files that `save_pretrained` writes.

    With an adapter, FSDP2 with shards has none of these files: the shards contain the adapter (`_sharded`). Without
    an adapter, ZeRO-3 and FSDP2 with shards save only configurations.
    """
    if training.adapter:
        size = adapter_file_bytes(training)
        small = [
            _first("other", "adapter_config.json", _ADAPTER_CONFIG_BYTES),
            _first("other", "README.md", _README_BYTES),
        ]
        if training.strategy is Strategy.FSDP:
            return []
        return [_first("weights", "adapter_model.safetensors", size), *small]
    configurations = [
        _first("other", "config.json", _CONFIG_BYTES),
        _first("other", "generation_config.json", _GENERATION_BYTES),
    ]
    if training.strategy in {Strategy.FSDP, Strategy.ZERO3}:
        return configurations
    # With FSDP and DeepSpeed, the Trainer gets a state dict in which tied weights are separate tensors, so the file
    # contains a tied weight once for each of its names.
    is_handed = training.strategy is Strategy.FSDP_FULL or training.strategy.is_zero
    tensors = training.tensors_saved() if is_handed else training.tensors
    return [
        _first("weights", "model*.safetensors", weights_file_bytes(tensors, training.computed_dtype)),
        *configurations,
    ]


def weights_file_bytes(tensors: Sequence[Tensor], dtype: str) -> int:
    """The size of the safetensors files that `save_pretrained` writes, with their index if there are several."""
    return _weights_file_bytes(tuple(tensors), dtype)


@functools.lru_cache(maxsize=8)  # a plan needs the size several times; with many experts, each computation takes 1 s
def _weights_file_bytes(tensors: tuple[Tensor, ...], dtype: str) -> int:
    return _files_bytes([shape for one in tensors for shape in _stored(one, KINDS[dtype])])


def adapter_file_bytes(training: Training) -> int:
    """The size of the file of an adapter, with the weights of the model that PEFT saves in it."""
    shapes = [shape for one in training.adapter for shape in _stored(one, KINDS[training.computed_dtype])]
    shapes += [shape for one in training.bases_saved for shape in _stored(one, KINDS[training.base_dtype])]
    return _files_bytes(shapes)


def _files_bytes(shapes: Sequence[Shape]) -> int:
    files: list[list[Shape]] = [[]]
    in_file = 0
    for shape in shapes:
        size = math.prod(shape.sizes) * SIZES[shape.kind]
        if files[-1] and in_file + size > _MAX_SHARD_BYTES:
            files.append([])
            in_file = 0
        files[-1].append(shape)
        in_file += size
    total = sum(lay_out(shapes, {"format": "pt"}).size_bytes for shapes in files)
    if len(files) > 1:
        index = {shape.name: f"model-{0:05}-of-{len(files):05}.safetensors" for shapes in files for shape in shapes}
        total += len(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)) + 1
    return total


def _stored(tensor: Tensor, kind: str) -> list[Shape]:
    if tensor.num_pieces == 1:
        return [Shape(tensor.name, kind, tensor.sizes)]
    # The experts of a layer are one tensor in memory, but are written one by one.
    pieces = tensor.num_pieces
    each = math.prod(tensor.sizes) // pieces
    width = tensor.sizes[-1]
    return [Shape(f"{tensor.name}.{number:03}.weight", kind, (each // width, width)) for number in range(pieces)]


# ---- files of torch.save -------------------------------------------------------------------------------------------


def archive_bytes(name: str, storages: Sequence[int], pickle_bytes: int) -> int:
    """The size of a file of `torch.save`.

    Args:
        name: the name of the file, without its ending.
        storages: the bytes of each storage.
        pickle_bytes: the size of the pickle, which refers to the storages.
    """
    return lay_out_archive(StorageRecords(name, storages), bytes(pickle_bytes)).size_bytes


def _state_dict_bytes(name: str, storages: Sequence[int], names: Sequence[str]) -> int:
    pickled = _PICKLE_BYTES + sum(_TENSOR_PICKLE_BYTES + len(one) for one in names)
    return archive_bytes(name, storages, pickled)


def _optimizer_bytes(training: Training, name: str, *, by_name: bool) -> int:
    item = DTYPE_BYTES[training.trained_dtype]
    storages: list[int] = []
    pickled = 2 * _PICKLE_BYTES
    for one in training.trained:
        states = training.optimizer.states_of(one.sizes, item, is_embedding=one.is_embedding)
        storages += [state.num_bytes for state in states]
        pickled += _STATE_PICKLE_BYTES * len(states) + 8 + (2 * len(one.name) if by_name else 0)
    return archive_bytes(name, storages, pickled)


# ---- FSDP2 with shards: torch.distributed.checkpoint ---------------------------------------------------------------


def _sharded(training: Training) -> list[Group]:
    item = DTYPE_BYTES[training.trained_dtype]
    num_ranks = training.num_ranks
    weights = [(one.sizes, size, f"model.{one.name}") for one, size in _saved(training)]
    states: list[tuple[tuple[int, ...], int, str]] = []
    for one in training.trained:
        for state in training.optimizer.states_of(one.sizes, item, is_embedding=one.is_embedding):
            states.append((state.sizes, state.item_bytes, f"optimizer.state.{one.name}.{state.name}"))
    # The Trainer has two groups of parameters: one with weight decay, and one without.
    settings = 2 * training.optimizer.num_settings
    names = sum(len(one.name) + 8 for one in training.trained)
    return [
        *_dcp("weights", "pytorch_model_fsdp_0", weights, num_ranks, values=0, more_bytes=0),
        *_dcp("optimizer", "optimizer_0", states, num_ranks, values=settings, more_bytes=names),
    ]


def _dcp(
    what: str,
    folder: str,
    tensors: Sequence[tuple[tuple[int, ...], int, str]],
    num_ranks: int,
    *,
    values: int,
    more_bytes: int,
) -> list[Group]:
    largest = total = keys = 0
    lone: dict[int, int] = {}
    for sizes, item, name in tensors:
        whole = math.prod(sizes) * item
        rows, holders = rows_of_shard(sizes, num_ranks=num_ranks) if sizes else (1, 1)
        part = whole // sizes[0] * rows if sizes and sizes[0] else whole
        if part not in lone:
            lone[part] = _lone_bytes(part)
        rest = whole - part * (holders - 1)
        if rest not in lone:
            lone[rest] = _lone_bytes(rest)
        # A tensor without dimensions is not split: one rank writes the whole tensor. Different ranks write different
        # tensors of this kind, so that each rank writes about the same number.
        largest += lone[part] if sizes else -(-lone[part] // num_ranks)
        total += lone[part] * (holders - 1) + lone[rest]
        keys += _DCP_KEY_BYTES + 2 * len(name) + _DCP_SHARD_BYTES * holders
    values_bytes = values * _DCP_VALUE_BYTES + more_bytes
    keys += values * (2 * _DCP_KEY_BYTES)
    return [
        _first("other", f"{folder}/.metadata", keys + _PICKLE_BYTES),
        Group(what, f"{folder}/__*_0.distcp", total + values_bytes, largest + values_bytes, num_ranks, True),
    ]


def _lone_bytes(size: int) -> int:
    """The bytes of one tensor in a file of DCP. Each tensor is an archive of its own, and is aligned."""
    size_bytes = archive_bytes("archive", [size], _DCP_PICKLE_BYTES)
    return -(-size_bytes // _DCP_ALIGNMENT) * _DCP_ALIGNMENT


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


def _partitions(training: Training) -> list[Group]:
    num_ranks = training.num_ranks
    counts = [math.prod(one.sizes) for one in training.trained]
    names = [one.name for one in training.trained]
    moments = 1 + training.optimizer.moments
    record = _ZERO_RECORD_BYTES + 2 * sum(len(name) + 60 for name in names)
    buffers = [math.prod(one.sizes) * 4 for one in training.tensors if one.is_buffer]
    if training.strategy is Strategy.ZERO3:
        part = 4 * flat_of_zero3(counts, num_ranks=num_ranks)
        model = archive_bytes("zero_pp_rank_0_mp_rank_00_model_states", [*[0] * len(counts), *buffers], record)
        optimizer = archive_bytes("zero_pp_rank_0_mp_rank_00_optim_states", [4, *[part] * moments], 1600)
        return [
            _each("other", "global_step*/zero_pp_rank_*_model_states.pt", model, num_ranks),
            _each("optimizer", "global_step*/zero_pp_rank_*_optim_states.pt", optimizer, num_ranks),
        ]
    flat = flat_of_zero2(counts, num_ranks=num_ranks)
    item = DTYPE_BYTES[training.computed_dtype]
    model = archive_bytes("mp_rank_00_model_states", [flat * item, *buffers], record)
    part = 4 * flat // num_ranks
    slices = 1600 + 55 * len(names) // num_ranks
    optimizer = archive_bytes("zero_pp_rank_0_mp_rank_00_optim_states", [4, *[part] * moments], slices)
    return [
        _first("weights", "global_step*/mp_rank_00_model_states.pt", model),
        _each("optimizer", "global_step*/zero_pp_rank_*_optim_states.pt", optimizer, num_ranks),
    ]


# ---- small files ---------------------------------------------------------------------------------------------------


def _small_files(training: Training) -> list[Group]:
    num_ranks, strategy = training.num_ranks, training.strategy
    groups = [
        _each("other", "rng_state_*.pth", _RNG_BYTES, num_ranks),
        _each("other", "safepoint_state_*.pt", _STATE_BYTES, num_ranks),
        _first("other", "trainer_state.json", _TRAINER_STATE_BYTES),
    ]
    if strategy.is_zero:
        groups.append(_first("other", "latest, zero_to_*.py", _ZERO_SCRIPTS_BYTES))
    else:
        groups.append(_first("other", "scheduler.pt", _SCHEDULER_BYTES))
    if strategy is not Strategy.FSDP:
        arguments = _ARGUMENTS_BYTES
        if strategy.is_zero:
            arguments = _ZERO_ARGUMENTS_BYTES
        elif strategy.is_fsdp:
            arguments = _FSDP_ARGUMENTS_BYTES
        groups.append(_first("other", "training_args.bin", arguments))
    if training.tokenizer_bytes:
        groups.append(_first("other", "tokenizer", training.tokenizer_bytes))
    return groups


def _manifest(groups: Sequence[Group]) -> Group:
    num_files = sum(group.num_files for group in groups)
    num_parts = sum(
        group.num_files * (group.largest_bytes // _PART_BYTES + 1)
        for group in groups
        if group.largest_bytes > _PART_BYTES
    )
    size = _MANIFEST_BYTES + _ENTRY_BYTES * num_files + _PART_DIGEST_BYTES * num_parts
    return _first("other", "safepoint-manifest.json", size)
