"""What other records say about a run: TrainingArguments as JSON, and the files of one of its checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Optimizer, Strategy, optimizer_named
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.units import nearest
from safepoint.planning.model import real_path

_MAX_BYTES = 4 << 20
_PARAMETERS = re.compile(r"(\d{1,18}(?:\.\d{1,12})?(?:[eE][+]?\d{1,2})?)\s*([kKmMbBtT]?)", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LAYOUT = re.compile(r"(\d{1,9})x(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is known of a run; None for what is not.

    Args:
        source: where it comes from, for people.
        strategy: how the ranks share the model.
        optimizer: what it keeps.
        keep: save_total_limit.
        is_mixed: whether it computes in 16 bits and trains in 32.
        lora_rank: of the adapter.
        lora_targets: the modules that it changes.
        nodes: pods.
        gpus: ranks of each pod.
        grace_s: the grace period.
        slots: how many snapshots host memory holds.
        step_s: a training step.
        measured_bytes: the size of a checkpoint that was written.
    """

    source: str = ""
    strategy: Strategy | None = None
    optimizer: Optimizer | None = None
    keep: int | None = None
    is_mixed: bool | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    nodes: int | None = None
    gpus: int | None = None
    grace_s: float | None = None
    slots: int | None = None
    step_s: float | None = None
    measured_bytes: int | None = None


def parse_parameters(text: str) -> int:
    """The number in `70B`, `350M`, `7e9` or `8030261248`.

    Raises:
        UsageError: it is no such number.
    """
    match = _PARAMETERS.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise UsageError(
            f"--params {text[:60]!r} is not a number of parameters; nothing was computed",
            hint="write a number such as 8B, 350M or 7e9",
        )
    value = float(match[1]) * _UNITS[match[2].lower()]
    return round(value)


def parse_layout(text: str) -> tuple[int, int]:
    """The nodes and the GPUs of each in `6x1`.

    Raises:
        UsageError: it is no such layout.
    """
    match = _LAYOUT.fullmatch(text.strip().lower())
    if match is None or not 1 <= int(match[1]) <= 1_000_000 or not 1 <= int(match[2]) <= 1024:
        raise UsageError(
            f"--compare {text[:60]!r} is not a layout; nothing was computed",
            hint="write nodes x GPUs of each node, such as --compare 6x1 2x3",
        )
    return int(match[1]), int(match[2])


def find_optimizer(name: str, option: str = "--optimizer") -> Optimizer:
    """The optimizer that a user has named.

    Raises:
        UsageError: its states are not known.
    """
    found = optimizer_named(name)
    if found is None:
        raise UsageError(
            f"{option} {name[:60]!r}: Safepoint does not know what this optimizer keeps; nothing was computed",
            hint=f"{nearest(name[:60], OPTIMIZERS)}; choose the one that keeps as many values for each weight",
        )
    return found


# ---- TrainingArguments ---------------------------------------------------------------------------------------------


def read_arguments(path: Path) -> Given:
    """What `training_args.to_json_string()` has written.

    Raises:
        UsageError: the file cannot be read, or is something else.
    """
    record = _read(path, "--for")
    if "output_dir" not in record and "per_device_train_batch_size" not in record:
        raise UsageError(
            f"--for {path}: the file has no field output_dir; it is not TrainingArguments; nothing was computed",
            hint="write it with Path('arguments.json').write_text(training_args.to_json_string())",
        )
    if record.get("save_only_model") is True:
        raise UsageError(
            f"--for {path}: save_only_model is true, and a checkpoint without optimizer state cannot be resumed; "
            "nothing was computed",
            hint="leave save_only_model out, as `safepoint run` requires it",
        )
    optim = record.get("optim")
    return Given(
        source=f"the TrainingArguments in {path}",
        strategy=_strategy_in(record, path),
        optimizer=find_optimizer(optim, f"--for {path}: optim") if isinstance(optim, str) else None,
        keep=_kept(record),
        is_mixed=record.get("bf16") is True or record.get("fp16") is True,
    )


def _read(path: Path, option: str) -> dict[str, Any]:
    try:
        return read_object(real_path(path), max_bytes=_MAX_BYTES, constant=float)
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be read: {error.strerror or error}; nothing was computed",
            hint="pass the name of a job, or a file with TrainingArguments as JSON",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{option} {path}: {error}; nothing was computed",
            hint="pass the name of a job, or a file with TrainingArguments as JSON",
        ) from error


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int and value > 0 else None


def _kept(record: Mapping[str, Any]) -> int | None:
    """How many checkpoints stay. The best one stays beside the newest, also with a limit of 1."""
    limit = _count(record, "save_total_limit")
    return max(2, limit) if limit is not None and record.get("load_best_model_at_end") is True else limit


def _strategy_in(record: Mapping[str, Any], path: Path) -> Strategy | None:
    deepspeed = record.get("deepspeed")
    if isinstance(deepspeed, str) and deepspeed:
        # The path is relative to the script; beside the arguments is the next best place.
        file = next((one for one in (Path(deepspeed), path.parent / deepspeed) if one.exists()), None)
        if file is None:
            raise UsageError(
                f"--for {path}: it names the DeepSpeed configuration {deepspeed[:200]!r}, which does not exist here; "
                "nothing was computed",
                hint="pass --strategy zero1, zero2 or zero3",
            )
        deepspeed = _read(file, f"--for {path}: deepspeed")
    if isinstance(deepspeed, dict):
        zero = cast("dict[str, Any]", deepspeed).get("zero_optimization")
        stage = cast("dict[str, Any]", zero).get("stage") if isinstance(zero, dict) else None
        if stage not in {1, 2, 3}:
            raise UsageError(
                f"--for {path}: DeepSpeed without ZeRO-1, 2 or 3 is not planned; nothing was computed",
                hint="pass --strategy",
            )
        return Strategy(f"zero{stage}")
    if record.get("fsdp"):
        config = record.get("fsdp_config")
        kind = cast("dict[str, Any]", config).get("state_dict_type") if isinstance(config, dict) else None
        return Strategy.FSDP_FULL if kind == "FULL_STATE_DICT" else Strategy.FSDP
    return None


# ---- a checkpoint --------------------------------------------------------------------------------------------------

_ZERO3 = re.compile(r"global_step\d+/zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_RNG = re.compile(r"rng_state_\d+\.pth")


def given_by_files(sizes: Mapping[str, int], *, source: str) -> Given:
    """What the files of a checkpoint show: the strategy, the ranks, and their size.

    Args:
        sizes: bytes by path, of all files.
        source: the checkpoint, for people.
    """
    paths = list(sizes)
    if any(_ZERO3.fullmatch(path) for path in paths):
        strategy = Strategy.ZERO3
    elif any(path.startswith("global_step") for path in paths):
        strategy = Strategy.ZERO2
    elif any(path.startswith("pytorch_model_fsdp_0/") for path in paths):
        strategy = Strategy.FSDP
    elif "pytorch_model_fsdp.bin" in sizes:
        strategy = Strategy.FSDP_FULL
    else:
        strategy = None
    return Given(source=source, strategy=strategy, measured_bytes=sum(sizes.values()))


def given_by_adapter(record: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...] | None, str | None]:
    """Rank, modules and base model of an `adapter_config.json`."""
    targets = record.get("target_modules")
    if isinstance(targets, str):
        names: tuple[str, ...] | None = (targets,)
    elif isinstance(targets, list):
        names = tuple(str(one) for one in cast("list[Any]", targets))
    else:
        names = None
    base = record.get("base_model_name_or_path")
    return _count(record, "r"), names, base if isinstance(base, str) else None
