"""Reads the arguments of a job's program for facts about its training, before the job runs.

Promises: only names that Transformers and TRL give to these arguments count (`HfArgumentParser` derives them from the
fields of TrainingArguments, ModelArguments and ModelConfig). The program itself is not read. It may set values in its
code, so nothing follows from a missing argument.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.estimates.sizes import Optimizer, Strategy, optimizer_named
from safepoint.foundation.quantities import parse_flag, parse_whole
from safepoint.planning.inputs.records import strategy_in

_MODEL = "model_name_or_path"
_MOST = 999_999
"""The largest number in an argument that a plan uses."""
_LORA_RANK = 16
"""TRL's default of `--lora_r`."""
_OTHER_MODEL = re.compile(r"(?!model_name_or_path$)(?=.*model)\w*_(?:path|name_or_path)")
_FILES = ("config", "config_file")
"""Arguments that name a file with further arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArguments:
    """The facts that the arguments state; None for a fact that they do not state.

    Args:
        model: the value of `--model_name_or_path`.
        strategy: the strategy that `--fsdp` or `--deepspeed` names.
        optimizer: the optimizer that `--optim` names.
        keep: the value of `--save_total_limit`.
        is_mixed: whether `--bf16` or `--fp16` is given.
        dtype: the value of `--dtype` or `--torch_dtype`, unchanged.
        lora_rank: the rank of the adapter, if `--use_peft` says that only an adapter is trained.
        lora_targets: the values of `--lora_target_modules`; empty for PEFT's default.
        doubt: why a checkpoint may be larger than a checkpoint of the named model with AdamW; empty if there is no
            reason.
        notes: sentences for people about arguments that are given and not used.
    """

    model: str | None = None
    strategy: Strategy | None = None
    optimizer: Optimizer | None = None
    keep: int | None = None
    is_mixed: bool = False
    dtype: str | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    doubt: str = ""
    notes: tuple[str, ...] = ()


def read_job_arguments(arguments: Sequence[str], *, code: Path | None = None) -> JobArguments:
    """Read the arguments of a program.

    Args:
        arguments: the arguments of the program, without its name.
        code: the folder that is sent to the pods; None without such a folder. DeepSpeed's configuration is looked for
            in this folder.
    """
    options = _options_in(arguments)
    optim = _text(options, "optim")
    optimizer = None if optim is None else optimizer_named(optim)
    # PEFT saves the modules of `--lora_modules_to_save` as they are, and they may be the largest of the model.
    is_lora = _is_on(options, "use_peft") and "lora_modules_to_save" not in options
    return JobArguments(
        model=_text(options, _MODEL),
        strategy=_strategy(options, code),
        optimizer=optimizer,
        keep=_number(options, "save_total_limit"),
        is_mixed=_is_on(options, "bf16") or _is_on(options, "fp16"),
        dtype=_text(options, "dtype") or _text(options, "torch_dtype"),
        lora_rank=(_number(options, "lora_r") or _LORA_RANK) if is_lora else None,
        lora_targets=options.get("lora_target_modules", ()),
        doubt=_doubt(options, "" if optim is None or optimizer is not None else optim),
        notes=tuple(_unused(options, code)),
    )


def _options_in(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of each option, as argparse reads them.

    If an option is repeated, its last values count. Dashes in a name count as underscores.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], word)
    return found


def _text(options: dict[str, tuple[str, ...]], name: str) -> str | None:
    values = options.get(name, ())
    return values[0] if len(values) == 1 and values[0].strip() else None


def _number(options: dict[str, tuple[str, ...]], name: str) -> int | None:
    number = parse_whole(_text(options, name) or "")
    return number if number is not None and 0 < number <= _MOST else None


def _is_on(options: dict[str, tuple[str, ...]], name: str) -> bool:
    if name not in options:
        return False
    values = options[name]
    try:
        # A flag without a value is on. If the next word is not a boolean, it is a positional argument.
        return not values or parse_flag(name, values[0])
    except ValueError:
        return True


def _unused(options: dict[str, tuple[str, ...]], code: Path | None) -> Iterator[str]:
    """A sentence for each argument that has a value, and is not used."""

    def typed(name: str) -> str:
        return " ".join((f"--{name}", *options[name]))[:100]

    if "save_total_limit" in options and _number(options, "save_total_limit") is None:
        limit = _text(options, "save_total_limit") or ""
        digits = limit.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            yield f"{typed('save_total_limit')} is not a whole number, and not used"
        elif limit != digits or not digits.strip("0"):
            yield f"{typed('save_total_limit')} is no limit: with a limit below 1, the Trainer deletes no checkpoint"
        else:
            yield f"{typed('save_total_limit')} is not used: a plan has at most {_MOST:,} checkpoints"
    if "lora_r" in options and _number(options, "lora_r") is None:
        yield f"{typed('lora_r')} is not a valid rank of an adapter, and not used: the rank is {_LORA_RANK}"
    if "optim" in options and optimizer_named(_text(options, "optim") or "") is None:
        yield f"{typed('optim')}: the states of this optimizer are not known. The plan is for adamw; pass --optimizer"
    if _is_on(options, "use_peft") and "lora_modules_to_save" in options:
        yield (
            f"{typed('lora_modules_to_save')}: PEFT also saves these modules as they are. All weights are planned, "
            "which is more than a checkpoint of the adapter and these modules has"
        )
    if "deepspeed" in options and _strategy(options, code) is None:
        yield (
            f"{typed('deepspeed')}: this machine cannot read this file, or the file has no ZeRO-1 to 3; "
            "pass --strategy"
        )


def _strategy(options: dict[str, tuple[str, ...]], code: Path | None) -> Strategy | None:
    fsdp = " ".join(options.get("fsdp", ())).strip()
    record = {"fsdp": fsdp if fsdp.lower() != "false" else "", "deepspeed": _text(options, "deepspeed")}
    try:
        return strategy_in(record, (code or Path()) / "arguments.json")
    except UsageError:  # DeepSpeed's configuration is not here, or has no ZeRO
        return None


def _doubt(options: dict[str, tuple[str, ...]], unknown_optimizer: str) -> str:
    files = [name for name in _FILES if name in options]
    if files:
        return f"--{files[0]} names a file with further arguments"
    if unknown_optimizer:
        return f"the states of the optimizer {unknown_optimizer[:60]!r} are not known"
    models = sorted(name for name in options if _OTHER_MODEL.fullmatch(name))
    return f"--{models[0][:60]} names another model" if models else ""
