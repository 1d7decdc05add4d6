"""Retention: the policies that say which checkpoints to keep, and pruning, which deletes the others.

Pruning is the same in a folder and in an object store. The policies are pure functions.

A checkpoint stays if any policy keeps it. If no policy sets a limit, all stay; `younger=` sets no limit. These always
stay: the newest checkpoint, the newest valid checkpoint, checkpoints that a later release wrote, and checkpoints that
the caller protects. In a folder, checkpoints that a process reads or uploads also stay. In an object store, it is not
known whether a process reads a checkpoint. A checkpoint that is known to be damaged is not deleted. It does not count
in the N of a policy.

These rules apply to each run separately: newer or better checkpoints of another run at the same location
do not cause the deletion of a checkpoint. A run deletes only its own checkpoints.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from safepoint.errors import AccessDeniedError
from safepoint.foundation import clock
from safepoint.foundation.quantities import parse_duration, parse_whole

if TYPE_CHECKING:  # every command imports this module, and few need manifests or events
    from safepoint.foundation.events.stream import Event


_reported: dict[str, str] = {}
"""The checkpoints that this process has reported as not deleted, with reasons. Only `delete_one` changes it."""
_FORMS = "newest=N, every=STEPS, best=N:METRIC[:max], younger=2h (s, m, h, d), separated by commas"


class _Stated(Protocol):
    """The part of a manifest that policies use."""

    @property
    def run_id(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def created(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The properties of a committed checkpoint that policies use.

    Args:
        step: optimizer steps done.
        run_id: the run that it belongs to.
        created_s: when it was made, seconds since 1970; infinite when unknown.
        metrics: what was measured at its step.
        is_valid: False when it is known to be damaged.
        is_in_use: whether a process reads or uploads it.
    """

    step: int
    run_id: str = ""
    created_s: float = float("inf")
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    is_valid: bool = True
    is_in_use: bool = False

    @classmethod
    def of(cls, manifest: "_Stated", policies: "Sequence[Policy] | None" = None) -> "Candidate":
        """Make a candidate from a checkpoint's manifest.

        Args:
            manifest: the manifest of the checkpoint.
            policies: if given, the candidate keeps only the metrics that these policies use. This saves memory,
                because there can be any number of manifests, and each can have any number of metrics.
        """
        metrics = manifest.metrics
        if policies is not None:
            used = {policy.metric for policy in policies if isinstance(policy, KeepBest)}
            metrics = {name: metrics[name] for name in used if name in metrics}
        created_s = clock.parse_utc_or_inf(manifest.created)
        return cls(step=manifest.step, run_id=manifest.run_id, created_s=created_s, metrics=metrics)


class Policy(Protocol):
    """Chooses the checkpoints to keep."""

    is_limit: ClassVar[bool] = True
    """Whether the policy limits what is kept. If no policy of a run is a limit, all checkpoints stay."""

    def keeps(self, candidates: Sequence[Candidate], *, now_s: float, protected: Collection[int]) -> set[int]:
        """The steps to keep. `candidates` are sorted, newest first. The caller always keeps the `protected` steps."""
        ...


@dataclass(frozen=True, slots=True)
class KeepNewest(Policy):
    """The newest checkpoints. The number `count` includes the protected checkpoints, as in the Trainer."""

    count: int

    def keeps(self, candidates: Sequence[Candidate], *, now_s: float, protected: Collection[int]) -> set[int]:
        """See `Policy`."""
        steps = [candidate.step for candidate in candidates]
        kept = set(steps[:1]) | (set(protected) & set(steps))
        others = [step for step in steps if step not in kept]
        return kept | set(others[: max(0, self.count - len(kept))])


@dataclass(frozen=True, slots=True)
class KeepEvery(Policy):
    """The checkpoints whose step is a multiple of `steps`, as a history of the run."""

    steps: int

    def keeps(self, candidates: Sequence[Candidate], *, now_s: float, protected: Collection[int]) -> set[int]:
        """See `Policy`."""
        return {candidate.step for candidate in candidates if candidate.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """The `count` checkpoints with the best values of `metric`. Of two equal values, the newer one is better."""

    count: int
    metric: str
    larger_is_better: bool = False

    def keeps(self, candidates: Sequence[Candidate], *, now_s: float, protected: Collection[int]) -> set[int]:
        """See `Policy`."""
        sign = -1.0 if self.larger_is_better else 1.0
        measured = [candidate for candidate in candidates if self.metric in candidate.metrics]
        measured.sort(key=lambda candidate: (sign * candidate.metrics[self.metric], -candidate.step))
        return {candidate.step for candidate in measured[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepYounger(Policy):
    """The checkpoints younger than `seconds`. This policy alone does not limit what is kept (`is_limit`)."""

    seconds: float
    is_limit: ClassVar[bool] = False

    def keeps(self, candidates: Sequence[Candidate], *, now_s: float, protected: Collection[int]) -> set[int]:
        """See `Policy`."""
        return {candidate.step for candidate in candidates if now_s - candidate.created_s < self.seconds}


def select_superseded(
    candidates: Sequence[Candidate],
    policies: Sequence[Policy],
    *,
    now_s: float,
    protected: Collection[int] = (),
    is_good: Callable[[int], bool] = lambda step: True,
    run_id: str | None = None,
) -> list[int]:
    """Choose the steps that no policy keeps, oldest first.

    Args:
        candidates: the committed checkpoints, in any order. The policies are applied to each run separately.
        policies: which checkpoints to keep; if no policy is a limit, all stay.
        now_s: the current time in seconds since 1970, by the clock that wrote `created_s`.
        protected: steps that are never chosen, such as the step of the best model so far.
        is_good: checks the files of a checkpoint. If steps of a run would be deleted, `is_good` is called for the
            valid checkpoints of the run, newest first, until `is_good` returns True. That checkpoint is kept. If
            `is_good` never returns True, all checkpoints of the run are kept.
        run_id: choose only steps of this run; None for all runs.
    """
    if not any(policy.is_limit for policy in policies):
        return []
    runs: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if run_id in {None, candidate.run_id}:
            runs.setdefault(candidate.run_id, []).append(candidate)
    return sorted(
        step for of_run in runs.values() for step in _superseded_in_run(of_run, policies, now_s, protected, is_good)
    )


def _superseded_in_run(
    candidates: Sequence[Candidate],
    policies: Sequence[Policy],
    now_s: float,
    protected: Collection[int],
    is_good: Callable[[int], bool],
) -> list[int]:
    newest_first = sorted(candidates, key=lambda candidate: -candidate.step)
    kept = {candidate.step for candidate in newest_first if candidate.is_in_use} | set(protected)
    kept |= {candidate.step for candidate in newest_first[:1]}
    valid = [candidate for candidate in newest_first if candidate.is_valid]
    for policy in policies:
        kept |= policy.keeps(valid, now_s=now_s, protected=protected)
    doomed = [candidate.step for candidate in reversed(valid) if candidate.step not in kept]
    if not doomed:
        return []
    last_good = next((candidate.step for candidate in valid if is_good(candidate.step)), None)
    return [] if last_good is None else [step for step in doomed if step != last_good]


def parse_policies(text: str | None, limit: int | None = None) -> tuple[Policy, ...]:
    """Read `newest=2,every=1000,best=3:eval_loss,younger=2h`; None and an empty string mean no policy.

    Args:
        text: the policies.
        limit: adds `newest=<limit>`; None, 0 and negative numbers add nothing, as in the Trainer.

    Raises:
        ValueError: the text is invalid.
    """
    readers: dict[str, Callable[[str], Policy]] = {
        "newest": lambda value: KeepNewest(_count(value)),
        "every": lambda value: KeepEvery(_count(value)),
        "best": _read_best,
        "younger": lambda value: KeepYounger(parse_duration(value)),
    }
    policies: list[Policy] = [KeepNewest(limit)] if limit is not None and limit > 0 else []
    for item in (text or "").split(","):
        name, _, value = item.strip().partition("=")
        if not name and not value:
            continue
        if name not in readers:
            raise ValueError(f"the policy {item.strip()!r} is unknown; use {_FORMS}")
        try:
            policies.append(readers[name](value))
        except ValueError as error:
            raise ValueError(f"the policy {item.strip()!r} is invalid ({error}); use {_FORMS}") from error
    return tuple(policies)


def _count(text: str) -> int:
    number = parse_whole(text.strip())
    if not number:
        raise ValueError("it needs a whole number of at least 1")
    return number


def _read_best(value: str) -> KeepBest:
    count, _, rest = value.partition(":")
    metric, _, order = rest.partition(":")
    if not metric or order not in {"", "min", "max"}:
        raise ValueError("it needs a metric, optionally followed by :min or :max")
    return KeepBest(_count(count), metric, larger_is_better=order == "max")


class CheckpointFolder(Protocol):
    """The checkpoints of a run, in a folder or in an object store."""

    def steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of the committed checkpoints, newest first; not verified."""
        ...

    def superseded(
        self,
        policies: Sequence[Policy],
        *,
        protected: Collection[int] = (),
        run_id: str | None = None,
        deadline_s: float | None = None,
    ) -> list[int]:
        """The steps that no policy keeps, oldest first; see `select_superseded`."""
        ...

    def delete(self, name: str, *, deadline_s: float | None = None) -> bool:
        """Delete the checkpoint called `name` so that readers see it whole or not at all.

        Returns:
            False if the checkpoint stays, because a process reads or uploads it, or because a later release wrote it.
        """
        ...

    def where(self, name: str) -> str:
        """The full path or location of the checkpoint, for messages."""
        ...


def prune(
    folder: CheckpointFolder,
    policies: Sequence[Policy],
    report: "Callable[[Event], None]",
    *,
    protected: Collection[int] = (),
    run_id: str | None = None,
    deadline_s: float | None = None,
) -> None:
    """Delete the checkpoints that no policy keeps, and report each deletion.

    A checkpoint that cannot be deleted stays, and the others are deleted. The next save tries again. The failure is
    reported as an event, once for each checkpoint and reason, because the reason is often permanent.

    Args:
        folder: holds the checkpoints: a folder or an object store.
        policies: which checkpoints to keep; if there are no policies, all are kept.
        report: receives the events.
        protected: steps that are never deleted.
        run_id: the run whose checkpoints to delete; None for all runs.
        deadline_s: when to give up on a store, by the monotonic clock. If None, only each request has a time limit.

    Raises:
        ConflictError: another attempt has claimed the store.
        StorageError: the store cannot be used.
    """
    from safepoint.checkpoint.format.catalog import checkpoint_name  # not at the top, because it imports manifests
    from safepoint.foundation.events.run_events import Pruned, PruneFailed

    try:
        steps = folder.superseded(policies, protected=protected, run_id=run_id, deadline_s=deadline_s)
    except OSError as error:
        report(PruneFailed(step=None, path=folder.where(""), reason=str(error)))
        return
    for step in steps:
        if delete_one(folder, step, report, deadline_s=deadline_s):
            report(Pruned(step=step, path=folder.where(checkpoint_name(step))))


def delete_one(
    folder: CheckpointFolder,
    step: int,
    report: "Callable[[Event], None]",
    *,
    deadline_s: float | None = None,
) -> bool:
    """Delete one checkpoint. If this fails, report the reason, as `prune` does.

    Args:
        folder: the checkpoints.
        step: the step of the checkpoint.
        report: receives the events.
        deadline_s: when to give up on a store, by the monotonic clock. If None, only each request has a time limit.

    Returns:
        Whether the checkpoint was deleted. Also False in the cases that `CheckpointFolder.delete` names.
    """
    from safepoint.checkpoint.format.catalog import checkpoint_name  # not at the top, because it imports manifests
    from safepoint.foundation.events.run_events import PruneFailed

    name = checkpoint_name(step)
    where = folder.where(name)
    try:
        is_deleted = folder.delete(name, deadline_s=deadline_s)
    except (OSError, AccessDeniedError) as error:
        # The text of an OSError also names a file in the trash. This file gets another name at each try. So the whole
        # text would be new at each try, and each try would be reported. `strerror` stays the same.
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if _reported.get(where) != why:
            _reported[where] = why
            report(PruneFailed(step=step, path=where, reason=why))
        return False
    _reported.pop(where, None)
    return is_deleted
