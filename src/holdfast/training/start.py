"""How the ranks of an attempt begin together: one folder, one checkpoint, one attempt number.

The first rank claims the output folder, cleans up after dead runs, picks and verifies the checkpoint; the
others take its answer, or its refusal.
"""

import os
import uuid
from dataclasses import dataclass

from holdfast import errors
from holdfast.checkpoint.commit import OutputFolder
from holdfast.checkpoint.final import final_folder
from holdfast.checkpoint.manifest import Trigger
from holdfast.checkpoint.mover_process import MoverPlan
from holdfast.checkpoint.remote import Claim, RemoteFolder
from holdfast.errors import ConflictError, HoldfastError, StorageError
from holdfast.foundation import clock
from holdfast.foundation.console import ProgressLine
from holdfast.foundation.environment import host_name
from holdfast.foundation.files import delete_tree, write_atomic
from holdfast.storage.location import Location
from holdfast.training.fetching import Fetching, FetchOrder
from holdfast.training.peers import Peers
from holdfast.training.resume import ResumePoint, choose
from holdfast.training.session import Session
from holdfast.training.uploads import Uploads

_SHARED_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What all ranks agree on before the first step.

    Args:
        point: the checkpoint to go on from, or None for step 0.
        run_id: the run, the same over all its attempts.
        attempt: which start of the run this is, from 1.
        attempt_id: names this attempt's working folders.
    """

    point: ResumePoint | None
    run_id: str
    attempt: int
    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    kind: str
    message: str
    hint: str | None


def agree_on_start(session: Session, peers: Peers, output: OutputFolder, location: Location | None = None) -> Start:
    """Decide on the first rank, and tell everybody.

    Args:
        session: this rank.
        peers: all ranks.
        output: the folder that all ranks see.
        location: the object store behind it, or None.

    Raises:
        HoldfastError: the first rank's refusal, the same on every rank.
        StorageError: this node does not see the first rank's folder.
    """
    answer: Start | _Refusal | FetchOrder | None = None
    fetching = None if location is None else Fetching(session, peers, output, location)
    if session.place.is_first:
        try:
            answer = _decide(session, output, fetching)
        except HoldfastError as error:
            answer = _Refusal(kind=type(error).__name__, message=error.message, hint=error.hint)
        except OSError as error:
            message = f"the output folder {output.root} cannot be used: {error}; training was not started"
            answer = _Refusal(kind=StorageError.__name__, message=message, hint=None)
    answer = peers.from_first(answer)
    while isinstance(answer, FetchOrder):
        assert fetching is not None
        fetching.serve(answer)
        answer = peers.from_first(None)
    if isinstance(answer, _Refusal):
        raise getattr(errors, answer.kind)(answer.message, hint=answer.hint)
    assert answer is not None
    shared = peers.gather(output.sees_attempt(answer.attempt_id, wait_s=_SHARED_WITHIN_S))
    if not all(shared):
        blind = ", ".join(str(rank) for rank, sees in enumerate(shared) if not sees)
        raise StorageError(
            f"rank(s) {blind} do not see the output folder {output.root} of rank 0; training was not started",
            hint="all nodes need one shared folder, at the same path",
        )
    return answer


def _decide(session: Session, output: OutputFolder, fetching: Fetching | None) -> Start:
    settings = session.settings
    output.prepare()
    session.write_events_to(output.events)
    owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
    has_locks = output.claim(
        owner,
        wait_s=settings.grace_s,
        waiting=lambda who: session.log.info("waiting for an earlier run to leave %s (%s)", output.root, who),
    )
    if has_locks:
        output.clean()
    else:
        session.log.warning(
            "the file system of %s has no locks: nothing left by dead runs is cleaned up, and two runs on it "
            "would not notice each other",
            output.root,
        )
    claiming = None if fetching is None else _Claiming(session, output, fetching.remote)
    if claiming is not None:
        claiming.begin()
    progress = ProgressLine("verifying")
    point = choose(
        output,
        settings,
        restart=session.place.restart,
        report=session.report,
        progress=progress.update,
        elsewhere=fetching.newer_than if fetching else None,
    )
    run_id = point.manifest.run_id if point else uuid.uuid4().hex
    after = point.manifest.attempt if point else 0
    if claiming is not None:
        after = max(after, claiming.last_attempt_of(run_id))
    attempt = output.next_attempt(run_id, after=after)
    attempt_id = f"{run_id[:8]}-{attempt}-{uuid.uuid4().hex[:8]}"
    output.open_attempt(attempt_id)
    if claiming is not None:
        claiming.complete(run_id, attempt, attempt_id, point)
    return Start(point=point, run_id=run_id, attempt=attempt, attempt_id=attempt_id)


class _Claiming:
    """Becoming the one who may write to the object store.

    The location is claimed before a checkpoint is chosen, so that no earlier attempt adds or deletes one meanwhile,
    and once more when run and attempt are known.
    """

    def __init__(self, session: Session, output: OutputFolder, remote: RemoteFolder) -> None:
        self._session = session
        self._output = output
        self._remote = remote
        self._before: Claim | None = None

    def begin(self) -> None:
        """Take the location, where the settings go on from what it holds.

        Raises:
            ConflictError: they do not, the folder belongs to another location, or another start was first.
        """
        _check_goes_on(self._session, self._remote)
        _check_belongs(self._output, self._remote.store.location)
        if self._session.uploads is not None:  # of an earlier training of this script
            self._session.finish_uploads(newest_only=False)
        delete_tree(final_folder(self._output))  # of an earlier training too
        self._before = self._remote.claimed_by()
        run_id = self._before.run_id if self._before else uuid.uuid4().hex
        self._claim(run_id, self.last_attempt_of(run_id) + 1, f"{run_id[:8]}-starting-{uuid.uuid4().hex[:8]}")

    def last_attempt_of(self, run_id: str) -> int:
        """The attempt of this run that held the location before, or 0."""
        return self._before.attempt if self._before is not None and self._before.run_id == run_id else 0

    def complete(self, run_id: str, attempt: int, attempt_id: str, point: ResumePoint | None) -> None:
        """Clean up after dead attempts and start the mover."""
        session, remote, settings = self._session, self._remote, self._session.settings
        self._claim(run_id, attempt, attempt_id)
        in_store = remote.steps()
        # What the mover will not take up again is not kept either: it is superseded.
        keep = [
            path.name
            for index, (path, manifest) in enumerate(self._output.manifests())
            if manifest.step not in in_store and (index == 0 or manifest.trigger != Trigger.PERIODIC)
        ]
        num_deleted = remote.clean(keep=keep)
        if num_deleted:
            location = remote.store.location
            session.log.info("deleted %s unfinished object(s) of dead runs in %s", num_deleted, location)
        from_step = point.manifest.step if point else -1
        plan = MoverPlan(
            folder=str(self._output.root.absolute()),
            location=str(remote.store.location),
            attempt_id=attempt_id,
            keep=settings.store_keep,
            passed_over=tuple(step for step in in_store if step > from_step),
            grace_s=settings.grace_s - settings.margin_s,
            verbosity=settings.verbosity,
        )
        session.uploads = Uploads(plan)

    def _claim(self, run_id: str, attempt: int, attempt_id: str) -> None:
        now, host = clock.utc_now(), host_name()
        self._remote.claim(Claim(run_id=run_id, attempt=attempt, attempt_id=attempt_id, since=now, host=host))


def _check_belongs(output: OutputFolder, location: Location) -> None:
    """A folder in front of one location must not bring its checkpoints to another."""
    note = output.control / "location"
    try:
        noted = note.read_text(encoding="utf-8")
    except OSError:
        noted = ""
    if noted and noted != str(location) and output.committed():
        raise ConflictError(
            f"the folder {output.root} holds the checkpoints of {noted}, not of {location}; training was not "
            "started and nothing was changed",
            hint="name another folder with --local-dir, or copy them with `holdfast checkpoints copy`",
        )
    write_atomic(note, str(location).encode(), durable=False)


def _check_goes_on(session: Session, remote: RemoteFolder) -> None:
    """In a bucket nothing can be moved aside, so a run that does not go on from its newest needs another place."""
    settings = session.settings
    if settings.resume == "auto" and not settings.from_scratch:
        return
    steps = remote.steps() + remote.foreign_steps() if session.place.restart == 0 else []
    if steps:
        asked = "--from-scratch" if settings.from_scratch else f"--resume {settings.resume}"
        raise ConflictError(
            f"{remote.store.location} holds checkpoints up to step {max(steps)}, and {asked} would not go on from "
            "them; training was not started and nothing was changed",
            hint="name another location, or delete them with `holdfast checkpoints prune`",
        )


__all__ = ["Start", "agree_on_start"]
