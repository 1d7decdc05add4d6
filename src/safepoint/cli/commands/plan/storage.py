"""`safepoint plan storage`: disks, memory, time and grace period for a model, before it is trained."""

import dataclasses
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from safepoint.cli.commands.plan.options import Json, Svg, write_picture
from safepoint.cli.commands.plan.storage_answer import (
    document_of,
    layout_document,
    layout_lines,
    lines_of,
    notes_of,
    picture_of,
)
from safepoint.cli.output import print_answer, print_warning
from safepoint.errors import SafepointError, UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.quantities import parse_bytes, parse_duration
from safepoint.foundation.units import nearest
from safepoint.planning.checkpoint_files import Training
from safepoint.planning.documents import DOWNLOAD_BYTES_PER_S, UPLOAD_BYTES_PER_S
from safepoint.planning.inputs import (
    Given,
    find_optimizer,
    given_by_adapter,
    given_by_files,
    parse_layout,
    parse_parameters,
    read_arguments,
)
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import ModelShape, adapter_of, dtype_of, of_config, of_count, read_model
from safepoint.planning.storage import DISK_BYTES_PER_S, NETWORK_BYTES_PER_S, Run, Speeds, plan_storage

_MAX_CONFIG_BYTES = 4 << 20
_T = TypeVar("_T")
_STRATEGIES = ", ".join(Strategy)
_SPEED = "BYTES/S"


def storage(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model's config.json, or its folder. Without it: --params, or --for with a job.",
            show_default=False,
        ),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Instead of MODEL: the number of parameters, such as 70B."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --params: the layers.", show_default="as in published models"),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --params: the width of a layer.", show_default="as the layers need it"),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --params: the size of the vocabulary.", show_default="128256"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the weights: bf16, fp16 or fp32.",
            show_default="the model's, or fp32 if it states none; bf16 with --params",
        ),
    ] = None,
    mixed: Annotated[
        bool | None,
        typer.Option(
            "--mixed-precision/--no-mixed-precision",
            help="Whether the Trainer has bf16=True or fp16=True. FSDP and ZeRO then train in 32 bits.",
            show_default="no",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(OPTIMIZERS)}, or a value of TrainingArguments.optim.",
            show_default="adamw",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{_STRATEGIES}.", show_default="ddp, or single for one process"),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train a LoRA adapter of this rank.", show_default="no adapter")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With --lora-rank: the adapted modules, such as q_proj,v_proj, or all-linear.",
            show_default="PEFT's default of the model",
        ),
    ] = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="With --lora-rank: the base model is in 4 bits (QLoRA).")
    ] = False,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Pods.", show_default="1")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs of each pod.", show_default="1")] = None,
    save_total_limit: Annotated[
        int | None, typer.Option(metavar="N", help="How many checkpoints stay on the disk.", show_default="2")
    ] = None,
    store_keep: Annotated[
        int | None, typer.Option(metavar="N", help="How many stay in the object store.", show_default="all")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Between SIGTERM and SIGKILL, such as 45s or 2m.", show_default="30s"),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="A training step, which a save waits for.", show_default="0s"),
    ] = None,
    snapshot_slots: Annotated[
        int | None,
        typer.Option(metavar="N", help="As for `safepoint run`.", show_default="by the size of a snapshot"),
    ] = None,
    upload_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="From a pod to the object store. The default is the documents' figure.",
            show_default="68M",
        ),
    ] = None,
    download_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="From the object store to a pod. The default is the documents' figure.",
            show_default="479M",
        ),
    ] = None,
    disk_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="Of the disk for checkpoints. A run assumes the default before it saves.",
            show_default="200M",
        ),
    ] = None,
    network_speed: Annotated[
        str | None,
        typer.Option(metavar=_SPEED, help="Between two pods. The default is 10 Gbit/s.", show_default="1250M"),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="JOB|FILE",
            help="Take settings from a job and its newest checkpoint, or from TrainingArguments as JSON.",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two layouts, nodes x GPUs of each, side by side: --compare 6x1 2x3."),
    ] = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Compute what a model's checkpoints need: disks, memory, uploads and grace period.

    The sizes of checkpoints are those that a save writes with this strategy. Beside Safepoint's storage, the answer
    has that of the formula in OpenShift AI's documents, term by term.

    Exit codes: 0 the plan is printed; 2 an option or the model is invalid; 13 the picture cannot be written.
    """
    answers = {"strategy": strategy, "optimizer": optimizer, "keep": save_total_limit, "is_mixed": mixed}
    given, found = _read_for(for_, known={name for name, value in answers.items() if value is not None})
    shape = _shape(
        model,
        params,
        found,
        layers=_positive("--layers", layers, most=10_000),
        hidden=_positive("--hidden", hidden, most=1_000_000),
        vocabulary=_positive("--vocabulary", vocabulary, most=100_000_000),
    )
    speeds = {
        "--upload-speed": upload_speed,
        "--download-speed": download_speed,
        "--disk-speed": disk_speed,
        "--network-speed": network_speed,
    }
    num_nodes, num_gpus = _or(nodes, given.nodes, 1), _or(gpus, given.gpus, 1)
    layouts = None if compare is None else (parse_layout(compare[0]), parse_layout(compare[1]))
    if layouts is not None:
        if nodes is not None or gpus is not None:
            option = "--nodes" if nodes is not None else "--gpus"
            raise UsageError(
                f"{option} and --compare contradict each other; nothing was computed",
                hint=f"leave {option} out: the layouts have the nodes and the GPUs",
            )
        unused = {"--grace": grace, "--step-time": step_time, "--store-keep": store_keep, **_unused_speeds(speeds)}
        passed = [option for option, value in unused.items() if value is not None]
        # The JSON document also has the whole plan of the first layout, which they change.
        if passed and not as_json:
            raise UsageError(
                f"{passed[0]} is for the plan of one layout, and --compare does not show it; nothing was computed",
                hint=f"leave {passed[0]} out, or replace --compare with --nodes and --gpus",
            )
        num_nodes, num_gpus = layouts[0]
    rank = _positive("--lora-rank", _or(lora_rank, given.lora_rank, 0) or lora_rank, most=1_000_000)
    if rank is None and (quantized or lora_targets is not None):
        raise UsageError(
            f"{'--quantized' if quantized else '--lora-targets'} is for an adapter, and there is none",
            hint="add --lora-rank, such as --lora-rank 16",
        )
    if shape.is_quantized and not quantized:
        raise UsageError(
            f"{shape.source} include a quantization_config: the model is quantized; nothing was computed",
            hint="for QLoRA add --lora-rank and --quantized; to train all weights, pass the config.json of the model "
            "that was quantized",
        )
    chosen = _strategy(strategy) or given.strategy
    if chosen is None:
        chosen = Strategy.DDP if num_nodes * num_gpus > 1 else Strategy.SINGLE
    targets = lora_targets.split(",") if lora_targets is not None else given.lora_targets or ()
    training = Training(
        tensors=shape.tensors,
        tied=shape.tied,
        dtype=_dtype(dtype, shape),
        adapter=adapter_of(shape, rank=rank, targets=[one.strip() for one in targets]) if rank else (),
        strategy=chosen,
        optimizer=find_optimizer(optimizer) if optimizer is not None else given.optimizer or OPTIMIZERS["adamw"],
        num_ranks=max(1, num_nodes * num_gpus),
        is_mixed=_or(mixed, given.is_mixed, default=False),
        tokenizer_bytes=shape.extra_bytes,
    )
    run = Run(
        model=shape,
        training=training,
        nodes=num_nodes,
        gpus=num_gpus,
        keep=_or(save_total_limit, given.keep, 2),
        store_keep=_positive("--store-keep", store_keep, most=1_000_000),
        grace_s=_or(_seconds("--grace", grace), given.grace_s, 30.0),
        step_s=_or(_seconds("--step-time", step_time), given.step_s, 0.0),
        speeds=Speeds(
            upload=_speed("--upload-speed", upload_speed, UPLOAD_BYTES_PER_S),
            download=_speed("--download-speed", download_speed, DOWNLOAD_BYTES_PER_S),
            disk=_speed("--disk-speed", disk_speed, DISK_BYTES_PER_S),
            network=_speed("--network-speed", network_speed, NETWORK_BYTES_PER_S),
        ),
        slots=_slots(snapshot_slots, given.slots),
        is_quantized=quantized,
        measured_bytes=None if layouts is not None else given.measured_bytes,
    )
    plan = plan_storage(run)
    notes = notes_of(plan, is_keep_assumed=save_total_limit is None and given.keep is None)
    notes += _slow(speeds)
    if layouts is not None and given.measured_bytes is not None:
        notes.append(f"the size of the checkpoint that {given.source} has is not used: it has another layout")
    document = document_of(plan, source=given.source, notes=notes)
    lines = lines_of(plan, source=given.source, notes=notes)
    drawn = [("", plan)]
    if layouts is not None:
        pair = compare_layouts(run, *layouts)
        document = {**document, "layouts": [layout_document(one) for one in pair]}
        lines = layout_lines(pair, notes)
        drawn = [(f"{one.plan.run.nodes} x {one.plan.run.gpus}: ", one.plan) for one in pair]
    if svg is not None:
        lines += ["", write_picture(svg, picture_of(drawn))]
    print_answer(as_json, document, lines)


def _or(option: _T | None, given: _T | None, default: _T) -> _T:
    """The option, or what `--for` gives, or the default."""
    if option is not None:
        return option
    return default if given is None else given


def _dtype(option: str | None, shape: ModelShape) -> str:
    if option is not None:
        return dtype_of(option)
    if shape.dtype is None:
        return "float32" if shape.is_exact else "bfloat16"
    return dtype_of(shape.dtype, f"{shape.source}: the type")


def _positive(option: str, value: int | None, *, most: int) -> int | None:
    if value is not None and not 1 <= value <= most:
        raise UsageError(
            f"{option} {value} is invalid; nothing was computed", hint=f"{option} must be from 1 to {most:,}"
        )
    return value


def _slots(option: int | None, given: int | None) -> int | None:
    """As `RunSettings` checks them."""
    if option is not None and not 0 <= option <= 8:
        raise UsageError(
            f"--snapshot-slots {option} is invalid; nothing was computed", hint="--snapshot-slots must be from 0 to 8"
        )
    return given if option is None else option


def _strategy(name: str | None) -> Strategy | None:
    if name is None:
        return None
    try:
        return Strategy(name.strip().lower())
    except ValueError as error:
        raise UsageError(
            f"--strategy {name[:60]!r} is not known; nothing was computed", hint=nearest(name[:60], list(Strategy))
        ) from error


def _seconds(option: str, text: str | None) -> float | None:
    """A time with a unit, as for the other plans, or a number of seconds."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_duration(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{option} {text[:60]!r} is not a time; nothing was computed", hint=f"for example {option} 45s"
        ) from error


def _unused_speeds(speeds: Mapping[str, str | None]) -> dict[str, str | None]:
    """Those that change nothing in the comparison of two layouts."""
    return {option: speeds[option] for option in ("--upload-speed", "--disk-speed")}


def _slow(speeds: Mapping[str, str | None]) -> list[str]:
    """Notes about speeds that lack their unit: 68 is 68 bytes in a second."""
    return [
        f"{option} {text[:60]} is {text[:60]} bytes in a second: did you mean {text[:60]}M?"
        for option, text in speeds.items()
        if text is not None and text.isascii() and text.isdigit() and int(text) < 100_000
    ]


def _speed(option: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        return float(parse_bytes(text.strip().removesuffix("/s").removesuffix("B")))
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{option} {text[:60]!r} is not a speed; nothing was computed",
            hint="write bytes in a second, such as 68M or 1.2G",
        ) from error


# ---- the model, and what a job has recorded ------------------------------------------------------------------------


def _shape(
    model: str | None,
    params: str | None,
    found: ModelShape | None,
    *,
    layers: int | None,
    hidden: int | None,
    vocabulary: int | None,
) -> ModelShape:
    if model is not None and params is not None:
        raise UsageError("MODEL and --params contradict each other; nothing was computed", hint="pass one of them")
    if params is not None:
        return of_count(parse_parameters(params), layers=layers, hidden=hidden, vocabulary=vocabulary)
    if layers or hidden or vocabulary:
        option = "--layers" if layers else "--hidden" if hidden else "--vocabulary"
        raise UsageError(f"{option} is for --params; nothing was computed", hint="leave it out, or pass --params")
    if model is not None:
        return read_model(Path(model))
    if found is not None:
        return found
    raise UsageError(
        "there is no model; nothing was computed",
        hint="pass a config.json, a folder with a model, or --params with the number of parameters, such as 8B",
    )


def _read_for(text: str | None, *, known: Container[str]) -> tuple[Given, ModelShape | None]:
    """What `--for` says, and the model of the job's newest checkpoint, if it has one.

    Args:
        text: the value of `--for`.
        known: the fields that options on the command line answer.
    """
    if text is None:
        return Given(), None
    path = Path(text)
    # A folder with the name of a job, such as its output folder, is no file with arguments: the job is meant.
    is_file = os.path.isfile(text)
    if is_file or "/" in text or path.suffix == ".json":
        return read_arguments(path, known=known), None
    return _of_job(text)


def _of_job(name: str) -> tuple[Given, ModelShape | None]:
    from safepoint.jobs.local.local_jobs import LocalJobs

    with LocalJobs() as jobs:
        job = jobs.job(name)
        output, progress = jobs.output_of(job), jobs.progress_of(job)
    settings = job.spec.settings
    given = Given(
        source=f"the job {job.name}",
        keep=settings.save_total_limit,
        nodes=job.spec.num_nodes,
        gpus=job.spec.ranks_per_node,
        grace_s=settings.grace_s,
        slots=settings.snapshot_slots,
        step_s=None if progress is None else progress.step_s,
    )
    if output is None:
        return given, None
    try:
        return _of_checkpoint(given, output)
    except SafepointError as error:
        print_warning(f"the checkpoints of {job.name} are not used: {error}")
        return given, None


def _of_checkpoint(given: Given, output: str) -> tuple[Given, ModelShape | None]:
    """Add what the newest complete checkpoint shows."""
    from safepoint.cli.location_argument import open_place, pick

    inventory, _ = open_place(output)
    item = pick(inventory, None)
    manifest = inventory.read_manifest(item)
    sizes = {entry.path: entry.size_bytes for entry in manifest.files}
    shown = given_by_files(sizes, source=f"{given.source} and its {item.name}")

    def read(path: str) -> dict[str, Any] | None:
        if sizes.get(path, _MAX_CONFIG_BYTES) >= _MAX_CONFIG_BYTES:
            return None
        data = bytes(inventory.store.read(f"{item.name}/{path}", most_bytes=_MAX_CONFIG_BYTES))
        try:
            return parse_object(data, max_bytes=_MAX_CONFIG_BYTES, constant=float)
        except ValueError as error:
            raise UsageError(f"{path} of {item.where} is damaged: {error}") from error

    adapter, config = read("adapter_config.json"), read("config.json")
    given = dataclasses.replace(
        given, source=shown.source, strategy=shown.strategy, measured_bytes=shown.measured_bytes
    )
    if adapter is not None:
        rank, targets, base = given_by_adapter(adapter)
        given = dataclasses.replace(given, lora_rank=rank, lora_targets=targets)
        return given, read_model(Path(base)) if base is not None and os.path.exists(base) else None
    model = None if config is None else of_config(config, name=item.where, where=f"{item.name}/config.json")
    return given, model


__all__ = ["storage"]
