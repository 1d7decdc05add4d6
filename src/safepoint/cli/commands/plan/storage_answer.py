"""Shows a storage plan as tables, as a JSON document, or as a picture."""

from collections.abc import Sequence
from typing import Any

from safepoint.cli.commands.plan.formats import aligned, remarks, size_text, speed_text, time_text, volume_text
from safepoint.cli.output import table
from safepoint.foundation.units import plural
from safepoint.planning.layouts import LayoutPlan
from safepoint.planning.model import short_count
from safepoint.planning.pictures import Bar, bars
from safepoint.planning.storage import GraceFit, Pod, StoragePlan

_SHOWN_SHARE = 0.01
_WEEK_S = 7 * 86_400


def lines_of(plan: StoragePlan, *, source: str, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> list[str]:
    """The plan as lines for people; `warnings` and `notes` are at its end."""
    run = plan.run
    others = plan.other_pod
    pages = [
        ["model", _model(plan)],
        ["training", _training(plan)],
        *([["settings from", source]] if source else []),
        ["one GPU holds", _memory(plan)],
        ["checkpoint", _checkpoint(plan)],
        ["files", _files(plan)],
    ]
    pod = "pod" if run.nodes == 1 else f"first of {run.nodes} pods"
    lines = [*aligned(pages), "", *_terms(plan.first_pod, f"{pod}, with an object store".upper())]
    if others is not None:
        lines += ["", *_terms(others, "EACH OTHER POD")]
    volumes = f"an emptyDir of {volume_text(plan.first_pod.volume_bytes)}"
    if others is not None and others.volume_bytes != plan.first_pod.volume_bytes:
        volumes += f" in the first pod, and of {volume_text(others.volume_bytes)} in each other pod"
    elif others is not None:
        volumes += " in each pod"
    answers = [
        ["ask for", volumes],
        ["or", f"a claim of {volume_text(plan.claim_bytes)} that all pods share, and {_cache(plan)} in each pod"],
        ["object store", _bucket(plan)],
        ["host memory", _host_memory(plan)],
        ["upload", _upload(plan)],
        ["resume", _resume(plan)],
        *_grace(plan),
        ["speeds", _speeds(plan)],
    ]
    return [*lines, "", *aligned(answers), *remarks(warnings, notes)]


def warnings_of(plan: StoragePlan) -> list[str]:
    """Warnings about probable mistakes in the inputs: an unusual shape of the model, or a time longer than a week."""
    found = [plan.run.model.doubt] if plan.run.model.doubt else []
    times = plan.times
    for option, seconds, what in (
        ("--disk-speed", times.claim_s, "a save"),
        ("--upload-speed", times.upload_s, "the upload of a checkpoint"),
        ("--download-speed", times.model_s, "the download of the model"),
        (
            "--network-speed",
            times.fetch_s - plan.checkpoint_bytes / plan.run.nodes / plan.run.speeds.download,
            "a resume",
        ),
    ):
        if seconds > _WEEK_S:
            found.append(f"{what} takes {time_text(seconds)}: check {option}, such as 68M for 68 MB/s")
    return found


def notes_of(plan: StoragePlan, *, is_keep_assumed: bool) -> list[str]:
    """The notes for a reader of the plan.

    Args:
        plan: the plan.
        is_keep_assumed: whether the number of checkpoints on the disk is a default, because no option and no source
            in `--for` states it.
    """
    run, training = plan.run, plan.run.training
    notes: list[str] = []
    if not run.model.is_exact:
        notes.append("the tensors are estimated from the number of parameters; pass the config.json for exact sizes")
    if is_keep_assumed:
        notes.append(
            f"N = {run.keep} is assumed; a run without save_total_limit (--save-total-limit) deletes no checkpoint"
        )
    if training.adapter:
        halves = zip(training.adapter[::2], training.adapter[1::2], strict=True)
        narrowest = min(min(first.sizes[1], second.sizes[0]) for first, second in halves)
        if _rank(plan) > narrowest:
            notes.append(
                f"--lora-rank {_rank(plan)} is larger than the smallest side of the adapted matrices ({narrowest}): "
                "no adapter needs a larger rank than that"
            )
    if training.strategy.is_zero and training.optimizer.name not in {"adamw", "sgd", "sgd-momentum"}:
        notes.append(
            f"with {training.optimizer.name}, ZeRO keeps {plural(training.optimizer.moments, 'value')} of 32 bits "
            "for each trained parameter, and the parameter itself in 32 bits"
        )
    return notes


def _model(plan: StoragePlan) -> str:
    model = plan.run.model
    count = short_count(model.num_parameters)
    named = f"{model.name}, {count} parameters" if model.is_exact else f"{count} parameters"
    return f"{named}; from {model.source}"


def _training(plan: StoragePlan, *, has_layout: bool = True) -> str:
    run, training = plan.run, plan.run.training
    parts = [
        str(training.strategy),
        *([f"{plural(run.nodes, 'node')} x {plural(run.gpus, 'GPU')}"] if has_layout else []),
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
        f"weights {size_text(memory.weights_bytes)}, gradients {size_text(memory.gradients_bytes)}, "
        f"optimizer {size_text(memory.optimizer_bytes)}, and activations in addition"
    )


def _checkpoint(plan: StoragePlan) -> str:
    if plan.run.measured_bytes is not None:
        return f"{size_text(plan.checkpoint_bytes)}, measured"
    kinds = ", ".join(f"{what} {size_text(plan.bytes_of(what))}" for what in ("weights", "optimizer", "other"))
    return f"{size_text(plan.checkpoint_bytes)}: {kinds}"


def _files(plan: StoragePlan) -> str:
    """The largest kinds of files in a checkpoint, as text. JSON lists all kinds."""
    total = sum(group.total_bytes for group in plan.groups)
    largest = [group for group in plan.groups if group.total_bytes >= _SHOWN_SHARE * total]
    shown = [
        f"{group.path}{f' ({group.num_files} files)' if group.num_files > 1 else ''} {size_text(group.total_bytes)}"
        for group in largest
    ]
    others = sum(group.num_files for group in plan.groups if group not in largest)
    rest = total - sum(group.total_bytes for group in largest)
    return ", ".join([*shown, f"{plural(others, 'other file')} {size_text(rest)}"])


def _terms(pod: Pod, head: str) -> list[str]:
    rows = [[term.name, size_text(term.documented_bytes), size_text(term.ours_bytes), term.why] for term in pod.terms]
    rows.append(["sum", size_text(pod.documented_bytes), size_text(pod.ours_bytes), ""])
    return table([head, "DOCUMENTS", "SAFEPOINT", "WHY"], rows)


def _cache(plan: StoragePlan) -> str:
    return f"{volume_text(plan.cache_bytes)} for the model"


def _bucket(plan: StoragePlan) -> str:
    each = f"{size_text(plan.checkpoint_bytes)} for each checkpoint"
    final = f"{size_text(plan.final_bytes)} for the final model"
    if plan.bucket_bytes is None:
        return f"{each}, and {final}; without --store-keep, all checkpoints stay there"
    return f"{size_text(plan.bucket_bytes)} at most: {each}, one more while it is uploaded, and {final}"


def _host_memory(plan: StoragePlan) -> str:
    size = f"{size_text(plan.snapshot_bytes)} for snapshots on the first node"
    if plan.run.slots == 0:
        return "none: with --snapshot-slots 0, the training waits for each save"
    if plan.run.nodes > 1:
        return f"{size}, if all pods share a claim; with a folder in each pod, the training waits for each save"
    return f"{size}, in addition to what the training needs; 5 % of the memory limit stay free"


def _upload(plan: StoragePlan) -> str:
    speed = f"{speed_text(plan.run.speeds.upload)} from each pod"
    return f"{time_text(plan.times.upload_s)} for each checkpoint, at {speed}"


def _resume(plan: StoragePlan) -> str:
    times = plan.times
    fetch = f"{time_text(times.fetch_s)} to fetch a checkpoint"
    if plan.run.nodes > 1:
        fetch += f" ({time_text(times.documented_fetch_s)} if each pod fetches all of it)"
    speed = speed_text(plan.run.speeds.download)
    return f"{time_text(times.model_s)} to download the model, {fetch}, at {speed}"


def _grace(plan: StoragePlan) -> list[list[str]]:
    usable = f"{time_text(plan.run.grace_s)}, of which a save can use {time_text(plan.in_folder.usable_s)}"
    return [
        ["grace period", usable],
        ["  claim", _fit("a save", plan.in_folder)],
        ["  emptyDir", _fit("a save and its upload", plan.in_store)],
    ]


def _speeds(plan: StoragePlan) -> str:
    speeds = plan.run.speeds
    names = ("upload", "download", "disk", "network")
    shown = ", ".join(f"{name} {speed_text(getattr(speeds, name))}" for name in names)
    step = f"; a step takes {time_text(plan.run.step_s)}" if plan.run.step_s else ""
    return f"{shown}{step}"


def _fit(what: str, fit: GraceFit) -> str:
    takes = f"{what} can take {time_text(fit.needed_s)}"
    if fit.fits:
        return f"{takes}, which is short enough"
    return f"{takes}, which is too long: ask for a grace period of {fit.grace_s}s ({time_text(fit.grace_s)})"


# ---- two layouts ---------------------------------------------------------------------------------------------------


def layout_lines(
    pair: Sequence[LayoutPlan], *, source: str, warnings: Sequence[str] = (), notes: Sequence[str] = ()
) -> list[str]:
    """Two layouts side by side; `warnings` and `notes` are at the end."""
    first = pair[0].plan
    rows = [
        ["downloads of the model by all pods", *(size_text(one.model_bytes) for one in pair)],
        ["bytes of checkpoints that a resume reads", *(size_text(one.fetch_bytes) for one in pair)],
        ["  if each pod reads all of it", *(size_text(one.documented_fetch_bytes) for one in pair)],
        ["emptyDir of the first pod", *(volume_text(one.plan.first_pod.volume_bytes) for one in pair)],
        ["emptyDir of all pods together", *(volume_text(one.storage_bytes) for one in pair)],
        ["time to download the model", *(time_text(one.start_s) for one in pair)],
        ["time to download model and checkpoint", *(time_text(one.resume_s) for one in pair)],
        ["  if each pod reads all of it", *(time_text(one.documented_resume_s) for one in pair)],
        ["bytes that a pod sends in each step", *(size_text(one.step_bytes) for one in pair)],
        ["memory for snapshots on the first node", *(_layout_memory(one.plan) for one in pair)],
    ]
    heads = [f"{one.plan.run.nodes} x {one.plan.run.gpus} GPUS" for one in pair]
    pages = [
        ["model", _model(first)],
        ["training", _training(first, has_layout=False)],
        *([["settings from", source]] if source else []),
        ["checkpoint", _checkpoint(first)],
    ]
    speeds = first.run.speeds
    used = f"download {speed_text(speeds.download)}, network {speed_text(speeds.network)}"
    lines = [*aligned(pages), "", *table(["NODES X GPUS", *heads], rows), "", *aligned([["speeds", used]])]
    return [*lines, *remarks(warnings, notes)]


def _layout_memory(plan: StoragePlan) -> str:
    return size_text(plan.snapshot_bytes)


# ---- JSON and the picture ------------------------------------------------------------------------------------------


def document_of(
    plan: StoragePlan, *, source: str, warnings: Sequence[str] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
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
        "warnings": [*warnings],
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
    """A picture with two bars for each plan: the terms of the first pod by the documents, and by Safepoint."""
    found: list[Bar] = []
    for prefix, plan in drawn:
        pod = plan.first_pod
        found += [
            Bar(
                f"{prefix}documents",
                [(_part(term.name), float(term.documented_bytes)) for term in pod.terms],
                size_text(pod.documented_bytes),
                [size_text(term.documented_bytes) for term in pod.terms],
            ),
            Bar(
                f"{prefix}Safepoint",
                [(_part(term.name), float(term.ours_bytes)) for term in pod.terms],
                size_text(pod.ours_bytes),
                [size_text(term.ours_bytes) for term in pod.terms],
            ),
        ]
    model, strategy = drawn[0][1].run.model.name, drawn[0][1].run.training.strategy
    description = "; ".join(
        f"{bar.name}: {bar.label}, of which "
        + ", ".join(f"{name} {text}" for (name, _), text in zip(bar.parts, bar.texts, strict=True))
        for bar in found
    )
    pod = "a pod" if drawn[0][1].run.nodes == 1 and len(drawn) == 1 else "the first pod"
    return bars(f"Local storage of {pod}: {model}, {strategy}", description, found)


def _part(name: str) -> str:
    return name.partition(" (")[0]
