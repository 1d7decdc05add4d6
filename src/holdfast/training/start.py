"""How the ranks of an attempt begin together: one folder, one checkpoint, one attempt number.

The first rank claims the output folder, cleans up after dead runs, picks and verifies the checkpoint; the
others take its answer, or its refusal.
"""

import os
import uuid
from dataclasses import dataclass

from holdfast import errors
from holdfast.checkpoint.catalog import step_of
from holdfast.checkpoint.commit import OutputFolder
from holdfast.checkpoint.mover_process import MoverPlan
from holdfast.checkpoint.remote import Claim, RemoteFolder
from holdfast.errors import ConflictError, HoldfastError, StorageError
from holdfast.foundation import clock
from holdfast.foundation.console import ProgressLine
from holdfast.foundation.environment import host_name
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
    if fetching is not None:
        _check_goes_on(session, fetching.remote)
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
    held = fetching.remote.claimed_by() if fetching else None
    if held is not None and held.run_id == run_id:
        after = max(after, held.attempt)
    attempt = output.next_attempt(run_id, after=after)
    attempt_id = f"{run_id[:8]}-{attempt}-{uuid.uuid4().hex[:8]}"
    output.open_attempt(attempt_id)
    if fetching is not None:
        claim = Claim(run_id=run_id, attempt=attempt, attempt_id=attempt_id, since=clock.utc_now(), host=host_name())
        _claim(session, output, fetching.remote, claim)
    return Start(point=point, run_id=run_id, attempt=attempt, attempt_id=attempt_id)


def _check_goes_on(session: Session, remote: RemoteFolder) -> None:
    """In a bucket nothing can be moved aside, so a run that does not go on from its newest needs another place."""
    settings = session.settings
    if settings.resume == "auto" and not settings.from_scratch:
        return
    steps = remote.steps() if session.place.restart == 0 else []
    if steps:
        asked = "--from-scratch" if settings.from_scratch else f"--resume {settings.resume}"
        raise ConflictError(
            f"{remote.store.location} holds checkpoints up to step {steps[0]}, and {asked} would not go on from "
            "them; training was not started and nothing was changed",
            hint="name another location, or delete them with `holdfast checkpoints prune`",
        )


def _claim(session: Session, output: OutputFolder, remote: RemoteFolder, claim: Claim) -> None:
    settings = session.settings
    if session.uploads is not None:  # of an earlier training of this script
        session.finish_uploads(newest_only=False)
    remote.claim(claim)
    steps = [step_of(path) or 0 for path in output.committed()]
    num_deleted = remote.clean(keep_steps=steps)
    if num_deleted:
        session.log.info("deleted %s unfinished object(s) of dead runs in %s", num_deleted, remote.store.location)
    plan = MoverPlan(
        folder=str(output.root.absolute()),
        location=str(remote.store.location),
        attempt_id=claim.attempt_id,
        keep=settings.store_keep,
        grace_s=settings.grace_s - settings.margin_s,
        verbosity=settings.verbosity,
    )
    session.uploads = Uploads(plan)


__all__ = ["Start", "agree_on_start"]
