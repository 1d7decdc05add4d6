"""The thread of the keeper that turns snapshots into checkpoints, one after the other.

The keeper is the process of each node that writes snapshots to disk.
"""

import threading

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Saved, SaveFailed
from safepoint.snapshot.keeper.keeper_state import KeeperState, RankGroup
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError
from safepoint.snapshot.keeper.persist.snapshot_commit import commit_snapshot
from safepoint.snapshot.keeper.rescue import rescue_newer
from safepoint.snapshot.keeper.snapshot_registry import Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts, Outcome

_PATIENCE_S = 5.0
_USUAL_BYTES_PER_S = 300e6
_SMALL_BYTES = 64 << 20


def write_snapshots(state: KeeperState) -> None:
    """Write requested snapshots, as long as the process runs: the body of the thread."""
    while True:
        group, snapshot, facts = _take_next(state)
        try:
            outcome = _save(state, group, snapshot, facts)
        except Exception as error:  # the thread must continue, because only it writes snapshots
            state.reporter.log.exception("writing step %s failed", snapshot.step)
            outcome = Outcome(step=snapshot.step, error=f"{type(error).__name__}: {error}")
        with state.changed:
            state.is_writing = False
            is_current = group.registry.written(snapshot, is_durable=outcome.is_durable)
            # Notify ranks about free blocks before they receive the outcome: they may need a block at once.
            state.notify(group)
            if is_current:
                group.last_outcome = outcome
                group.send_outcome(outcome)
            if group.has_failed:
                rescue_newer(state, group, snapshot.step)
            state.notify(group)


def _take_next(state: KeeperState) -> tuple[RankGroup, Snapshot, CheckpointFacts]:
    """Wait for a snapshot to write, and record that it is being written. Return its ranks, the snapshot, and its
    facts."""
    with state.changed:
        state.changed.wait_for(lambda: state.next_to_write() is not None)
        found = state.next_to_write()
        assert found is not None
        group, snapshot, _ = found
        group.registry.writing(snapshot)
        state.is_writing = True
        # A small snapshot needs little processor time, but a thread at a low priority may wait long for this time.
        if state.is_urgent(group) or snapshot.num_bytes < _SMALL_BYTES:
            state.priority.restore()
        else:
            state.priority.lower()
        return found


def _save(state: KeeperState, group: RankGroup, snapshot: Snapshot, facts: CheckpointFacts) -> Outcome:
    """Write a snapshot and commit it as a checkpoint.

    Report `SaveFailed`, or on node 0 `Saved`. If the snapshot was given up, report nothing.
    """
    began_s = clock.monotonic_s()
    step, trigger = snapshot.step, snapshot.trigger
    try:
        manifest = _commit(state, group, snapshot)
    except GivenUpError as error:
        return Outcome(step=step, error=str(error))
    except (SafepointError, OSError, ValueError, TypeError) as error:
        consequence = "the snapshot stays in memory until the next one; earlier checkpoints remain"
        state.reporter.report(SaveFailed(step=step, trigger=trigger, reason=str(error), consequence=consequence))
        return Outcome(step=step, error=getattr(error, "strerror", None) or str(error))
    now_s = clock.monotonic_s()
    path = str(facts.output.root / checkpoint_name(step))
    if facts.node == 0:
        saved = Saved(
            step=step,
            trigger=trigger,
            path=path,
            num_files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            duration_s=round(now_s - group.begun_s.get(step, began_s), 3),
        )
        state.reporter.report(saved)
    size_bytes, write_s = manifest.size_bytes, now_s - began_s
    return Outcome(step=step, error="", path=path, size_bytes=size_bytes, write_s=write_s, ended_s=now_s)


def _commit(state: KeeperState, group: RankGroup, snapshot: Snapshot) -> Manifest:
    with state.changed:
        if state.folder.path is None:
            raise GivenUpError("no rank has sent the keeper the path of an output folder")
        sources = group.sources(snapshot)
    size_bytes = snapshot.num_bytes
    # While other processes use all processors, a thread at a low priority does not run. So the priority is restored
    # when the write takes much longer than usual.
    hurry = threading.Timer(_PATIENCE_S + size_bytes / _USUAL_BYTES_PER_S, state.priority.restore)
    hurry.daemon = True
    hurry.start()
    try:
        return commit_snapshot(snapshot, sources, state.reporter.report, lambda: group.has_waited_enough(size_bytes))
    finally:
        hurry.cancel()
