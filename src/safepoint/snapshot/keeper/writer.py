"""The keeper's writing thread: one snapshot after the other becomes a checkpoint."""

import threading
from pathlib import Path
from typing import Any

from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Saved, SaveFailed
from safepoint.snapshot.keeper.ledger import Progress, Snapshot
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError
from safepoint.snapshot.keeper.persist.snapshot_commit import commit_snapshot
from safepoint.snapshot.keeper.rank_starts import Start
from safepoint.snapshot.keeper.rescue import rescue_newer
from safepoint.snapshot.keeper.shared_state import SharedState

_PATIENCE_S = 5.0
_USUAL_BYTES_PER_S = 300e6
_SMALL_BYTES = 64 << 20


class Writer:
    """Writes what is wanted, as long as the process lives.

    Args:
        kept: what is kept.
    """

    def __init__(self, kept: SharedState) -> None:
        self._kept = kept

    def run(self) -> None:
        """Body of the thread; does not return."""
        while True:
            start, snapshot = self._take_next()
            try:
                outcome = self._commit(start, snapshot)
            except Exception as error:  # without this thread nothing would ever be written again
                self._kept.reporting.log.exception("writing step %s failed", snapshot.step)
                outcome = {"step": snapshot.step, "error": f"{type(error).__name__}: {error}"}
            with self._kept.changed:
                self._kept.is_writing = False
                is_current = start.ledger.written(snapshot, is_durable=not outcome["error"])
                # What is free, before the outcome: whoever waits for that goes on at once.
                self._kept.settle(start)
                if is_current:
                    start.outcomes = {snapshot.step: outcome}
                    start.tell_outcome(outcome)
                if start.has_failed:
                    rescue_newer(self._kept, start, snapshot.step)
                self._kept.settle(start)

    def _take_next(self) -> tuple[Start, Snapshot]:
        kept = self._kept
        with kept.changed:
            kept.changed.wait_for(lambda: kept.next_to_write() is not None)
            found = kept.next_to_write()
            assert found is not None
            start, snapshot = found
            snapshot.progress = Progress.WRITING
            kept.is_writing = True
            # What is small takes no time that anybody would miss, and would wait long for a processor.
            if kept.is_urgent(start) or snapshot.num_bytes < _SMALL_BYTES:
                kept.priority.restore()
            else:
                kept.priority.lower()
            return found

    def _commit(self, start: Start, snapshot: Snapshot) -> dict[str, Any]:
        """Make a checkpoint of it; the message with the outcome."""
        began_s = clock.monotonic_s()
        report = self._kept.reporting.report
        try:
            with self._kept.changed:
                if self._kept.folder.path is None:
                    raise GivenUpError("the keeper holds no folder")  # noqa: TRY301
                sources = start.sources(snapshot)
            size_bytes = sum(source.size_bytes for of_rank in sources.values() for source in of_rank)
            # Processors that are never free must not keep a snapshot from becoming durable.
            hurrying = threading.Timer(_PATIENCE_S + size_bytes / _USUAL_BYTES_PER_S, self._kept.priority.restore)
            hurrying.daemon = True
            hurrying.start()
            try:
                manifest = commit_snapshot(snapshot, sources, report, lambda: start.is_hopeless(size_bytes))
            finally:
                hurrying.cancel()
        except GivenUpError as error:
            return {"step": snapshot.step, "error": str(error)}
        except (SafepointError, OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            consequence = "it stays in memory until the next one; an older checkpoint stands"
            report(
                SaveFailed(step=snapshot.step, trigger=snapshot.trigger, reason=str(error), consequence=consequence)
            )
            return {"step": snapshot.step, "error": reason}
        now_s = clock.monotonic_s()
        path = str(Path(snapshot.facts["folder"]) / f"checkpoint-{snapshot.step}")
        if snapshot.facts.get("node", 0) == 0:
            saved = Saved(
                step=snapshot.step,
                trigger=snapshot.trigger,
                path=path,
                num_files=len(manifest.files),
                size_bytes=manifest.size_bytes,
                duration_s=round(now_s - start.begun_s.get(snapshot.step, began_s), 3),
            )
            report(saved)
        return {
            "step": snapshot.step,
            "error": "",
            "path": path,
            "size_bytes": manifest.size_bytes,
            "write_s": now_s - began_s,
        }
