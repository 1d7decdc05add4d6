"""The disks, memory and time that a run needs, compared term by term with the formula of OpenShift AI's documents.

The formula comes from "Configuring model checkpointing for distributed training with Kubeflow Trainer V2", Red Hat
OpenShift AI 3.4, section 6.5.3: base_cache + checkpoint_download + N x checkpoint_size + consolidation_peak +
final_model + safety_buffer, for each pod. Each term also has a second value: the most that Safepoint has on the disk.
This value follows from the code: `checkpoint/local/working_checkpoint.py` (a checkpoint is written once, and
renamed), `checkpoint/local/retention.py` (older ones are deleted after a commit), `checkpoint/remote/uploader.py`
(one checkpoint at a time is uploaded, and is not deleted meanwhile), `training/engine/final_model_save.py` (the final
model goes to the store without a disk), and `snapshot/keeper_client/arena.py` (memory).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from safepoint.errors import UsageError
from safepoint.estimates.sizes import DTYPE_BYTES, Strategy, TrainingMemory, quantized_bytes, training_memory
from safepoint.planning.checkpoint_files import (
    Group,
    Training,
    adapter_file_bytes,
    bytes_of_ranks,
    checkpoint_bytes,
    files_of,
    weights_file_bytes,
)
from safepoint.planning.documents import DOWNLOAD_BYTES_PER_S, UPLOAD_BYTES_PER_S, documented_multiplier
from safepoint.planning.model import ModelShape, linear_parameters

DISK_BYTES_PER_S = 200e6
"""The speed of a disk that a run assumes before its first save (`training/engine/snapshots.py`)."""
NETWORK_BYTES_PER_S = 1.25e9
"""10 Gbit/s, between nodes."""
_DOCUMENTED_BUFFER_BYTES = 10 * 10**9
_LEAST_BUFFER_BYTES = 1 << 30
_BUFFER_SHARE = 0.05
_SMALL_STATE_BYTES = 256 << 20
_FILE_SLACK_BYTES = 1 << 20
_RECORDS_BYTES = 8 << 10
"""`.safepoint/`: events, progress, locks."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes in a second.

    Args:
        upload: the speed from one pod to the object store. The default is the documents' figure.
        download: the speed from the object store to one pod. The default is the documents' figure.
        disk: the speed of the disk of checkpoints, with fsync.
        network: the speed between two nodes.
    """

    upload: float = UPLOAD_BYTES_PER_S
    download: float = DOWNLOAD_BYTES_PER_S
    disk: float = DISK_BYTES_PER_S
    network: float = NETWORK_BYTES_PER_S

    def __post_init__(self) -> None:
        for name in ("upload", "download", "disk", "network"):
            value: float = getattr(self, name)
            if not 0 < value <= 1e15:
                raise UsageError(
                    f"--{name}-speed {value:g} is not a speed; nothing was computed",
                    hint="write bytes in a second, such as 68M or 1.2G",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run that is planned.

    Args:
        model: the model.
        training: the facts on which the files of a checkpoint depend.
        nodes: the number of pods.
        gpus: the number of ranks of each pod.
        keep: the number of checkpoints that stay locally (`save_total_limit`).
        store_keep: the number of checkpoints that stay in the object store; None for all.
        grace_s: the time between SIGTERM and SIGKILL, in seconds.
        step_s: the time of a training step, in seconds. A save waits for the end of the step.
        speeds: the speeds of disks and networks.
        slots: the number of snapshots that the host memory holds; None for the number that a run chooses.
        is_quantized: whether the base model is in 4 bits (QLoRA).
        measured_bytes: the size of a checkpoint that the job has written; it replaces the computed size.
    """

    model: ModelShape
    training: Training
    nodes: int = 1
    gpus: int = 1
    keep: int = 2
    store_keep: int | None = None
    grace_s: float = 30.0
    step_s: float = 0.0
    speeds: Speeds = Speeds()
    slots: int | None = None
    is_quantized: bool = False
    measured_bytes: int | None = None

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--nodes", self.nodes, 1_000_000),
            ("--gpus", self.gpus, 1024),
            ("--save-total-limit", self.keep, 1_000_000),
        ):
            if not 1 <= value <= most:
                raise UsageError(
                    f"{option} {value} is invalid; nothing was computed",
                    hint=f"{option} must be from 1 to {most:,}",
                )
        if self.training.num_ranks != self.nodes * self.gpus:
            raise ValueError("training.num_ranks must be nodes times gpus")
        if self.training.strategy is Strategy.SINGLE and self.training.num_ranks != 1:
            raise UsageError(
                f"--strategy single is for one process, and there are {self.training.num_ranks}",
                hint="use --strategy ddp, fsdp, zero2 or zero3, or --nodes 1 --gpus 1",
            )
        for option, seconds, least in (("--grace", self.grace_s, 1), ("--step-time", self.step_s, 0)):
            if not (math.isfinite(seconds) and least <= seconds <= 86400 * 30):
                raise UsageError(
                    f"{option} {seconds:g} is invalid; nothing was computed",
                    hint=f"{option} must be a time from {least}s to 30d",
                )

    @property
    def margin_s(self) -> float:
        """The seconds from the deadline, at which all ranks have to exit, until SIGKILL, as in
        `RunSettings.margin_s`."""
        return min(3.0, 0.2 * self.grace_s)


class Term(NamedTuple):
    """A term of the formula.

    Args:
        name: its name in the documents.
        documented_bytes: the value by the documents' rule.
        ours_bytes: the value with Safepoint.
        why: the reason for Safepoint's value, for people.
    """

    name: str
    documented_bytes: int
    ours_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The local storage of a pod.

    Args:
        terms: the terms of the formula.
        checkpoint_bytes: the size of the part of each checkpoint that the pod has.
    """

    terms: tuple[Term, ...]
    checkpoint_bytes: int

    @property
    def ours_bytes(self) -> int:
        """The sum of Safepoint's terms."""
        return sum(term.ours_bytes for term in self.terms)

    @property
    def documented_bytes(self) -> int:
        """The sum of the documents' terms."""
        return sum(term.documented_bytes for term in self.terms)

    @property
    def volume_bytes(self) -> int:
        """The size of the volume (emptyDir) to request, in whole GiB."""
        return whole_gib(self.ours_bytes)


class Times(NamedTuple):
    """Durations in seconds.

    Args:
        claim_s: to write a checkpoint to one claim. All nodes share the claim and its speed.
        write_s: to write a node's part of a checkpoint to the node's own disk, for the node that writes most.
        upload_s: to upload the checkpoint; nodes with folders of their own upload at the same time.
        model_s: to download the model into each pod.
        fetch_s: to fetch a checkpoint at a resume: each node fetches a part, and the nodes exchange the parts.
        documented_fetch_s: to fetch a checkpoint if each pod downloads the whole checkpoint.
    """

    claim_s: float
    write_s: float
    upload_s: float
    model_s: float
    fetch_s: float
    documented_fetch_s: float


class GraceFit(NamedTuple):
    """Whether a save fits the grace period.

    Args:
        needed_s: the time of the running step and of the save.
        usable_s: the grace period without Safepoint's margin.
        fits: whether `usable_s` is enough.
        grace_s: the shortest grace period that is enough.
    """

    needed_s: float
    usable_s: float
    fits: bool
    grace_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """The storage, the memory and the times that a run needs.

    Args:
        run: the run.
        groups: the files of a checkpoint.
        checkpoint_bytes: the size of a checkpoint.
        weights_bytes: the size of the model's files, as they are downloaded.
        final_bytes: the size of the finished model.
        memory: the memory of one rank on its device.
        first_pod: the storage of the pod that writes most, with a folder of its own (emptyDir) and an object store.
        other_pod: the storage of each other pod; None with one pod.
        claim_bytes: the size of a claim that all pods share, in whole GiB. It does not include the downloaded model.
        cache_bytes: with such a claim, the size of each pod's volume for the downloaded model, with the safety
            buffer, in whole GiB.
        bucket_bytes: the most that the object store holds with `store_keep`; None without a limit.
        snapshot_bytes: host memory for snapshots on the first node, if all nodes share a folder.
        times: durations.
        in_folder: whether a save to one claim that all pods share fits the grace period.
        in_store: whether a save and its upload fit the grace period. A pod's own folder is deleted with the pod, so
            the upload has to be complete.
    """

    run: Run
    groups: tuple[Group, ...]
    checkpoint_bytes: int
    weights_bytes: int
    final_bytes: int
    memory: TrainingMemory
    first_pod: Pod
    other_pod: Pod | None
    claim_bytes: int
    cache_bytes: int
    bucket_bytes: int | None
    snapshot_bytes: int
    times: Times
    in_folder: GraceFit
    in_store: GraceFit

    def bytes_of(self, what: str) -> int:
        """The bytes of a checkpoint that are `weights`, `optimizer` or `other`."""
        return sum(group.total_bytes for group in self.groups if group.what == what)


def whole_gib(num_bytes: int) -> int:
    """A size, rounded up to whole GiB, in bytes."""
    return -(-num_bytes // _GIB) * _GIB


def plan_storage(run: Run) -> StoragePlan:
    """Compute the storage, the memory and the times that a run needs."""
    training = run.training
    groups = tuple(files_of(training))
    computed = checkpoint_bytes(groups)
    total = run.measured_bytes or computed
    scale = total / computed
    weights_bytes = run.model.stored_bytes or weights_file_bytes(run.model.tensors, training.dtype)
    weights_bytes += run.model.tokenizer_bytes
    final_bytes = _final_bytes(run)
    own = [round(scale * bytes_of_ranks(groups, ranks=run.gpus, has_first=is_first)) for is_first in (True, False)]
    if run.nodes == 1:
        own[0] = total
    pods = [
        _pod(run, total=total, own=of_node, weights_bytes=weights_bytes, final_bytes=final_bytes, is_first=index == 0)
        for index, of_node in enumerate(own)
    ]
    times = _times(run, total=total, own=own[0], weights_bytes=weights_bytes)
    return StoragePlan(
        run=run,
        groups=groups,
        checkpoint_bytes=total,
        weights_bytes=weights_bytes,
        final_bytes=final_bytes,
        memory=_memory(run),
        first_pod=pods[0],
        other_pod=pods[1] if run.nodes > 1 else None,
        claim_bytes=whole_gib(with_buffer((run.keep + 1) * total + final_bytes)),
        cache_bytes=whole_gib(with_buffer(weights_bytes)),
        bucket_bytes=None if run.store_keep is None else (run.store_keep + 1) * total + final_bytes,
        snapshot_bytes=_snapshot_bytes(run, groups, scale),
        times=times,
        in_folder=_fit(run, times.claim_s),
        in_store=_fit(run, times.write_s + times.upload_s),
    )


def _final_bytes(run: Run) -> int:
    """The finished model, as `from_pretrained` reads it."""
    if run.training.adapter:
        return adapter_file_bytes(run.training)
    return weights_file_bytes(run.model.tensors, run.training.computed_dtype) + run.training.tokenizer_bytes


# ---- the formula ---------------------------------------------------------------------------------------------------


def _pod(run: Run, *, total: int, own: int, weights_bytes: int, final_bytes: int, is_first: bool) -> Pod:
    training = run.training
    multiplier = documented_multiplier(training.strategy, has_adapter=bool(training.adapter))
    writes_final = is_first or training.strategy.is_fsdp or training.strategy is Strategy.ZERO3
    documented_final = weights_bytes if writes_final else 0
    # At a resume, the folder of every node has one whole checkpoint, and the node's parts of the other checkpoints.
    fetched = total - own
    terms = [
        Term("base cache", weights_bytes, weights_bytes, "every pod downloads the model"),
        Term(
            "checkpoint download",
            total,
            fetched,
            "it is one of the N checkpoints in the next row"
            if fetched < total // 100
            else "every node has the whole downloaded checkpoint, which is one of the N",
        ),
        Term(
            f"N x checkpoint (N = {run.keep})",
            run.keep * own,
            run.keep * own,
            "older checkpoints are deleted after each commit",
        ),
        Term(
            "consolidation peak",
            round(multiplier * own),
            own,
            f"1x in place of {multiplier:g}x: the next checkpoint is written once, in its final layout",
        ),
        Term("upload in progress", 0, own, "a checkpoint is not deleted while it is uploaded"),
        Term("final model", documented_final, 0, "it is uploaded without being written to a disk"),
    ]
    if training.adapter and is_first:
        terms[-1] = terms[-1]._replace(ours_bytes=final_bytes, why="only the adapter is saved")
    needed = sum(term.ours_bytes for term in terms)
    terms.append(
        Term(
            "safety buffer",
            _DOCUMENTED_BUFFER_BYTES,
            with_buffer(needed) - needed,
            "5 % of the sum, at least 1Gi, for events, logs, and files of the script",
        )
    )
    return Pod(terms=tuple(terms), checkpoint_bytes=own)


def with_buffer(num_bytes: int) -> int:
    """The bytes with the safety buffer: 5 %, at least 1 GiB."""
    return num_bytes + max(_LEAST_BUFFER_BYTES, math.ceil(_BUFFER_SHARE * num_bytes))


def peak_bytes(plan: StoragePlan, *, is_uploading: bool = False) -> int:
    """The most that a shared output folder holds during the training: the kept checkpoints, and the one in progress.

    Args:
        plan: the plan of the run.
        is_uploading: whether one more checkpoint stays in the folder because it is being uploaded.
    """
    return (plan.run.keep + 1 + is_uploading) * plan.checkpoint_bytes + _RECORDS_BYTES


# ---- memory --------------------------------------------------------------------------------------------------------


def _memory(run: Run) -> TrainingMemory:
    training = run.training
    item = DTYPE_BYTES[training.computed_dtype]
    trained = [one.sizes for one in training.trained if not one.is_embedding]
    frozen = 0
    if training.adapter:
        in_linear = linear_parameters(run.model)
        others = run.model.num_parameters - in_linear
        base_item = DTYPE_BYTES[training.dtype]
        frozen = (
            quantized_bytes(in_linear) + others * base_item
            if run.is_quantized
            else (run.model.num_parameters * base_item)
        )
    return training_memory(
        strategy=training.strategy,
        frozen_bytes=frozen,
        trained=trained,
        item_bytes=item,
        optimizer=training.optimizer,
        num_ranks=training.num_ranks,
        embeddings=[one.sizes for one in training.trained if one.is_embedding],
    )


def _snapshot_bytes(run: Run, groups: Sequence[Group], scale: float) -> int:
    """Host memory for snapshots on the node of rank 0, as `Arena.slots_for` decides."""
    found = 0
    for has_first, count in ((True, 1), (False, run.gpus - 1)):
        size = round(scale * bytes_of_ranks(groups, ranks=1, has_first=has_first)) + 2 * _FILE_SLACK_BYTES
        slots = run.slots
        if slots is None:
            slots = 3 if 3 * size <= _SMALL_STATE_BYTES else 1
        found += count * slots * size
    return found


# ---- time ----------------------------------------------------------------------------------------------------------


def _times(run: Run, *, total: int, own: int, weights_bytes: int) -> Times:
    speeds = run.speeds
    exchange_s = total * (run.nodes - 1) / run.nodes / speeds.network
    return Times(
        claim_s=total / speeds.disk,
        write_s=own / speeds.disk,
        upload_s=own / speeds.upload,
        model_s=weights_bytes / speeds.download,
        fetch_s=total / run.nodes / speeds.download + exchange_s,
        documented_fetch_s=total / speeds.download,
    )


def _fit(run: Run, save_s: float) -> GraceFit:
    needed_s = run.step_s + save_s
    usable_s = run.grace_s - run.margin_s
    # The margin is a fifth of a grace period of up to 15 s, and 3 s of a longer one.
    shortest = needed_s / 0.8 if needed_s <= 12 else needed_s + 3
    return GraceFit(needed_s, usable_s, needed_s <= usable_s, max(1, math.ceil(shortest)))
