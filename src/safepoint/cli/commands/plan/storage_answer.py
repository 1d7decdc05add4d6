"""Shows a storage plan as tables, as a JSON document, or as a picture."""

from collections.abc import Sequence
from typing import Any

from safepoint.cli.output import table
from safepoint.foundation.units import format_bytes, format_duration, plural
from safepoint.planning.layouts import LayoutPlan
from safepoint.planning.model import short_count
from safepoint.planning.pictures import Bar, bars
from safepoint.planning.storage import GraceFit, Pod, StoragePlan

_GIB = 1 << 30


def lines_of(plan: StoragePlan, *, source: str, notes: Sequence[str] = ()) -> list[str]:
    """The plan as lines for people; `notes` are at its end."""
    run = plan.run
    others = plan.other_pod
    pages = [
        ["model", _model(plan)],
        ["training", _training(plan)],
        *([["settings from", source]] if source else []),
        ["one GPU holds", _memory(plan)],
        ["checkpoint", _checkpoint(plan)],
    ]
    pod = "pod" if run.nodes == 1 else f"first of {run.nodes} pods"
    lines = [*_aligned(pages), "", *_terms(plan.first_pod, f"{pod}, with an object store".upper())]
    if others is not None:
        lines += ["", *_terms(others, "EACH OTHER POD")]
    volumes = f"an emptyDir of {_gib(plan.first_pod.volume_bytes)}"
    if others is not None and others.volume_bytes != plan.first_pod.volume_bytes:
        volumes += f" in the first pod, and of {_gib(others.volume_bytes)} in each other pod"
    elif others is not None:
        volumes += " in each pod"
    answers = [
        ["ask for", volumes],
        ["or", f"a claim of {_gib(plan.claim_bytes)} that all pods share, and {_cache(plan)} in each pod"],
        ["object store", _bucket(plan)],
        ["host memory", _host_memory(plan)],
        ["upload", _upload(plan)],
        ["resume", _resume(plan)],
        ["grace period", _grace(plan)],
        ["speeds", _speeds(plan)],
    ]
    answers += [["note", note] for note in notes]
    return [*lines, "", *_aligned(answers)]


def notes_of(plan: StoragePlan, *, is_keep_assumed: bool) -> list[str]:
    """What the reader has to know about the plan.

    Args:
        plan: the plan.
        is_keep_assumed: whether neither an option nor `--for` says how many checkpoints stay on the disk.
    """
    run, training = plan.run, plan.run.training
    notes: list[str] = []
    if not run.model.is_exact:
        notes.append("the tensors follow from the number of parameters; pass the config.json for exact sizes")
    if is_keep_assumed:
        notes.append(
            f"N = {run.keep} is assumed: without save_total_limit (--save-total-limit) all checkpoints stay there"
        )
    if training.adapter:
        halves = zip(training.adapter[::2], training.adapter[1::2], strict=True)
        narrowest = min(min(first.sizes[1], second.sizes[0]) for first, second in halves)
        if _rank(plan) > narrowest:
            notes.append(
                f"the rank {_rank(plan)} is larger than the {narrowest} rows or columns of an adapted matrix: no "
                "adapter needs a larger rank than that"
            )
    if training.strategy.is_zero and training.optimizer.name not in {"adamw", "sgd", "sgd-momentum"}:
        notes.append(f"ZeRO keeps {training.optimizer.moments} states of 32 bits for each trained parameter")
    return notes


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    width = len("settings from")
    return [f"{name.ljust(width)}  {text}" for name, text in rows]


def _model(plan: StoragePlan) -> str:
    model = plan.run.model
    count = short_count(model.num_parameters)
    named = f"{model.name}, {count} parameters" if model.is_exact else f"{count} parameters"
    return f"{named}; from {model.source}"


def _training(plan: StoragePlan) -> str:
    run, training = plan.run, plan.run.training
    parts = [
        str(training.strategy),
        f"{plural(run.nodes, 'node')} x {plural(run.gpus, 'GPU')}",
        training.optimizer.name,
        f"{training.dtype}{', mixed precision' * training.is_mixed}",
    ]
    if training.adapter:
        trained = short_count(sum(_numel(one.sizes) for one in training.adapter))
        rank = _rank(plan)
        parts.append(f"{'Q' * run.is_quantized}LoRA of rank {rank} ({trained} parameters)")
    return ", ".join(parts)


def _rank(plan: StoragePlan) -> int:
    return plan.run.training.adapter[0].sizes[0]


def _numel(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _memory(plan: StoragePlan) -> str:
    memory = plan.memory
    return (
        f"weights {format_bytes(memory.weights_bytes)}, gradients {format_bytes(memory.gradients_bytes)}, "
        f"optimizer {format_bytes(memory.optimizer_bytes)}; activations come on top"
    )


def _checkpoint(plan: StoragePlan) -> str:
    if plan.run.measured_bytes is not None:
        return f"{format_bytes(plan.checkpoint_bytes)}, measured"
    kinds = ", ".join(f"{what} {format_bytes(plan.bytes_of(what))}" for what in ("weights", "optimizer", "other"))
    return f"{format_bytes(plan.checkpoint_bytes)}: {kinds}"


def _terms(pod: Pod, head: str) -> list[str]:
    rows = [
        [term.name, format_bytes(term.documented_bytes), format_bytes(term.ours_bytes), term.why]
        for term in pod.terms
    ]
    rows.append(["sum", format_bytes(pod.documented_bytes), format_bytes(pod.ours_bytes), ""])
    return table([head, "DOCUMENTS", "SAFEPOINT", "WHY"], rows)


def _cache(plan: StoragePlan) -> str:
    return f"{_gib(plan.cache_bytes)} for the model"


def _bucket(plan: StoragePlan) -> str:
    each = f"{format_bytes(plan.checkpoint_bytes)} for each checkpoint"
    final = f"{format_bytes(plan.final_bytes)} for the final model"
    if plan.bucket_bytes is None:
        return f"{each}, all of which stay without --store-keep; and {final}"
    return f"{format_bytes(plan.bucket_bytes)} at most: {each}, one more while it is uploaded, and {final}"


def _host_memory(plan: StoragePlan) -> str:
    size = f"{format_bytes(plan.snapshot_bytes)} for snapshots on the first node"
    if plan.run.slots == 0:
        return "none: with --snapshot-slots 0 training waits for each save"
    if plan.run.nodes > 1:
        return f"{size}, with a shared claim; with a folder in each pod training waits for each save"
    return f"{size}, and a reserve of 5 % of the limit, on top of what the training itself needs"


def _upload(plan: StoragePlan) -> str:
    speed = f"{format_bytes(round(plan.run.speeds.upload))}/s from each pod"
    return f"{format_duration(plan.times.upload_s)} for each checkpoint, at {speed}"


def _resume(plan: StoragePlan) -> str:
    times = plan.times
    fetch = f"{format_duration(times.fetch_s)} to fetch a checkpoint"
    if plan.run.nodes > 1:
        fetch += f" ({format_duration(times.documented_fetch_s)} if each pod fetches all of it)"
    speed = f"{format_bytes(round(plan.run.speeds.download))}/s"
    return f"{format_duration(times.model_s)} to download the model, {fetch}, at {speed}"


def _grace(plan: StoragePlan) -> str:
    run = plan.run
    given = f"{run.grace_s:g} s"
    in_folder = _fit("a save to the claim needs", plan.in_folder)
    return f"{given}: {in_folder}; {_fit('a save and its upload need', plan.in_store)}"


def _speeds(plan: StoragePlan) -> str:
    speeds = plan.run.speeds
    names = ("upload", "download", "disk", "network")
    shown = ", ".join(f"{name} {format_bytes(round(getattr(speeds, name)))}/s" for name in names)
    step = f"; a step takes {format_duration(plan.run.step_s)}" if plan.run.step_s else ""
    return f"{shown}{step}"


def _fit(what: str, fit: GraceFit) -> str:
    needed = f"{what} {format_duration(fit.needed_s)}"
    if fit.fits:
        return f"{needed}, which fits"
    return f"{needed}, and {format_duration(fit.usable_s)} can be used: ask for {fit.grace_s} s"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes // _GIB}Gi"


# ---- two layouts ---------------------------------------------------------------------------------------------------


def layout_lines(pair: Sequence[LayoutPlan], notes: Sequence[str] = ()) -> list[str]:
    """Two layouts side by side; `notes` are at the end."""
    first = pair[0].plan
    rows = [
        ["model downloads, all pods", *(format_bytes(one.model_bytes) for one in pair)],
        ["checkpoint reads at a resume", *(format_bytes(one.fetch_bytes) for one in pair)],
        ["  if each pod reads all of it", *(format_bytes(one.documented_fetch_bytes) for one in pair)],
        ["emptyDir of the first pod", *(_gib(one.plan.first_pod.volume_bytes) for one in pair)],
        ["emptyDir of all pods", *(_gib(one.storage_bytes) for one in pair)],
        ["time until the model is there", *(format_duration(one.start_s) for one in pair)],
        ["time until a resume can begin", *(format_duration(one.resume_s) for one in pair)],
        ["  if each pod reads all of it", *(format_duration(one.documented_resume_s) for one in pair)],
        ["sent by a pod in each step", *(format_bytes(one.step_bytes) for one in pair)],
        ["host memory for snapshots", *(_layout_memory(one.plan) for one in pair)],
    ]
    heads = [f"{one.plan.run.nodes} x {one.plan.run.gpus} GPUS" for one in pair]
    pages = [["model", _model(first)], ["checkpoint", _checkpoint(first)]]
    lines = [*_aligned(pages), "", *table(["NODES X GPUS", *heads], rows)]
    return [*lines, "", *_aligned([["note", note] for note in notes])] if notes else lines


def _layout_memory(plan: StoragePlan) -> str:
    return format_bytes(plan.snapshot_bytes)


# ---- JSON and the picture ------------------------------------------------------------------------------------------


def document_of(plan: StoragePlan, *, source: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The plan for a program. All sizes are bytes, all times seconds."""
    run, training = plan.run, plan.run.training
    return {
        "model": {
            "name": run.model.name,
            "source": run.model.source,
            "num_parameters": run.model.num_parameters,
            "is_exact": run.model.is_exact,
        },
        "settings_from": source or None,
        "notes": [*notes],
        "strategy": str(training.strategy),
        "optimizer": training.optimizer.name,
        "dtype": training.dtype,
        "num_trained": sum(_numel(one.sizes) for one in training.trained),
        "nodes": run.nodes,
        "gpus": run.gpus,
        "keep": run.keep,
        "inputs": {
            "is_mixed": training.is_mixed,
            "lora_rank": _rank(plan) if training.adapter else None,
            "is_quantized": run.is_quantized,
            "store_keep": run.store_keep,
            "snapshot_slots": run.slots,
            "step_s": run.step_s,
            "upload_bytes_per_s": run.speeds.upload,
            "download_bytes_per_s": run.speeds.download,
            "disk_bytes_per_s": run.speeds.disk,
            "network_bytes_per_s": run.speeds.network,
        },
        "memory": {
            "weights_bytes": plan.memory.weights_bytes,
            "gradients_bytes": plan.memory.gradients_bytes,
            "optimizer_bytes": plan.memory.optimizer_bytes,
        },
        "checkpoint": {
            "size_bytes": plan.checkpoint_bytes,
            "is_measured": run.measured_bytes is not None,
            "weights_bytes": plan.bytes_of("weights"),
            "optimizer_bytes": plan.bytes_of("optimizer"),
            "other_bytes": plan.bytes_of("other"),
            "files": [
                {"path": group.path, "num_files": group.num_files, "size_bytes": group.total_bytes}
                for group in plan.groups
            ],
        },
        "first_pod": _pod_document(plan.first_pod),
        "other_pod": None if plan.other_pod is None else _pod_document(plan.other_pod),
        "claim_bytes": plan.claim_bytes,
        "cache_bytes": plan.cache_bytes,
        "bucket_bytes": plan.bucket_bytes,
        "final_bytes": plan.final_bytes,
        "snapshot_bytes": plan.snapshot_bytes,
        "times": {
            "claim_s": plan.times.claim_s,
            "write_s": plan.times.write_s,
            "upload_s": plan.times.upload_s,
            "model_s": plan.times.model_s,
            "fetch_s": plan.times.fetch_s,
            "documented_fetch_s": plan.times.documented_fetch_s,
        },
        "grace": {
            "grace_s": run.grace_s,
            "folder": _fit_document(plan.in_folder),
            "store": _fit_document(plan.in_store),
        },
    }


def _pod_document(pod: Pod) -> dict[str, Any]:
    return {
        "terms": [
            {"name": term.name, "documented_bytes": term.documented_bytes, "bytes": term.ours_bytes, "why": term.why}
            for term in pod.terms
        ],
        "documented_bytes": pod.documented_bytes,
        "bytes": pod.ours_bytes,
        "volume_bytes": pod.volume_bytes,
    }


def _fit_document(fit: GraceFit) -> dict[str, Any]:
    return {"needed_s": fit.needed_s, "usable_s": fit.usable_s, "fits": fit.fits, "least_grace_s": fit.grace_s}


def layout_document(layout: LayoutPlan) -> dict[str, Any]:
    """A layout for a program."""
    return {
        "nodes": layout.plan.run.nodes,
        "gpus": layout.plan.run.gpus,
        "model_bytes": layout.model_bytes,
        "fetch_bytes": layout.fetch_bytes,
        "documented_fetch_bytes": layout.documented_fetch_bytes,
        "volume_bytes": layout.plan.first_pod.volume_bytes,
        "storage_bytes": layout.storage_bytes,
        "start_s": layout.start_s,
        "resume_s": layout.resume_s,
        "documented_resume_s": layout.documented_resume_s,
        "step_bytes": layout.step_bytes,
        "snapshot_bytes": layout.plan.snapshot_bytes,
    }


def picture_of(drawn: Sequence[tuple[str, StoragePlan]]) -> str:
    """The terms of the first pod as bars, of the documents and of Safepoint, for each plan."""
    found: list[Bar] = []
    for prefix, plan in drawn:
        pod = plan.first_pod
        found += [
            Bar(
                f"{prefix}documents",
                [(_part(term.name), float(term.documented_bytes)) for term in pod.terms],
                format_bytes(pod.documented_bytes),
            ),
            Bar(
                f"{prefix}Safepoint",
                [(_part(term.name), float(term.ours_bytes)) for term in pod.terms],
                format_bytes(pod.ours_bytes),
            ),
        ]
    model, strategy = drawn[0][1].run.model.name, drawn[0][1].run.training.strategy
    description = "; ".join(f"{bar.name}: {bar.label}" for bar in found)
    return bars(f"Local storage of a pod: {model}, {strategy}", description, found)


def _part(name: str) -> str:
    return name.partition(" (")[0]
