"""Reads facts about a run: from options, from TrainingArguments as JSON, and from the files of a checkpoint."""

import os
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Optimizer, Strategy, optimizer_named
from safepoint.foundation.units import nearest
from safepoint.planning.architectures.fields import shown
from safepoint.planning.architectures.headers import read_config
from safepoint.planning.model import shown_path

_PARAMETERS = re.compile(r"(\d{1,18}(?:\.\d{1,12})?(?:[eE][+]?\d{1,2})?)\s*([kKmMbBtT]?)", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LAYOUT = re.compile(r"(\d{1,9})x(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The known facts about a run; None for unknown facts.

    Args:
        source: where the facts come from, for people.
        strategy: how the ranks share the model.
        optimizer: the optimizer.
        keep: the number of checkpoints that are kept (`save_total_limit`).
        is_mixed: whether TrainingArguments have `bf16=True` or `fp16=True`; None if that is not known.
        lora_rank: the rank of the adapter.
        lora_targets: the modules that the adapter changes.
        nodes: the number of nodes.
        gpus: the number of ranks on each node.
        grace_s: the grace period, in seconds.
        slots: the number of snapshots that the host memory holds.
        step_s: the time of a training step, in seconds.
        measured_bytes: the size of a checkpoint that was written.
        notes: sentences for people. Each is about a value that cannot be read, that has no effect on the plan, or in
            whose place the plan uses another value.
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
    notes: tuple[str, ...] = ()


def parse_parameters(text: str) -> int:
    """The number in `70B`, `350M`, `7e9` or `8030261248`.

    Raises:
        UsageError: `text` is not such a number.
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
    """The number of nodes and the number of GPUs of each node, parsed from a text such as `6x1`.

    Raises:
        UsageError: `text` is not such a layout.
    """
    match = _LAYOUT.fullmatch(text.strip().lower())
    if match is None or not 1 <= int(match[1]) <= 1_000_000 or not 1 <= int(match[2]) <= 1024:
        raise UsageError(
            f"--compare {text[:60]!r} is not a layout; nothing was computed",
            hint="write the number of nodes and the number of GPUs of each node, such as --compare 6x1 2x3",
        )
    return int(match[1]), int(match[2])


def find_optimizer(name: str, option: str = "--optimizer") -> Optimizer:
    """The optimizer that a user has named.

    Raises:
        UsageError: the states of this optimizer are not known.
    """
    found = optimizer_named(name)
    if found is None:
        known = nearest(name[:60], OPTIMIZERS)
        choose = "choose an optimizer that keeps the same number of values for each weight"
        raise UsageError(
            f"{option} {name[:60]!r}: Safepoint does not know what this optimizer keeps; nothing was computed",
            hint=f"{known} Otherwise {choose}" if known.endswith("?") else f"{known}; {choose}",
        )
    return found


# ---- TrainingArguments ---------------------------------------------------------------------------------------------


def read_arguments(path: Path, *, known: Container[str] = ()) -> Given:
    """The facts in a file that `training_args.to_json_string()` has written.

    Args:
        path: the path of the file.
        known: names of the fields of `Given` that options on the command line set. These fields are not taken from
            the file. So if no plan can be computed for a value in the file, an option can replace the value.

    Raises:
        UsageError: the file cannot be read, does not contain TrainingArguments, or has a value for which no plan can
            be computed.
    """
    record = _read(path, "--for", "pass the name of a job, or a file with TrainingArguments as JSON")
    if "output_dir" not in record and "per_device_train_batch_size" not in record:
        raise UsageError(
            f"--for {shown_path(path)}: the file has no field output_dir; it is not TrainingArguments; nothing was "
            "computed",
            hint="write it with Path('arguments.json').write_text(training_args.to_json_string())",
        )
    if _flag(record, "save_only_model", path):
        raise UsageError(
            f"--for {shown_path(path)}: save_only_model is true, and a checkpoint without optimizer state cannot be "
            "resumed; nothing was computed",
            hint="leave save_only_model out; `safepoint run` refuses it, too",
        )
    is_mixed = None
    if "is_mixed" not in known:
        is_16_bits = [_flag(record, name, path) for name in ("bf16", "fp16")]
        is_mixed = any(is_16_bits)
    return Given(
        source=f"the TrainingArguments in {path}",
        strategy=None if "strategy" in known else strategy_in(record, path),
        optimizer=None if "optimizer" in known else _optimizer_in(record, path),
        keep=None if "keep" in known else _kept(record, path),
        is_mixed=is_mixed,
        notes=tuple(_notes_on(record, path, known)),
    )


def _notes_on(record: Mapping[str, Any], path: Path, known: Container[str]) -> Iterator[str]:
    """Notes on fields of which a reader may expect that they change the plan, although they do not change it."""
    limit = record.get("save_total_limit")
    if "keep" not in known and type(limit) is int and limit < 1:
        yield f"save_total_limit = {limit} in {shown_path(path)}: below 1, the Trainer deletes no checkpoint"
    if record.get("save_strategy") == "no":
        yield (
            f"save_strategy is 'no' in {shown_path(path)}: the plan is for a run that saves, as `safepoint run` does"
        )
    fsdp = record.get("fsdp")
    words = fsdp.split() if isinstance(fsdp, str) else cast("list[Any]", fsdp) if isinstance(fsdp, list) else []
    planned = {"full_shard", "auto_wrap", "offload", "true", "1"}
    others = [str(word) for word in words if str(word).lower() not in planned]
    if "strategy" not in known and others and record.get("deepspeed") is None:
        yield f"fsdp = {shown(cast('object', fsdp))} in {shown_path(path)}: it is planned as full_shard"
    if "strategy" not in known and "optimizer" not in known:
        yield from _notes_on_deepspeed(record, path)


def _notes_on_deepspeed(record: Mapping[str, Any], path: Path) -> Iterator[str]:
    config = _object_in(record, "deepspeed", path)
    is_named = isinstance(record.get("deepspeed"), str)
    optimizer = config.get("optimizer") if config is not None else None
    kind = cast("dict[str, Any]", optimizer).get("type") if isinstance(optimizer, dict) else None
    if kind is not None and not (isinstance(kind, str) and kind.lower() in {"adam", "adamw", "auto"}):
        has = "an optimizer" if is_named else f"the optimizer {shown(kind)},"
        yield (
            f"the DeepSpeed configuration in {shown_path(path)} has {has} which is not planned: pass --optimizer "
            "with one that keeps the same number of values for each weight"
        )


def _read(path: Path, what: str, hint: str) -> dict[str, Any]:
    try:
        return read_config(path)
    except OSError as error:
        raise UsageError(
            f"{what} {shown_path(path)} cannot be read: {error.strerror or error}; nothing was computed", hint=hint
        ) from error
    except ValueError as error:
        raise UsageError(f"{what} {shown_path(path)}: {error}; nothing was computed", hint=hint) from error


def _wrong(path: Path, name: str, value: object, fix: str) -> UsageError:
    return UsageError(f"--for {shown_path(path)}: {name} = {shown(value)}; nothing was computed", hint=fix)


def _flag(record: Mapping[str, Any], name: str, path: Path) -> bool:
    """A field that is true or false. A string such as "true" is refused: a plan that ignored it would be wrong."""
    value = record.get(name)
    if value is not None and type(value) is not bool:
        raise _wrong(path, name, value, f"{name} must be true or false, without quotes")
    return value is True


def _optimizer_in(record: Mapping[str, Any], path: Path) -> Optimizer | None:
    name = record.get("optim")
    if name is None:
        return None
    if not isinstance(name, str):
        raise _wrong(path, "optim", name, "optim must be the name of an optimizer, or pass --optimizer")
    return find_optimizer(name, f"--for {shown_path(path)}: optim")


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int and value > 0 else None


def _kept(record: Mapping[str, Any], path: Path) -> int | None:
    """The number of checkpoints that the Trainer keeps; None if there is no limit.

    With `load_best_model_at_end`, the Trainer keeps at least two checkpoints: the newest and the best.
    """
    stated = record.get("save_total_limit")
    if stated is not None and type(stated) is not int:
        raise _wrong(
            path, "save_total_limit", stated, "save_total_limit must be a whole number, or pass --save-total-limit"
        )
    # The Trainer deletes nothing if the limit is 0 or negative.
    limit = _count(record, "save_total_limit")
    is_best_kept = _flag(record, "load_best_model_at_end", path)
    return max(2, limit) if limit is not None and is_best_kept else limit


def strategy_in(record: Mapping[str, Any], path: Path, *, is_own: bool = False) -> Strategy | None:
    """The strategy that the fields `deepspeed` and `fsdp` name; None if both are missing or empty.

    Args:
        record: TrainingArguments.
        path: the path of the file with the arguments. Messages name it. If `deepspeed` or `fsdp_config` is a path,
            the configuration is looked for in the folder of this file.
        is_own: whether this user has written the arguments. If so, the arguments may name a file in any folder.

    Raises:
        UsageError: the fields are invalid, or a file that they name cannot be read.
    """
    deepspeed = _object_in(record, "deepspeed", path, is_own=is_own)
    if deepspeed is not None:
        zero = deepspeed.get("zero_optimization")
        stage = cast("dict[str, Any]", zero).get("stage") if isinstance(zero, dict) else None
        # Check the type, too: for Python, 3.0 equals 3, and true equals 1.
        if type(stage) is not int or stage not in (1, 2, 3):
            has = "" if isinstance(record.get("deepspeed"), str) else f" = {shown(stage)}"
            raise UsageError(
                f"--for {shown_path(path)}: no plan can be computed for DeepSpeed without ZeRO-1, 2 or 3 "
                f"(zero_optimization.stage{has}); nothing was computed",
                hint="pass --strategy",
            )
        return Strategy(f"zero{stage}")
    fsdp = record.get("fsdp")
    if fsdp is not None and not isinstance(fsdp, bool | str | list | dict):
        raise _wrong(path, "fsdp", fsdp, "fsdp must be true, false or a list of options, or pass --strategy")
    if not fsdp:
        return None
    kind = (_object_in(record, "fsdp_config", path, is_own=is_own) or {}).get("state_dict_type", "SHARDED_STATE_DICT")
    if kind not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        fix = "it must be FULL_STATE_DICT or SHARDED_STATE_DICT, or pass --strategy"
        if isinstance(record.get("fsdp_config"), str):
            raise UsageError(
                f"--for {shown_path(path)}: the file that fsdp_config names has a state_dict_type for which no plan "
                "can be computed; nothing was computed",
                hint=fix,
            )
        raise _wrong(path, "fsdp_config.state_dict_type", kind, fix)
    return Strategy.FSDP_FULL if kind == "FULL_STATE_DICT" else Strategy.FSDP


def _object_in(record: Mapping[str, Any], name: str, path: Path, *, is_own: bool = False) -> dict[str, Any] | None:
    """The JSON object in a field, or in the file whose path the field contains; None if the field is missing or
    empty.

    Without `is_own`, another person may have written the arguments. So a file is read only if it is in the folder of
    the arguments, or below that folder. Messages do not show the values in the file.

    Raises:
        UsageError: the field is neither an object nor a path; the file does not exist or cannot be read; or the file
            is in another folder.
    """
    value = record.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if not isinstance(value, str):
        raise _wrong(path, name, value, f"set {name} to a path or an object, or pass --strategy")
    hint = f"pass --strategy {'zero1, zero2 or zero3' if name == 'deepspeed' else 'fsdp or fsdp-full'}"
    what = "the DeepSpeed configuration" if name == "deepspeed" else f"the file of {name}"
    # The path is relative to the folder of the script. This folder is unknown, so look beside the arguments.
    folder = Path(os.path.realpath(path.parent))
    try:
        file = Path(os.path.realpath(folder / value))
    except ValueError as error:  # a null byte, or half of a surrogate pair
        raise _wrong(path, name, value, f"set {name} to a path or an object, or pass --strategy") from error
    if is_own and os.path.exists(value):
        file = Path(value)
    elif not file.is_relative_to(folder):
        raise UsageError(
            f"--for {shown_path(path)}: the arguments name {what} {shown(value)}; this file is outside the folder of "
            "the arguments file and was not read; nothing was computed",
            hint=f"copy {what} into that folder and name the copy, or {hint}",
        )
    if not os.path.exists(file):
        raise UsageError(
            f"--for {shown_path(path)}: the arguments name {what} {shown(value)}; this file does not exist in the "
            "folder of the arguments file; nothing was computed",
            hint=hint,
        )
    return _read(file, f"--for {shown_path(path)}: {name}", hint)


# ---- a checkpoint --------------------------------------------------------------------------------------------------

_ZERO3 = re.compile(r"global_step\d+/zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


def given_by_files(sizes: Mapping[str, int], *, source: str) -> Given:
    """The facts that the files of a checkpoint show: the strategy, and the size of all files together.

    Args:
        sizes: path → size in bytes, for all files.
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
    """The rank, the modules and the base model of an `adapter_config.json`. The modules and the base model are None
    if the file does not state them.

    Raises:
        UsageError: the adapter is not LoRA, or its rank is invalid. No plan is computed in these cases: without the
            adapter, the plan would state the sizes of a training of all weights.
    """
    kind = record.get("peft_type", "LORA")
    if kind != "LORA":
        raise UsageError(
            f"adapter_config.json has peft_type = {shown(kind)}, for which no plan can be computed",
            hint="plan a LoRA adapter of about the same size with --lora-rank",
        )
    if _count(record, "r") is None:
        raise UsageError(
            f"adapter_config.json has r = {shown(record.get('r'))}, which is not a valid rank of an adapter",
            hint="pass --lora-rank",
        )
    targets = record.get("target_modules")
    if isinstance(targets, str):
        names: tuple[str, ...] | None = (targets,)
    elif isinstance(targets, list):
        names = tuple(str(one) for one in cast("list[Any]", targets))
    else:
        names = None
    base = record.get("base_model_name_or_path")
    return _count(record, "r"), names, base if isinstance(base, str) else None


def notes_on_adapter(record: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """A sentence for each field of an `adapter_config.json` that changes the adapter, but has no effect on the
    plan."""
    return tuple(
        f"{name} = {shown(record[name])} in the adapter_config.json of {source} is not used: the adapter's memory "
        "and its final model are computed without it"
        for name in ("modules_to_save", "rank_pattern", "layers_to_transform", "use_dora")
        if record.get(name)
    )
