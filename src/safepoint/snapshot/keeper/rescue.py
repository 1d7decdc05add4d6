"""What is made durable when ranks are gone, or must go: the newest snapshot that is complete, on every node."""

import threading

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.snapshot.keeper.ledger import Progress, Snapshot
from safepoint.snapshot.keeper.persist.snapshot_commit import Facts
from safepoint.snapshot.keeper.rank_starts import OTHERS_S, Start
from safepoint.snapshot.keeper.shared_state import SharedState

_LOOK_EVERY_S = 0.5
_COPYING_S = 2.0
"""How long a copy into memory may still take when time is short."""


def rescue(kept: SharedState, start: Start) -> Snapshot | None:
    """With `Kept.changed` held: have the newest complete snapshot made durable, of several nodes the newest of all.

    Returns:
        The snapshot, where it is known at once.
    """
    facts = start.facts
    if facts is not None and facts.num_nodes > 1:
        if not start.is_rescuing and not start.is_rescued:
            start.is_rescuing = True
            threading.Thread(target=_rescue_with_others, args=[kept, start, facts], daemon=True).start()
        return None
    newest = start.ledger.newest_complete
    if newest is not None and newest.progress != Progress.DURABLE and newest.facts:
        start.ledger.want(newest.step, Trigger.FAILURE)
    return newest


def rescue_newer(kept: SharedState, start: Start, step: int) -> None:
    """Likewise, for ranks that have failed: rescue again, where one newer than `step` waits to be written."""
    newest = start.ledger.newest_complete
    if newest is not None and newest.step > step and newest.progress == Progress.WAITING:
        rescue(kept, start)


def watch_others(kept: SharedState, start: Start, facts: Facts) -> None:
    """On a thread: notice that another node's ranks are gone, when this one's do not notice it themselves."""
    while not start.is_over and not start.is_rescued:
        if facts.nodes.is_called():
            with kept.changed:
                rescue(kept, start)
            return
        clock.sleep(_LOOK_EVERY_S)


def leave_with_newest(kept: SharedState, start: Start, given_up: int, why: str) -> None:
    """On a thread: make the newest complete snapshot durable, then tell every rank to leave with it.

    Args:
        kept: what is kept.
        start: the ranks.
        given_up: the step that they leave unfinished.
        why: the reason, for people.
    """
    with kept.changed:
        ledger = start.ledger
        # One that is just being copied is the better one, and there in a moment.
        kept.changed.wait_for(lambda: all(one.is_complete for one in ledger.snapshots), _COPYING_S)
        newest = rescue(kept, start)
        if start.is_rescuing or start.is_rescued:
            kept.changed.wait_for(lambda: start.is_rescued)
            newest = ledger.find(start.rescued_step) if start.rescued_step is not None else None
        if newest is not None:
            kept.settle(start)
            kept.changed.wait_for(
                lambda: (
                    newest.progress in {Progress.DURABLE, Progress.FAILED} or ledger.find(newest.step) is not newest
                )
            )
        step = newest.step if newest is not None and newest.progress == Progress.DURABLE else None
        for rank in start.ranks.values():
            rank.tell({"type": "leave", "step": step, "given_up": given_up, "why": why})


def _rescue_with_others(kept: SharedState, start: Start, facts: Facts) -> None:
    step: int | None = None
    try:
        with kept.changed:
            # Ranks that are still there may be about to end a copy; their peers are gone, and so are they soon.
            kept.changed.wait_for(lambda: start.is_over, OTHERS_S / 3 if start.has_failed else 0)
            steps = [one.step for one in start.ledger.snapshots if one.is_complete]
            start.failed_s = start.failed_s or clock.monotonic_s()
        facts.nodes.offer(steps)
        step = facts.nodes.newest_of_all(start.is_hopeless)
    except OSError as error:
        kept.reporting.log.warning("the newest snapshot of all nodes cannot be found: %s", error)
    finally:
        with kept.changed:
            snapshot = start.ledger.find(step) if step is not None else None
            if snapshot is not None and snapshot.progress != Progress.DURABLE:
                start.ledger.want(snapshot.step, Trigger.FAILURE)
            start.rescued_step = step
            start.is_rescuing, start.is_rescued = False, True
            kept.settle(start)
