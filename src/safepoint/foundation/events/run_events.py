"""What can happen to a run, as typed records (docs/progress.md)."""

from dataclasses import dataclass

from safepoint.errors import printable
from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration, plural


class Started(Event, is_quiet=True):
    """A launcher was started on a node."""

    user: str
    host: str
    pid: int
    node: int
    num_nodes: int
    grace_s: float

    def _sentence(self) -> str:
        return f"started by {self.user}@{self.host}, launcher {self.pid}, node {self.node} of {self.num_nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """One rank of an attempt; part of `AttemptStarted`."""

    rank: int
    pid: int
    host: str


class AttemptStarted(Event):
    """The ranks are connected and begin to train. `hash_seed` is the PYTHONHASHSEED of rank 0, or empty."""

    attempt: int
    run_id: str
    world_size: int
    global_batch: int
    ranks: tuple[RankStarted, ...]
    hash_seed: str = ""

    def _sentence(self) -> str:
        pids = ", ".join(str(rank.pid) for rank in self.ranks[:8])
        return (
            f"training on {plural(self.world_size, 'rank')} (pid {pids}), "
            f"{self.global_batch} samples per step, run {self.run_id[:8]}, attempt {self.attempt}"
        )


class CheckpointRejected(Event, is_warning=True, cause="reason"):
    """A checkpoint is not used. `reason` says why.

    The checkpoint is damaged, is incomplete, belongs to another user, or could not be moved aside by this start or an
    earlier one.
    """

    path: str
    file: str
    reason: str

    def _sentence(self) -> str:
        return f"{self.path} is not used: {printable(self.file)}: {self.reason}"


class Resumed(Event):
    """The run resumes from a verified checkpoint."""

    step: int
    path: str
    num_files: int
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return (
            f"resuming from step {self.step}: {self.path}, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)} verified in {format_duration(self.duration_s)}"
        )


class ResumedFromForeign(Event, is_warning=True):
    """The run resumes from a checkpoint that Safepoint did not write."""

    step: int
    path: str
    writer: str

    def _sentence(self) -> str:
        return (
            f"Safepoint did not write {self.path} ({printable(self.writer)} did). The files were checked, but there "
            "are no digests to compare them with. The Trainer loads them as it does without Safepoint. These values "
            "are not restored exactly: the order of samples in the running epoch, the loss since the last log line, "
            "what TRL's trainers count between two log lines, and the training time. The next save is a checkpoint "
            "of Safepoint"
        )


class NewerForeign(Event, is_warning=True):
    """A checkpoint that Safepoint did not write is newer than the checkpoint from which the run resumes."""

    step: int
    path: str
    resumed_step: int
    fault: str

    def _sentence(self) -> str:
        found = f"{self.path} is newer than step {self.resumed_step}, but Safepoint did not write it: it is not used"
        if self.fault:
            return f"{found}. It could not be used in any case: {self.fault}"
        examine = f"Its files were not read; `safepoint checkpoints verify {self.path}` examines them"
        return f"{found}. {examine}. To resume from it, run again with --resume {self.path}"


class ResumedFromMemory(Event):
    """Restarted ranks resume from the snapshot that the previous ranks left in memory."""

    step: int
    num_files: int
    size_bytes: int

    def _sentence(self) -> str:
        return (
            f"resuming from step {self.step}: the snapshot in memory, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)}"
        )


class SetAside(Event):
    """Checkpoints that this run does not continue were moved aside."""

    num_checkpoints: int
    path: str

    def _sentence(self) -> str:
        return f"{plural(self.num_checkpoints, 'checkpoint')} moved to {self.path}; nothing is deleted"


class BatchKept(Event):
    """The number of ranks changed. Gradient accumulation was adapted: a step still has the same number of samples."""

    world_size_before: int
    world_size: int
    accumulation_before: int
    accumulation: int
    global_batch: int

    def _sentence(self) -> str:
        return (
            f"{self.world_size_before} → {plural(self.world_size, 'rank')}: gradient accumulation "
            f"{self.accumulation_before} → {self.accumulation} keeps {self.global_batch} samples per step"
        )


class SignalReceived(Event, is_quiet=True, cause="signal"):
    """A launcher or a rank received a signal. A signal that a launcher passes on to its ranks is reported once."""

    signal: str
    rank: int | None

    def _sentence(self) -> str:
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        return f"{who} received {self.signal}"


class DeadlineChoice(Event, is_quiet=True):
    """What the ranks do with the running step after a stop request, and why.

    `choice` is `finish_step`, `give_up_step` or `commit_snapshot`. `needed_s` is the time that the running step and
    its save are expected to take, `available_s` the time that is left, and `commit_s` the time that the commit of the
    newest snapshot would take.
    """

    choice: str
    step: int
    needed_s: float
    available_s: float
    snapshot_step: int | None
    commit_s: float | None

    def _sentence(self) -> str:
        does = {
            "finish_step": "is finished and saved",
            "give_up_step": "is given up, and the previous one is saved",
            "commit_snapshot": f"is given up, and the snapshot of step {self.snapshot_step} is committed",
        }.get(self.choice, self.choice)
        return f"step {self.step} {does}: {self.needed_s:.1f} s are needed, {self.available_s:.1f} s are left"


class Repartitioned(Event):
    """A ZeRO checkpoint was copied into a layout that another number of ranks, or another ZeRO stage, can load."""

    step: int
    stage_before: str
    stage: int
    world_size_before: int
    world_size: int
    num_weights: int
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        before = f"ZeRO-{self.stage_before} on {plural(self.world_size_before, 'rank')}"
        rate = format_bytes(round(self.size_bytes / max(self.duration_s, 1e-3)))
        return (
            f"step {self.step}, {before} → ZeRO-{self.stage} on {plural(self.world_size, 'rank')}: "
            f"{plural(self.num_weights, 'weight')} and their optimizer state, {format_bytes(self.size_bytes)}, "
            f"copied into DeepSpeed's universal layout in {format_duration(self.duration_s)}, {rate}/s"
        )


class StopRequested(Event, cause="signal"):
    """All ranks agreed to stop at `step`, because at least one of them received a signal."""

    signal: str
    rank: int
    step: int

    def _sentence(self) -> str:
        return f"{self.signal} on rank {self.rank}: all ranks stop at step {self.step}"


class StepGivenUp(Event):
    """The rest of the running step would have missed the deadline; the previous step is saved instead."""

    step: int
    micro_batches_left: int
    needed_s: float
    available_s: float

    def _sentence(self) -> str:
        return (
            f"step {self.step} given up with {plural(self.micro_batches_left, 'micro-batch')} to go: it needs about "
            f"{format_duration(self.needed_s)}, {format_duration(max(self.available_s, 0))} are left"
        )


class SnapshotTaken(Event, is_quiet=True, cause="trigger"):
    """The state of a step is in memory, or is being copied there.

    `is_wanted` says whether the snapshot is to become a checkpoint. Snapshots that are not to become checkpoints are
    reported at most every ten seconds. `count` is the number of snapshots since the previous report, including this
    snapshot.
    """

    step: int
    trigger: str
    is_wanted: bool
    stall_s: float
    size_bytes: int
    count: int

    def _sentence(self) -> str:
        return (
            f"snapshot of step {self.step} ({self.trigger}): {format_bytes(self.size_bytes)} on the first rank, "
            f"training waited {format_duration(self.stall_s)}"
        )


class Saved(Event, cause="trigger"):
    """A checkpoint is committed."""

    step: int
    trigger: str
    path: str
    num_files: int
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return (
            f"saved step {self.step} ({self.trigger}): {self.path}, {plural(self.num_files, 'file')}, "
            f"{format_bytes(self.size_bytes)} in {format_duration(self.duration_s)}"
        )


class SaveSuperseded(Event, is_warning=True, cause="trigger"):
    """A snapshot was waiting to be written, and a newer snapshot replaced it."""

    step: int
    trigger: str
    by: int

    def _sentence(self) -> str:
        return f"step {self.step} ({self.trigger}) was not written, because the newer step {self.by} replaced it"


class SaveFailed(Event, is_warning=True, cause="reason"):
    """A save failed. `consequence` says what happens now."""

    step: int
    trigger: str
    reason: str
    consequence: str

    def _sentence(self) -> str:
        return f"step {self.step} ({self.trigger}) could not be saved: {self.reason}; {self.consequence}"


class Resealed(Event):
    """A callback added files to a committed checkpoint; a new manifest names them."""

    step: int
    files: tuple[str, ...]

    def _sentence(self) -> str:
        return f"a callback added {', '.join(self.files)} to checkpoint {self.step}; its manifest lists them now"


class Pruned(Event, cause="reason"):
    """Retention removed a checkpoint."""

    step: int
    path: str
    reason: str = "retention"

    def _sentence(self) -> str:
        return f"pruned {self.path}"


class PruneFailed(Event, is_warning=True, cause="reason"):
    """A checkpoint that no policy keeps was not deleted; `step` is None if the checkpoints could not be listed."""

    step: int | None
    path: str
    reason: str

    def _sentence(self) -> str:
        did = "it stays, and later saves try again; to free its space, fix its owner or attributes, or delete it"
        did = "no checkpoint was deleted" if self.step is None else did
        return f"{self.path} could not be pruned: {self.reason}; {did}"


class Failed(Event, is_quiet=True, cause="reason"):
    """The training failed on a node.

    `rank` is the rank whose failure ended the other ranks; None if no rank failed. `error` is the script's exception.
    If the ranks restart after the failure, `exit_code` is the code of the rank, or the negative number of the signal
    that killed the rank. At the end of the run, `exit_code` is the exit code of `safepoint run`,
    or of the program if there is no launcher.
    """

    rank: int | None
    exit_code: int
    reason: str
    error: str = ""

    def _sentence(self) -> str:
        return f"failed with exit code {self.exit_code}: {self.reason}" + (f" ({self.error})" if self.error else "")


class Restarted(Event, is_warning=True, cause="reason"):
    """A rank failed, and the ranks were restarted."""

    restart: int
    max_restarts: int
    reason: str

    def _sentence(self) -> str:
        return f"{self.reason}; restarting the ranks ({self.restart} of {plural(self.max_restarts, 'restart')})"


class StepAbandoned(Event, is_warning=True, cause="reason"):
    """A step would have missed the deadline. `snapshot_step` is the snapshot that was committed instead, or None."""

    step: int
    snapshot_step: int | None
    reason: str

    def _sentence(self) -> str:
        step = self.snapshot_step
        instead = "no snapshot was committed" if step is None else f"step {step} is committed"
        return f"step {self.step} is given up: {self.reason}; {instead}"


class Interrupted(Event, cause="reason"):
    """The run ended after a stop request, with or without a checkpoint of the last step."""

    step: int
    saved: bool
    reason: str

    def _sentence(self) -> str:
        if self.saved:
            return f"interrupted, state of step {self.step} is saved; run the same command again to continue"
        return f"interrupted at step {self.step}, not saved: {self.reason}"


class Finished(Event):
    """Training reached its end."""

    step: int

    def _sentence(self) -> str:
        return f"training finished at step {self.step}"


class FinalMissing(Event, is_warning=True):
    """The finished model is not in the object store. If `checkpoint` is set, that checkpoint has the same weights."""

    step: int
    location: str
    reason: str
    checkpoint: str | None

    def _sentence(self) -> str:
        again = "run the same command again"
        if self.checkpoint is not None:
            export = f"safepoint checkpoints export {self.checkpoint} {self.location}"
            again = f"create the model with `{export}`, or {again}"
        return f"the final model is not in {self.location}: {self.reason}; step {self.step} is saved; {again}"
