"""Sizes that a job asks for because a plan has computed them, and the sentences that explain these sizes.

The plan comes with the specification (`ClusterSpec.needs`). This module does not compute the plan. The record of the
job keeps the sentences. `submit`, `status --json` and `safepoint events` read them from this record. The rules are in
docs/adr/0026-sizes-that-a-job-asks-for.md.
"""

import logging
from dataclasses import replace
from typing import Any

from safepoint.errors import UsageError
from safepoint.estimates.job_needs import TEMPLATE_BYTES, JobOutline
from safepoint.foundation.quantities import parse_bytes, parse_count
from safepoint.foundation.units import format_bytes, format_duration
from safepoint.jobs.cluster.objects import items
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.model.outlines import outline_for
from safepoint.settings.run_settings import RunSettings
from safepoint.settings.wording import in_sdk_words
from safepoint.storage.location import parse_location

_log = logging.getLogger("safepoint")
_GIB = 1 << 30
_GPU = "nvidia.com/gpu"
_RESERVE = 1.05
"""The computed memory is multiplied by this factor: a reserve of 5 %, as docs/cluster.md says."""
_MOST_SENTENCES, _MOST_LETTERS = 8, 1000


def parse_local_limit(option: str, text: str, settings: RunSettings) -> int | None:
    """The size limit of the local folder for checkpoints, in bytes, as a user has written it; None for `none`.

    Only a job that saves to an object store has this folder. For another job, the option has no effect, and a warning
    is logged. No error is raised, because the option may be a default of the place.

    Args:
        option: the name of the option, for messages.
        text: its value.
        settings: the options of the run.

    Raises:
        UsageError: `text` is neither a size nor `none`.
    """
    if text.strip().lower() == "none":
        return None
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", hint=f"for example {option} 200Gi, or {option} none") from error
    if size_bytes < 1 << 20:
        raise UsageError(
            f"{option} {text} is {size_bytes} bytes, and no checkpoint would fit; nothing was submitted",
            hint=f"for example {option} 200Gi, or {option} none",
        )
    location = parse_location(settings.output_dir) if settings.output_dir is not None else None
    if location is None or not location.is_remote:
        output = "without an output location" if location is None else f"with output location {location}"
        _log.warning(
            "%s %s has no effect %s: the pods have a local folder for checkpoints only with an object store",
            option,
            text,
            output,
        )
    return size_bytes


def outline_of(spec: ClusterSpec) -> JobOutline:
    """The properties of a job that its needs depend on, without its model and its arguments."""
    return outline_for(spec.settings, num_nodes=spec.num_nodes, ranks_per_node=_ranks_of(spec))


def _ranks_of(spec: ClusterSpec) -> int | None:
    """The number of ranks in each pod; None if the runtime or the pod decides this."""
    if spec.ranks_per_node is not None:
        return spec.ranks_per_node
    text = spec.resources.get(_GPU) if spec.ranks_from is None else None
    try:
        return parse_count(text) or None if text is not None else None
    except ValueError:  # the cluster reports the invalid value
        return None


def with_planned_limit(spec: ClusterSpec, folder: str, *, is_mounted: bool) -> ClusterSpec:
    """The specification with the size limit from its plan for the local folder, if this limit may be set.

    Args:
        spec: the specification.
        folder: the path of the local folder in the pods.
        is_mounted: whether the runtime or a patch mounts another volume there. If so, no limit is set.
    """
    if is_mounted:
        return replace(spec, staging_bytes=None)
    if spec.is_staging_given or spec.needs is None or _why_unlimited(spec, folder):
        return spec
    return replace(spec, staging_bytes=spec.needs.local_bytes)


def _why_unlimited(spec: ClusterSpec, folder: str) -> str:
    """Why the size from the plan must not be set as a limit; empty if it may be set."""
    if spec.needs is not None and spec.needs.unlimited:
        return spec.needs.unlimited
    own = spec.settings.local_dir
    if own is not None and not f"{own}/".startswith(f"{folder}/"):
        return f"--local-dir {own} is in another volume"
    others = (*spec.program[1:], *spec.env.values())
    return f"something else is to be written to {folder}" if any(folder in text for text in others) else ""


def sentences_of(spec: ClusterSpec, folder: str, *, grace_s: int, is_mounted: bool) -> list[str]:
    """The sentences about the plan of a job, and about what was done because of the plan; empty if there is no plan.

    Args:
        spec: the specification, with the limit that it gets.
        folder: the path of the local folder in the pods.
        grace_s: the grace period that the job gets.
        is_mounted: whether the runtime or a patch mounts another volume at `folder`.
    """
    needs = spec.needs
    if needs is None:
        return []
    if needs.problem:
        found = [f"the sizes of the job were not computed: {needs.problem}"]
    else:
        found = [
            f"{needs.model}: a checkpoint has about {format_bytes(needs.checkpoint_bytes)} ({needs.training}), and "
            f"at most {format_bytes(needs.most_bytes)} with any strategy in 32 bits"
        ]
        found += [*_local(spec, folder, is_mounted=is_mounted), *_memory(spec), *_grace(spec, grace_s)]
    return [in_sdk_words(text) for text in found] if spec.settings.wording == "sdk" else found


def _local(spec: ClusterSpec, folder: str, *, is_mounted: bool) -> list[str]:
    location = parse_location(spec.settings.output_dir) if spec.settings.output_dir is not None else None
    if spec.needs is None or location is None or not location.is_remote or is_mounted:
        return []
    planned = "" if spec.needs.local_bytes is None else _gib(spec.needs.local_bytes)
    if spec.is_staging_given:
        given = "no size limit" if spec.staging_bytes is None else f"a size limit of {_gib(spec.staging_bytes)}"
        if not planned:
            return []
        return [f"local folder: {given}, as given; {planned} is enough for all checkpoints of this model"]
    reason = _why_unlimited(spec, folder)
    if reason:
        enough = f"; --local-limit {planned} would be enough" if planned else ""
        return [f"local folder: no size limit was set, because {reason}{enough}"]
    return [
        f"local folder: the emptyDir volume has a size limit of {planned}, more than the checkpoints of this model "
        "can take; --local-limit SIZE sets another limit, and --local-limit none sets no limit"
    ]


def _memory(spec: ClusterSpec) -> list[str]:
    needs = spec.needs
    if needs is None:
        return []
    template_bytes = TEMPLATE_BYTES if spec.settings.preload else 0
    total_bytes = needs.snapshot_bytes + template_bytes
    parts = (
        [f"snapshots take about {format_bytes(needs.snapshot_bytes)} in the first pod"]
        if needs.snapshot_bytes
        else []
    )
    if template_bytes:
        parts.append(f"the template of the ranks takes about {format_bytes(template_bytes)} in each pod")
    if not parts:
        return []
    what = f"memory: {' and '.join(parts)}"
    most = spec.settings.snapshot_bytes
    if most is not None and most < needs.snapshot_bytes:
        return [
            f"{what}, and --snapshot-memory {spec.settings.snapshot_memory} allows less for snapshots: training "
            "would wait for each save"
        ]
    given = spec.resources.get("memory")
    try:
        memory = None if given is None else parse_bytes(given)
    except ValueError:  # the cluster reports the invalid value
        memory = None
    if memory is not None and memory < _RESERVE * total_bytes:
        result = "training would wait for each save" if needs.snapshot_bytes else "the pod would be OOM-killed"
        return [f"{what}, and --memory {given} leaves too little for them: {result}"]
    return [
        f"{what}, in addition to what the training needs; the memory of the pod must have room for both. Safepoint "
        "does not know how much the training needs, so it did not change the requested memory"
    ]


def _grace(spec: ClusterSpec, grace_s: int) -> list[str]:
    needs = spec.needs
    if needs is None or needs.least_grace_s <= grace_s:
        return []
    location = parse_location(spec.settings.output_dir) if spec.settings.output_dir is not None else None
    save = "a save at SIGTERM takes"
    if location is not None and location.is_remote:
        save = "a save at SIGTERM and its upload take"
    kept = ""
    if spec.grace_s is None:
        kept = (
            ". Safepoint did not set a longer grace period, because a job that hangs would hold its GPUs for this "
            "whole time after a preemption"
        )
    return [
        f"grace period: {grace_s} s, and {save} about {format_duration(needs.save_s)} with a disk and a network of "
        f"usual speed{kept}. For complete saves, use --grace {needs.least_grace_s}"
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes // _GIB}Gi" if num_bytes % _GIB == 0 else str(num_bytes)


def planned_in(record: Any) -> tuple[str, ...]:
    """The sentences in the record of a job. Another person may have changed the record."""
    found = [one for one in items(record, "planned") if isinstance(one, str)]
    return tuple(text[:_MOST_LETTERS] for text in found[:_MOST_SENTENCES])
