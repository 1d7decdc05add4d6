"""`safepoint plan storage`: disks, memory, time and grace period for a model, before it is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from safepoint.cli.cluster_options import Namespace, OnOfJob
from safepoint.cli.commands.plan.options import Json, Svg, write_picture
from safepoint.cli.commands.plan.records import read_for
from safepoint.cli.commands.plan.storage_answer import (
    document_of,
    layout_document,
    layout_lines,
    lines_of,
    notes_of,
    picture_of,
    warnings_of,
)
from safepoint.cli.output import print_answer
from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.foundation.quantities import parse_bytes, parse_duration, parse_whole
from safepoint.planning.checkpoint_files import Training
from safepoint.planning.documents import DOWNLOAD_BYTES_PER_S, UPLOAD_BYTES_PER_S
from safepoint.planning.inputs import find_optimizer, parse_layout, parse_parameters
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import ModelShape, adapter_of, dtype_of, of_count, read_model
from safepoint.planning.storage import DISK_BYTES_PER_S, NETWORK_BYTES_PER_S, Run, Speeds, plan_storage

_T = TypeVar("_T")
_STRATEGIES = ", ".join(Strategy)
_SPEED = "BYTES/S"


def storage(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The config.json of a model, or the folder of a model. Not needed with --params. With --for, "
            "not needed if the job names its model.",
            show_default=False,
        ),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Instead of MODEL: the number of parameters, such as 70B. The shape of the model is estimated.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --params: the number of layers.",
            show_default="as in published models of this size",
        ),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --params: the width of a layer (hidden_size).",
            show_default="computed from the parameters and the layers",
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --params: the number of tokens in the vocabulary.",
            show_default="128256, or fewer if the model is small",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the weights: bf16, fp16 or fp32.",
            show_default="the type that the model states; fp32 if it states none; bf16 with --params",
        ),
    ] = None,
    mixed: Annotated[
        bool | None,
        typer.Option(
            "--mixed-precision/--no-mixed-precision",
            help="Whether TrainingArguments have bf16=True or fp16=True. With FSDP, trained weights and optimizer "
            "states are then kept in 32 bits. With ZeRO, the weights are then in 16 bits, and the optimizer keeps a "
            "copy of them in 32 bits.",
            show_default="no",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Optimizer: {', '.join(OPTIMIZERS)}, or a value of TrainingArguments.optim.",
            show_default="adamw",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How the GPUs share the model: {_STRATEGIES}.",
            show_default="ddp, or single with one GPU",
        ),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train a LoRA adapter of this rank.", show_default="no adapter")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With --lora-rank: the modules that get an adapter, such as q_proj,v_proj, or all-linear.",
            show_default="the modules that PEFT chooses for the model",
        ),
    ] = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="With --lora-rank: the base model is loaded in 4 bits (QLoRA).")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes: pods, on Kubernetes.", show_default="1")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Number of GPUs of each node.", show_default="1")
    ] = None,
    save_total_limit: Annotated[
        int | None, typer.Option(metavar="N", help="Number of checkpoints that stay on the disk.", show_default="2")
    ] = None,
    store_keep: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of checkpoints that stay in the object store.", show_default="all"),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Grace period: time from SIGTERM to SIGKILL, such as 45s or 2m.", show_default="30s"
        ),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time of a training step. A save waits for the end of the step.", show_default="0s"
        ),
    ] = None,
    snapshot_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of snapshots that fit into host memory at a time, as for `safepoint run`.",
            show_default="depends on the size of a snapshot",
        ),
    ] = None,
    upload_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="Speed of an upload from a node to the object store.",
            show_default="68M, as in OpenShift AI's documents",
        ),
    ] = None,
    download_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="Speed of a download from the object store to a node.",
            show_default="479M, as in OpenShift AI's documents",
        ),
    ] = None,
    disk_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="Speed at which the disk for checkpoints is written.",
            show_default="200M, which `safepoint run` assumes until its first save",
        ),
    ] = None,
    network_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED, help="Speed of the network between two nodes.", show_default="1250M, which is 10 Gbit/s"
        ),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="JOB|FILE",
            help="Read the settings from a job and its newest checkpoint, or from a JSON file with "
            "TrainingArguments. Options on the command line override these settings.",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare two layouts that have the same number of GPUs. For example, --compare 6x1 2x3 compares "
            "6 nodes of 1 GPU with 2 nodes of 3 GPUs.",
        ),
    ] = None,
    on: OnOfJob = None,
    namespace: Namespace = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Compute the disks, memory and time for checkpoints of a model.

    The command reads the shape of the model and no weights. For the given strategy and optimizer, it computes the
    size of a checkpoint, the disk space that a node needs, and the times of a save, an upload and a resume.

    OpenShift AI's documents have a formula for the disk space of a pod. The output has one row for each term of this
    formula. The column DOCUMENTS has the value that the formula gives, and the column SAFEPOINT has the space that
    Safepoint needs.

    Exit codes: 0 the plan is printed; 2 an option or the model is invalid; 10 there is no such job; 13 the file of
    --svg cannot be written.
    """
    answers = {"strategy": strategy, "optimizer": optimizer, "keep": save_total_limit, "is_mixed": mixed}
    known = {name for name, value in answers.items() if value is not None}
    given, found = read_for(for_, on=on, namespace=namespace, known=known)
    shape = _shape(
        model,
        params,
        found,
        layers=_positive("--layers", layers, most=10_000),
        hidden=_positive("--hidden", hidden, most=1_000_000),
        vocabulary=_positive("--vocabulary", vocabulary, most=100_000_000, least=2),
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
                hint=f"leave {option} out: --compare states the numbers of nodes and GPUs",
            )
        unused = {"--grace": grace, "--step-time": step_time, "--store-keep": store_keep, **_unused_speeds(speeds)}
        passed = [option for option, value in unused.items() if value is not None]
        # These options change the plan of the first layout. The JSON document contains this plan.
        if passed and not as_json:
            raise UsageError(
                f"{passed[0]} is for the plan of one layout, and --compare does not show this plan; nothing "
                "was computed",
                hint=f"leave {passed[0]} out, or replace --compare with --nodes and --gpus",
            )
        num_nodes, num_gpus = layouts[0]
    rank = _positive("--lora-rank", _or(lora_rank, given.lora_rank, 0) or lora_rank, most=1_000_000)
    if rank is None and (quantized or lora_targets is not None):
        raise UsageError(
            f"{'--quantized' if quantized else '--lora-targets'} is for an adapter, and --lora-rank is not given",
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
        tokenizer_bytes=shape.tokenizer_bytes,
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
    warnings = [*given.notes, *warnings_of(plan), *_slow(speeds)]
    if layouts is not None and given.measured_bytes is not None:
        notes.append(
            f"the size of the checkpoint of {given.source} is not used, because this checkpoint has another layout"
        )
    document = document_of(plan, source=given.source, warnings=warnings, notes=notes)
    lines = lines_of(plan, source=given.source, warnings=warnings, notes=notes)
    drawn = [("", plan)]
    if layouts is not None:
        pair = compare_layouts(run, *layouts)
        document = {**document, "layouts": [layout_document(one) for one in pair]}
        lines = layout_lines(pair, source=given.source, warnings=warnings, notes=notes)
        drawn = [(f"{one.plan.run.nodes} x {one.plan.run.gpus}: ", one.plan) for one in pair]
    if svg is not None:
        document = {**document, "picture": svg}
        lines += ["", write_picture(svg, picture_of(drawn))]
    print_answer(as_json, document, lines)


def _or(option: _T | None, given: _T | None, default: _T) -> _T:
    """The value of the option; without it, the value from `--for`; without both, the default."""
    if option is not None:
        return option
    return default if given is None else given


def _dtype(option: str | None, shape: ModelShape) -> str:
    if option is not None:
        return dtype_of(option)
    if shape.dtype is None:
        return "float32" if shape.is_exact else "bfloat16"
    return dtype_of(shape.dtype, f"{shape.source}: the type")


def _positive(option: str, value: int | None, *, most: int, least: int = 1) -> int | None:
    if value is not None and not least <= value <= most:
        raise UsageError(
            f"{option} {value} is invalid; nothing was computed", hint=f"{option} must be from {least} to {most:,}"
        )
    return value


def _slots(option: int | None, given: int | None) -> int | None:
    """The number of snapshots from the option; without it, from `--for`. `RunSettings` also allows 0 to 8
    snapshots."""
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
            f"--strategy {name[:60]!r} is not known; nothing was computed", hint=f"use one of {_STRATEGIES}"
        ) from error


def _seconds(option: str, text: str | None) -> float | None:
    """The seconds of a time with a unit, or of a number without a unit; None without a text."""
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
    """The speeds that change nothing in the comparison of two layouts."""
    return {option: speeds[option] for option in ("--upload-speed", "--disk-speed")}


def _slow(speeds: Mapping[str, str | None]) -> list[str]:
    """Warnings about speeds whose unit is probably missing: `68` means 68 bytes in a second."""
    return [
        f"{option} {text[:60]} is {text[:60]} bytes in a second: did you mean {text[:60]}M?"
        for option, text in speeds.items()
        if text is not None and (number := parse_whole(text)) is not None and number < 100_000
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


# ---- the model -----------------------------------------------------------------------------------------------------


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
        raise UsageError(
            f"{option} can be used only with --params; nothing was computed", hint="leave it out, or pass --params"
        )
    if model is not None:
        return read_model(Path(model))
    if found is not None:
        return found
    raise UsageError(
        "there is no model; nothing was computed",
        hint="pass a config.json, a folder with a model, or --params with the number of parameters, such as 8B",
    )
