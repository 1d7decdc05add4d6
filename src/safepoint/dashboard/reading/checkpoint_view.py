"""The checkpoints of a job or of any location."""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Trigger
from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.local.retention import Candidate, parse_policies
from safepoint.checkpoint.tools.documents import state_of
from safepoint.checkpoint.tools.inventory import Inventory, Item, Kind, Stated, open_inventory
from safepoint.dashboard.reading.places import PlaceReader
from safepoint.errors import NotFoundError, UnsupportedError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.records import JobEvent, JobRecord
from safepoint.settings.run_settings import RunSettings

if TYPE_CHECKING:
    from safepoint.jobs.cluster.cluster_jobs import ClusterJobs

_MOST_SIZE = 4096
"""The largest number of ranks that `_sizes` returns."""
_CLOCK_S = 1.0
"""The assumed largest difference between the clocks of two processes, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint in a table.

    Args:
        item: the checkpoint.
        state: such as `complete` or `damaged`.
        is_in_use: whether a process reads the checkpoint.
        world_size: the number of ranks that saved it; None if this is not known.
        sizes: the numbers of ranks on which the run can resume from it, smallest first; empty if they are not known.
            With each of these numbers, `per_device_train_batch_size` and the samples per step stay the same.
        check: the last check that read all its files; None if no such check is known. The faults that this check
            found are also among the faults of `item`.
        is_next: whether a resume begins at this checkpoint, as far as is known.
        kept_by: why retention keeps it, as phrases; empty if no policy keeps it, or if the policies are not known.
        also_in: the path of a further copy on this machine; empty if there is none.
    """

    item: Item
    state: str
    is_in_use: bool
    world_size: int | None = None
    sizes: tuple[int, ...] = ()
    check: "Check | None" = None
    is_next: bool = False
    kept_by: tuple[str, ...] = ()
    also_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check that read all files of a checkpoint.

    Args:
        time: when it ended, RFC 3339 UTC.
        how: `at a resume` or `here`.
        faults: the faults that it found.
    """

    time: str
    how: str
    faults: tuple[Fault, ...] = ()


class OnlyInPodsError(UnsupportedError):
    """Only a pod can read the checkpoints of a job on a cluster."""


def inventory_of_job(reader: PlaceReader, name: str) -> Inventory:
    """The checkpoints of a job. The location is opened with the settings and keys of the job.

    Raises:
        NotFoundError: the output location is not known yet.
        OnlyInPodsError: the job is on a cluster, and only a pod can read its checkpoints.
        SafepointError: the location cannot be reached.
    """
    job = reader.job(name).job
    output = reader.call(lambda jobs: jobs.output_of(job))
    if output is None:
        raise NotFoundError(
            "the output location of this job is not known yet", hint="its ranks report it when they start"
        )
    if isinstance(job, JobRecord):
        return open_output(job.spec, output)
    found = reader.call(lambda jobs: cast("ClusterJobs", jobs).inventory_of(name))
    if found is None:
        raise OnlyInPodsError(
            f"{output} can be read only in the cluster",
            hint=f"`safepoint checkpoints list{reader.option} job:{name}` also reads it, in a pod",
        )
    return found


def rows_in(documents: Iterable[Mapping[str, Any]]) -> list[CheckpointRow]:
    """The checkpoints that a pod has listed, newest first. Documents that this release cannot read are left out."""
    rows: list[CheckpointRow] = []
    for document in documents:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            item = _item_in(document)
            rows.append(CheckpointRow(item=item, state=state_of(item, item.faults, deep=False), is_in_use=False))
    return _with_next(rows)


def _item_in(document: Mapping[str, Any]) -> Item:
    """The checkpoint that a document describes. The document does not state the run and the metrics.

    Raises:
        ValueError: a kind or a trigger is not known, as in a document of a later release.
    """
    step, created_s = document["step"], float(document["created_s"])
    stated = None
    if step is not None:
        created, trigger = str(document["created"]), Trigger(document["trigger"])
        stated = Stated(run_id="", step=step, trigger=trigger, created=created, metrics={})
    return Item(
        name=document["name"],
        prefix="",
        where=document["where"],
        stated=stated,
        faults=tuple(Fault(file=str(one["file"]), reason=str(one["reason"])) for one in document["faults"]),
        kind=Kind(document["kind"]),
        num_files=document["files"],
        size_bytes=document["bytes"],
        modified_s=created_s,
        created_s=created_s,
    )


def open_any(text: str) -> tuple[Inventory, str | None]:
    """The checkpoints at a location that a person has typed; see `open_inventory`.

    Raises:
        UsageError: the text is not a location.
        SafepointError: the location cannot be reached.
    """
    try:
        return open_inventory(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def rows_of(
    inventory: Inventory,
    *,
    settings: RunSettings | None = None,
    checks: Mapping[str, Check] | None = None,
    local: str = "",
) -> list[CheckpointRow]:
    """All checkpoints, newest first; their files are not read.

    Args:
        inventory: the checkpoints.
        settings: the settings of the run that writes the checkpoints; None if they are not known.
        checks: the last check of each checkpoint, by its name.
        local: for an object store: the folder of this machine in which the run also keeps its newest checkpoints;
            empty if there is none.
    """
    found = [(item, _check_of(item, checks or {})) for item in inventory.items()]
    # `items` compares only the names and sizes of files. The faults that a check found in the contents must stay
    # visible.
    items = [item if check is None else replace(item, faults=check.faults) for item, check in found]
    in_use = {item.name for item in items if inventory.is_in_use(item)}
    is_store = inventory.folder is None
    kept = {} if settings is None else reasons_to_keep(items, in_use, settings, is_store=is_store)
    rows: list[CheckpointRow] = []
    for item, (_, check) in zip(items, found, strict=True):
        stated = item.stated if item.is_complete else None
        rows.append(
            CheckpointRow(
                item=item,
                state=state_of(item, item.faults, deep=False),
                is_in_use=item.name in in_use,
                world_size=None if stated is None else stated.world_size,
                sizes=() if stated is None else _sizes(stated),
                check=check,
                kept_by=kept.get(item.name, ()),
                also_in=_copy_of(item, Path(local)) if local and is_store else "",
            )
        )
    return _with_next(rows)


def _with_next(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """The rows. `is_next` is set for the checkpoint at which a resume begins."""
    newest = next((row for row in rows if row.item.counts and row.item.name != FINAL), None)
    return [replace(row, is_next=row is newest) for row in rows]


def _copy_of(item: Item, folder: Path) -> str:
    """The copy of a checkpoint in a folder; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / item.name / MANIFEST_NAME).is_file():
            return str(folder / item.name)
    return ""


def _check_of(item: Item, checks: Mapping[str, Check]) -> Check | None:
    """The last check of a checkpoint; None if this checkpoint was written after the check.

    The time in the manifest is not enough: another person may have replaced the checkpoint by an older checkpoint. So
    the check must also be later than the times of the files.
    """
    check = checks.get(item.name)
    if check is None or not item.is_complete:
        return None
    earliest_s = max(item.created_s, item.modified_s) - _CLOCK_S
    try:
        return check if clock.parse_utc(check.time) >= earliest_s else None
    except ValueError:
        return None


def checks_in(events: Iterable[JobEvent]) -> dict[str, Check]:
    """Name of a checkpoint → the last resume from it. A resume is a check, because it reads all files first."""
    found: dict[str, Check] = {}
    for event in events:
        step = event.detail.get("step")
        if event.name == "resumed" and type(step) is int and step >= 0:
            found[checkpoint_name(step)] = Check(time=event.time, how="at a resume")
    return found


def reasons_to_keep(
    items: Sequence[Item], in_use: Collection[str], settings: RunSettings, *, is_store: bool = False
) -> dict[str, tuple[str, ...]]:
    """The name of each checkpoint → why the retention of a run keeps it; empty if no policy keeps it.

    An object store has policies of its own (`--store-keep`).
    """
    keep = settings.store_keep if is_store else settings.keep
    texts = [text.strip() for text in (keep or "").split(",") if text.strip()]
    if settings.save_total_limit is not None and not is_store:
        texts.append(f"newest={settings.save_total_limit}")
    policies = [(text, policy) for text in dict.fromkeys(texts) for policy in parse_policies(text)]
    has_limit = any(policy.is_limit for _, policy in policies)
    runs: dict[str, list[tuple[str, Candidate]]] = {}
    for item in items:
        if item.counts and item.stated is not None and item.name != FINAL:
            runs.setdefault(item.stated.run_id, []).append((item.name, Candidate.of(item.stated)))
    found: dict[str, tuple[str, ...]] = {}
    for named in runs.values():
        candidates = [candidate for _, candidate in named]
        kept = [(text, policy.keeps(candidates, now_s=clock.wall_s(), protected=())) for text, policy in policies]
        for index, (name, candidate) in enumerate(named):
            reasons = ["it is the newest"] if index == 0 else []
            reasons += ["a process reads it"] if name in in_use else []
            reasons += [text for text, steps in kept if candidate.step in steps]
            found[name] = tuple(reasons if has_limit else ["no policy sets a limit"])
    return found


def _sizes(stated: Stated) -> tuple[int, ...]:
    """The numbers of ranks among which the micro-batches of a step can be divided equally."""
    num_batches = stated.world_size * stated.gradient_accumulation
    small = [number for number in range(1, min(num_batches, _MOST_SIZE) + 1) if num_batches % number == 0]
    return tuple(small)
