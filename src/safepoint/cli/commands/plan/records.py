"""Reads the source that `plan storage --for` names: a file with TrainingArguments, or a job and its checkpoint.

The records of a job on this machine or on a cluster are its specification, the arguments of its program, its
progress, and the manifest of its newest checkpoint. If the checkpoint and the arguments differ, the checkpoint takes
precedence. If a record cannot be read, the answer is computed without it, and has a warning.
"""

import dataclasses
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from safepoint.checkpoint.local.retention import KeepNewest, parse_policies
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.cli.cluster_options import open_jobs
from safepoint.errors import SafepointError, UsageError
from safepoint.foundation.bounded_json import parse_object
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import Job, JobPlace
from safepoint.planning.architectures.headers import MAX_CONFIG_BYTES
from safepoint.planning.inputs import (
    Given,
    find_model,
    given_by_adapter,
    given_by_files,
    notes_on_adapter,
    read_arguments,
    read_job_arguments,
)
from safepoint.planning.model import ModelShape, of_config, read_model
from safepoint.settings.run_settings import RunSettings


def read_for(
    text: str | None, *, on: str | None, namespace: str | None, known: Container[str]
) -> tuple[Given, ModelShape | None]:
    """The settings from the source that `--for` names, and the model of the job; None if the model is not known.

    Args:
        text: the value of `--for`.
        on: the place of the job.
        namespace: the namespace of the cluster.
        known: the fields of `Given` that options on the command line set.

    Raises:
        UsageError: the file is invalid, or a place is given although `text` names no job.
        NotFoundError: there is no such job.
    """
    path = Path(text or "")
    # If a folder has the name of a job, as the job's output folder may have, `text` means the job.
    is_job = text is not None and not (os.path.isfile(text) or "/" in text or path.suffix == ".json")
    if not is_job and (on is not None or namespace is not None):
        what = "--for names no job" if text is None else f"--for {text[:200]} is a file"
        option = "--on" if on is not None else "--namespace"
        raise UsageError(
            f"{option} names the place of a job, and {what}; nothing was computed",
            hint="add --for with the name of a job, or leave the place out",
        )
    if text is None:
        return Given(), None
    if not is_job:
        return read_arguments(path, known=known), None
    with open_jobs(on, namespace, text) as jobs:
        return _of_job(jobs, text)


def _of_job(jobs: JobPlace[Any], name: str) -> tuple[Given, ModelShape | None]:
    job = jobs.job(name)
    unknown: tuple[str, ...] = ()
    if isinstance(jobs, LocalJobs):
        record = job.spec
        settings, code = record.settings, Path(record.working_dir)
        arguments, ranks = record.program[1:], record.ranks_per_node
        uri = next((one.source for one in record.inputs if one.kind == "model"), None)
    else:
        settings, arguments, ranks, uri, unknown = _of_cluster(jobs, job)
        code = None
    given, model = _of_arguments(Given(source=f"the job {job.name}"), arguments, code=code, uri=uri, name=job.name)
    progress = jobs.progress_of(job)
    keep = _kept(settings, given.keep)
    notes = (*unknown, *given.notes)
    if keep is None and settings.keep:
        notes = (*notes, f"it is not known how many checkpoints stay with --keep {settings.keep} of {job.name}")
    given = dataclasses.replace(
        given,
        keep=keep,
        notes=notes,
        nodes=job.num_nodes,
        gpus=ranks,
        grace_s=job.settings.grace_s,
        slots=settings.snapshot_slots,
        step_s=None if progress is None else progress.step_s,
    )
    try:
        inventory, hidden = _checkpoints_of(jobs, job)
        given = dataclasses.replace(given, notes=(*given.notes, *hidden))
        return (given, model) if inventory is None else _of_checkpoint(given, model, inventory)
    except SafepointError as error:
        notes = (*given.notes, f"the checkpoints of {job.name} are not used: {error}")
        return dataclasses.replace(given, notes=notes), model


def _kept(settings: RunSettings, stated: int | None) -> int | None:
    """The number of checkpoints that stay; None if it is not known, or if a policy is not `newest=N`."""
    policies = parse_policies(settings.keep)
    newest = [one.count for one in policies if isinstance(one, KeepNewest)]
    if len(newest) < len(policies):
        return None
    if settings.save_total_limit is not None:
        newest.append(settings.save_total_limit)
    # The options of the run replace the settings of the script.
    return max(newest) if newest else stated


def _of_cluster(
    jobs: JobPlace[Any], job: Job
) -> tuple[RunSettings, tuple[str, ...], int | None, str | None, tuple[str, ...]]:
    """The known facts about a job on a cluster: its options, its arguments, its ranks, and the address of its model.

    The last value has notes about facts that are not known.
    """
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
    from safepoint.jobs.cluster.records.submitted_record import read_submitted

    assert isinstance(jobs, ClusterJobs)
    record = read_submitted(jobs.observe(job.name).trainjob)
    if record is None:
        unknown = f"Safepoint did not submit job {job.name}: only its number of nodes and its grace period are known"
        return RunSettings(), (), job.ranks_per_node, None, (unknown,)
    invalid = f"the options in the record of job {job.name} are not valid, and not used"
    ranks = record.ranks_per_node if record.ranks_per_node is not None else job.ranks_per_node
    return (
        record.settings or RunSettings(),
        record.arguments,
        ranks,
        record.model_uri,
        (invalid,) if record.settings is None else (),
    )


def _of_arguments(
    given: Given, arguments: tuple[str, ...], *, code: Path | None, uri: str | None, name: str
) -> tuple[Given, ModelShape | None]:
    """Add the settings from the arguments of the program, and find the model that the arguments name."""
    stated = read_job_arguments(arguments, code=code)
    given = dataclasses.replace(
        given,
        strategy=stated.strategy,
        optimizer=stated.optimizer,
        keep=stated.keep,
        is_mixed=stated.is_mixed or None,
        lora_rank=stated.lora_rank,
        lora_targets=stated.lora_targets or None,
        notes=stated.notes,
    )
    model = stated.model
    if code is not None and model is not None and os.path.exists(code / model):
        model = str(code / model)  # a job of this machine may also have a path that leads out of its folder
    try:
        named = None if model is None and uri is None else find_model(model, code=code, uri=uri)
    except UsageError as error:
        given = dataclasses.replace(given, notes=(*given.notes, f"the model of {name} is not used: {error}"))
        named = None
    return given, None if named is None else named.shape


def _checkpoints_of(jobs: JobPlace[Any], job: Job) -> tuple[Inventory | None, tuple[str, ...]]:
    """The checkpoints of a job, and notes. The checkpoints are None if their location is not known yet, or if only
    pods can reach it; in the second case, a note says so."""
    output = jobs.output_of(job)
    if isinstance(jobs, LocalJobs):
        if output is None:
            return None, ()
        from safepoint.cli.location_argument import open_place

        return open_place(output)[0], ()
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

    assert isinstance(jobs, ClusterJobs)
    inventory = jobs.inventory_of(job.name)
    if inventory is None and output is not None:
        why = f"the checkpoints of {job.name} are in {output}, which only pods can reach: their size is computed"
        return None, (why,)
    return inventory, ()


def _of_checkpoint(given: Given, model: ModelShape | None, inventory: Inventory) -> tuple[Given, ModelShape | None]:
    """Add the facts that the newest complete checkpoint shows."""
    from safepoint.cli.location_argument import pick

    item = pick(inventory, None)
    manifest = inventory.read_manifest(item)
    sizes = {entry.path: entry.size_bytes for entry in manifest.files}
    shown = given_by_files(sizes, source=f"{given.source} and its {item.name}")

    def read(path: str) -> Mapping[str, Any] | None:
        if sizes.get(path, MAX_CONFIG_BYTES) >= MAX_CONFIG_BYTES:
            return None
        data = bytes(inventory.store.read(f"{item.name}/{path}", most_bytes=MAX_CONFIG_BYTES))
        try:
            return parse_object(data, max_bytes=MAX_CONFIG_BYTES, constant=float)
        except ValueError as error:
            raise UsageError(f"{path} of {item.where} is damaged: {error}") from error

    adapter, config = read("adapter_config.json"), read("config.json")
    given = dataclasses.replace(
        given,
        source=shown.source,
        strategy=given.strategy if shown.strategy is None else shown.strategy,
        measured_bytes=shown.measured_bytes,
    )
    if adapter is not None:
        rank, targets, base = given_by_adapter(adapter)
        notes = (*given.notes, *notes_on_adapter(adapter, item.name))
        given = dataclasses.replace(given, lora_rank=rank, lora_targets=targets, notes=notes)
        if base is not None and os.path.exists(base):
            return given, read_model(Path(base))
        return given, model
    if config is not None:
        model = of_config(config, name=item.where, where=f"{item.name}/config.json")
    return given, model
