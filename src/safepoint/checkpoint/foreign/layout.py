"""Which files of a checkpoint the Trainer needs, for each strategy under which a checkpoint can be written.

Transformers 4.57 to 5.23, Accelerate 1.12 to 1.15 and DeepSpeed 0.18 to 0.19 write files with these names.
"""

import itertools
import re
from collections.abc import Collection
from enum import StrEnum

INCOMPLETE = "checkpoint-is-incomplete.txt"
"""While they save, Transformers and Red Hat's SDK keep a file whose name is this text, or begins with this text."""
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
MODEL_SHARDS = "pytorch_model_fsdp_0"
OPTIMIZER_SHARDS = "optimizer_0"
_MODEL_IN_ONE = "pytorch_model_fsdp.bin"
_OPTIMIZER_IN_ONE = "optimizer.bin"
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
_WEIGHTS = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", BIN_INDEX)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_SHOWN = 100
_OWN = re.compile(r"safepoint[-_].*")
_RNG = re.compile(r"rng_state(?:_([0-9]{1,6}))?\.pth")
_STEP_FOLDER = re.compile(r"global_step[0-9]+/.*")
_PICKLES = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_[0-9]+)?\.pth|pytorch_model(_fsdp)?\.bin"
    r"|pytorch_model-[0-9]+-of-[0-9]+\.bin|([^/]+/)?adapter_model\.bin|global_step[0-9]+/[^/]+_states\.pt"
)
_TENSORS = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors|([^/]+/)?adapter_model\.safetensors")
_CONFIGS = re.compile(r"config\.json|([^/]+/)?adapter_config\.json|generation_config\.json")


class Strategy(StrEnum):
    """How the ranks shared model and optimizer. These values differ from the values of `strategy` in a manifest."""

    WHOLE = "whole"
    """Single process or DDP: rank 0 wrote everything but the random number states."""
    SHARDS = "shards"
    """FSDP with SHARDED_STATE_DICT."""
    IN_ONE = "in one"
    """FSDP with FULL_STATE_DICT."""
    ZERO = "zero"
    """DeepSpeed."""


def is_own(paths: Collection[str]) -> bool:
    """Whether Safepoint has written one of these files. If it has, a missing manifest is damage."""
    return any(_OWN.fullmatch(path.partition("/")[0]) for path in paths)


def markers(paths: Collection[str]) -> list[str]:
    """The files that exist only while a save has not ended."""
    return sorted(path for path in paths if path.startswith(INCOMPLETE))


def strategy_of(paths: Collection[str]) -> Strategy:
    """The strategy under which these files were written."""
    if "latest" in paths or any(_STEP_FOLDER.fullmatch(path) for path in paths):
        return Strategy.ZERO
    tops = {path.partition("/")[0] for path in paths}
    if MODEL_SHARDS in tops or OPTIMIZER_SHARDS in tops:
        return Strategy.SHARDS
    return Strategy.IN_ONE if {_MODEL_IN_ONE, _OPTIMIZER_IN_ONE} & tops else Strategy.WHOLE


def missing(paths: Collection[str], strategy: Strategy) -> list[str]:
    """The files that the Trainer needs and that are missing in `paths`."""
    needed = {STATE}
    if strategy is Strategy.SHARDS:
        needed |= {f"{folder}/.metadata" for folder in (MODEL_SHARDS, OPTIMIZER_SHARDS)}
    elif strategy is Strategy.IN_ONE:
        needed |= {_MODEL_IN_ONE, _OPTIMIZER_IN_ONE}
    elif strategy is Strategy.ZERO:
        needed |= {"latest"}
    else:
        needed |= {_OPTIMIZER}
        if not {path.rpartition("/")[2] for path in paths if path.count("/") < 2} & {*_WEIGHTS, *_ADAPTERS}:
            needed |= {_WEIGHTS[0]}
    if strategy is not Strategy.ZERO:  # DeepSpeed keeps the scheduler in its own files
        needed |= {_SCHEDULER}
    if any(path in _ADAPTERS for path in paths):
        needed |= {"adapter_config.json"}
    found = sorted(needed - set(paths))
    return found + missing_rng(paths)


def missing_rng(paths: Collection[str], at_least: int = 1) -> list[str]:
    """The missing files of random number states.

    Each rank needs a file: each rank up to the highest rank that has a file, and each rank below `at_least`.
    """
    ranks, num_ranks = _rng_ranks(paths)
    num_ranks = max(num_ranks, at_least)
    if num_ranks == 1:
        return [] if ranks else ["rng_state.pth"]
    lacking = (f"rng_state_{rank}.pth" for rank in range(num_ranks) if rank not in ranks)
    return list(itertools.islice(lacking, _MAX_SHOWN))  # limited, because the name of a file may state any rank


def num_ranks(paths: Collection[str]) -> int:
    """The number of ranks that the files of random number states show; 1 if there is no such file."""
    return _rng_ranks(paths)[1]


def _rng_ranks(paths: Collection[str]) -> tuple[set[int], int]:
    ranks = {int(match[1] or 0) for path in paths if (match := _RNG.fullmatch(path))}
    return ranks, max(ranks, default=0) + 1


def is_pickle(path: str) -> bool:
    """Whether the Trainer loads this file with `torch.load`."""
    return _PICKLES.fullmatch(path) is not None


def is_tensors(path: str) -> bool:
    """Whether this is a safetensors file that the Trainer loads."""
    return _TENSORS.fullmatch(path) is not None


def is_config(path: str) -> bool:
    """Whether this is a configuration file that transformers or PEFT reads."""
    return _CONFIGS.fullmatch(path) is not None
