"""Makes the newest complete snapshot durable, on every node, when ranks have failed or must end.

This is the work of the keeper, the process of each node that writes snapshots to disk.
"""

import threading

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.snapshot.keeper.keeper_state import OTHER_NODES_S, KeeperState, RankGroup
from safepoint.snapshot.keeper.persist.snapshot_commit import nodes_of
from safepoint.snapshot.keeper.snapshot_registry import Progress, Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts, Leave

_LOOK_EVERY_S = 0.5
_COPYING_S = 2.0
"""How long to wait for a copy into memory when ranks must end."""


def rescue(state: KeeperState, group: RankGroup) -> Snapshot | None:
    """Request a checkpoint of the newest complete snapshot that all nodes have. The caller holds `state.changed`.

    Returns:
        The snapshot; None if no snapshot is complete. With several nodes, the result is always None: a thread first
        agrees with the other keepers on a snapshot, and then makes the request.
    """
    facts = next((one.facts for one in group.registry.snapshots if one.facts is not None), None)
    if facts is not None and facts.num_nodes > 1:
        if not group.is_rescuing and not group.is_rescued:
            try:
                threading.Thread(target=_rescue_with_others, args=[state, group, facts], daemon=True).start()
                group.is_rescuing = True
            except RuntimeError as error:  # no thread can be started now
                group.is_rescued = True  # otherwise this process would wait for the thread, and never end
                state.reporter.log.warning("the snapshots in memory are not saved: %s", error)
        return None
    newest = group.registry.newest_complete
    if newest is not None and newest.progress != Progress.DURABLE and newest.facts is not None:
        group.registry.request(newest.step, Trigger.FAILURE)
    return newest


def rescue_newer(state: KeeperState, group: RankGroup, step: int) -> None:
    """Rescue again if a snapshot newer than `step` is complete and not yet written."""
    newest = group.registry.newest_complete
    if newest is not None and newest.step > step and newest.progress == Progress.WAITING:
        rescue(state, group)


def watch_others(state: KeeperState, group: RankGroup, facts: CheckpointFacts) -> None:
    """On a thread: rescue when ranks of another node have failed or must end. The ranks of this node may not notice
    that."""
    while not group.is_over and not group.is_rescued:
        if nodes_of(facts).is_called():
            with state.changed:
                rescue(state, group)
            return
        clock.sleep(_LOOK_EVERY_S)


def leave_with_newest(state: KeeperState, group: RankGroup, abandoned_step: int, reason: str) -> None:
    """On a thread: make the newest complete snapshot durable, then send `Leave` to every rank.

    Args:
        state: the state of the keeper.
        group: the ranks that must end.
        abandoned_step: the step that the ranks do not finish.
        reason: why the ranks must end, for people.
    """
    with state.changed:
        registry = group.registry
        # A snapshot that ranks are still copying is the newest one, and will be complete in a moment.
        state.changed.wait_for(lambda: all(one.is_complete for one in registry.snapshots), _COPYING_S)
        newest = rescue(state, group)
        if group.is_rescuing or group.is_rescued:
            state.changed.wait_for(lambda: group.is_rescued)
            newest = registry.find(group.rescued_step) if group.rescued_step is not None else None
        if newest is not None:
            state.notify(group)
            state.changed.wait_for(lambda: not newest.is_open or registry.find(newest.step) is not newest)
        step = newest.step if newest is not None and newest.progress == Progress.DURABLE else None
        for rank in group.ranks.values():
            rank.send(Leave(step=step, abandoned_step=abandoned_step, reason=reason))


def _rescue_with_others(state: KeeperState, group: RankGroup, facts: CheckpointFacts) -> None:
    step: int | None = None
    nodes = nodes_of(facts)
    try:
        with state.changed:
            # Ranks that are still connected may complete a copy. They end soon, because other ranks have failed.
            state.changed.wait_for(lambda: group.is_over, OTHER_NODES_S / 3 if group.has_failed else 0)
            steps = [one.step for one in group.registry.snapshots if one.is_complete]
            group.failed_s = group.failed_s or clock.monotonic_s()
        nodes.offer(steps)
        step = nodes.newest_of_all(group.has_waited_enough)
    except OSError as error:
        state.reporter.log.warning(
            "the nodes cannot agree on the newest step of which every node has a snapshot: %s", error
        )
    finally:
        with state.changed:
            snapshot = group.registry.find(step) if step is not None else None
            if snapshot is not None and snapshot.progress != Progress.DURABLE:
                group.registry.request(snapshot.step, Trigger.FAILURE)
            group.rescued_step = step
            group.is_rescuing, group.is_rescued = False, True
            state.notify(group)
