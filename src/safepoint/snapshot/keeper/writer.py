"""The keeper's writing thread: makes checkpoints of snapshots, one after the other."""

import threading

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Saved, SaveFailed
from safepoint.snapshot.keeper.keeper_state import KeeperState
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError
from safepoint.snapshot.keeper.persist.snapshot_commit import commit_snapshot
from safepoint.snapshot.keeper.rank_group import RankGroup
from safepoint.snapshot.keeper.rescue import rescue_newer
from safepoint.snapshot.keeper.snapshot_registry import Progress, Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts, Outcome

_PATIENCE_S = 5.0
_USUAL_BYTES_PER_S = 300e6
_SMALL_BYTES = 64 << 20


class Writer:
    """Writes requested snapshots, as long as the process lives.

    Args:
        state: of the keeper.
    """

    def __init__(self, state: KeeperState) -> None:
        self._state = state

    def run(self) -> None:
        """Body of the thread; does not return."""
        state = self._state
        while True:
            group, snapshot, facts = self._take_next()
            try:
                outcome = self._save(group, snapshot, facts)
            except Exception as error:  # without this thread nothing would be written any more
                state.reporter.log.exception("writing step %s failed", snapshot.step)
                outcome = Outcome(step=snapshot.step, error=f"{type(error).__name__}: {error}")
            with state.changed:
                state.is_writing = False
                is_current = group.registry.written(snapshot, is_durable=outcome.is_durable)
                # Ranks receive what is free before the outcome: a rank that waits for the outcome goes on at once.
                state.notify(group)
                if is_current:
                    group.last_outcome = outcome
                    group.send_outcome(outcome)
                if group.has_failed:
                    rescue_newer(state, group, snapshot.step)
                state.notify(group)

    def _take_next(self) -> tuple[RankGroup, Snapshot, CheckpointFacts]:
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.next_to_write() is not None)
            found = state.next_to_write()
            assert found is not None
            group, snapshot = found
            assert snapshot.facts is not None
            snapshot.progress = Progress.WRITING
            state.is_writing = True
            # A small snapshot takes little processor time, and would wait long for it at a low priority.
            if state.is_urgent(group) or snapshot.num_bytes < _SMALL_BYTES:
                state.priority.restore()
            else:
                state.priority.lower()
            return group, snapshot, snapshot.facts

    def _save(self, group: RankGroup, snapshot: Snapshot, facts: CheckpointFacts) -> Outcome:
        """Make a checkpoint of a snapshot; report it, or why it failed."""
        began_s = clock.monotonic_s()
        report = self._state.reporter.report
        try:
            manifest = self._commit(group, snapshot)
        except GivenUpError as error:
            return Outcome(step=snapshot.step, error=str(error))
        except (SafepointError, OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            consequence = "it stays in memory until the next one; an older checkpoint stands"
            report(
                SaveFailed(step=snapshot.step, trigger=snapshot.trigger, reason=str(error), consequence=consequence)
            )
            return Outcome(step=snapshot.step, error=reason)
        now_s = clock.monotonic_s()
        path = str(facts.output.root / checkpoint_name(snapshot.step))
        if facts.node == 0:
            saved = Saved(
                step=snapshot.step,
                trigger=snapshot.trigger,
                path=path,
                num_files=len(manifest.files),
                size_bytes=manifest.size_bytes,
                duration_s=round(now_s - group.begun_s.get(snapshot.step, began_s), 3),
            )
            report(saved)
        return Outcome(
            step=snapshot.step,
            error="",
            path=path,
            size_bytes=manifest.size_bytes,
            write_s=now_s - began_s,
            ended_s=now_s,
        )

    def _commit(self, group: RankGroup, snapshot: Snapshot) -> Manifest:
        state = self._state
        with state.changed:
            if state.folder.path is None:
                raise GivenUpError("the keeper holds no folder")
            sources = group.sources(snapshot)
        size_bytes = snapshot.num_bytes
        # Even if the processors are never idle, a snapshot becomes durable.
        hurry = threading.Timer(_PATIENCE_S + size_bytes / _USUAL_BYTES_PER_S, state.priority.restore)
        hurry.daemon = True
        hurry.start()
        try:
            return commit_snapshot(
                snapshot, sources, state.reporter.report, lambda: group.has_waited_enough(size_bytes)
            )
        finally:
            hurry.cancel()
