"""How the ranks of an attempt begin together: one folder, one checkpoint, one attempt number.

The first rank claims the output folder, cleans up after dead runs, picks and verifies the checkpoint; the
others take its answer, or its refusal.
"""

import os
import uuid
from dataclasses import dataclass

from holdfast import errors
from holdfast.checkpoint.commit import OutputFolder
from holdfast.errors import HoldfastError, StorageError
from holdfast.foundation import clock
from holdfast.foundation.console import ProgressLine
from holdfast.foundation.environment import host_name
from holdfast.training.peers import Peers
from holdfast.training.resume import ResumePoint, choose
from holdfast.training.session import Session

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


def agree_on_start(session: Session, peers: Peers, output: OutputFolder) -> Start:
    """Decide on the first rank, and tell everybody.

    Raises:
        HoldfastError: the first rank's refusal, the same on every rank.
        StorageError: this node does not see the first rank's folder.
    """
    answer: Start | _Refusal | None = None
    if session.place.is_first:
        try:
            answer = _decide(session, output)
        except HoldfastError as error:
            answer = _Refusal(kind=type(error).__name__, message=error.message, hint=error.hint)
        except OSError as error:
            message = f"the output folder {output.root} cannot be used: {error}; training was not started"
            answer = _Refusal(kind=StorageError.__name__, message=message, hint=None)
    answer = peers.from_first(answer)
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


def _decide(session: Session, output: OutputFolder) -> Start:
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
    progress = ProgressLine("verifying")
    point = choose(
        output,
        settings,
        restart=session.place.restart,
        report=session.report,
        progress=progress.update,
    )
    run_id = point.manifest.run_id if point else uuid.uuid4().hex
    attempt = output.next_attempt(run_id, after=point.manifest.attempt if point else 0)
    attempt_id = f"{run_id[:8]}-{attempt}-{uuid.uuid4().hex[:8]}"
    output.open_attempt(attempt_id)
    return Start(point=point, run_id=run_id, attempt=attempt, attempt_id=attempt_id)


__all__ = ["Start", "agree_on_start"]
