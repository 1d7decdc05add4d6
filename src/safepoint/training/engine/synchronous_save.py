"""Saves that training waits for: written into a working folder and committed by all ranks together.

A failed save leaves nothing behind, is reported, and is the same failure on every rank.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.format.manifest import FileEntry, Manifest, ManifestFacts, Trigger
from safepoint.checkpoint.format.node_part import NodePart, read_part
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.commit import (
    RankPart,
    WorkingCheckpoint,
    added_files,
    describe_all,
    extended,
    reseal,
    reseal_part,
)
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, parse_policies
from safepoint.errors import ManifestError, SafepointError, SaveError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Pruned, Resealed, Saved, SaveFailed
from safepoint.storage.location import Location
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.final_model.finished_model import Finishing
from safepoint.training.engine.loop import TrainingLoop, Write
from safepoint.training.engine.run_facts import RunFacts
from safepoint.training.start.folders import Folders


class SynchronousSave:
    """Saves and commits for one `train()` call.

    Args:
        context: reports what happened.
        peers: all ranks.
        framework: whose state is saved.
        output: where.
        folders: whether all ranks share it.
        facts: what the manifests say.
    """

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        framework: TrainingLoop,
        output: OutputFolder,
        folders: Folders,
        facts: RunFacts,
    ) -> None:
        self._context = context
        self._peers = peers
        self._framework = framework
        self._output = output
        self._folders = folders
        self._facts = facts
        self._newest: tuple[Path, Manifest] | None = None
        self.last_duration_s: float | None = None
        """Seconds that the last successful save took; None before the first."""

    def save(self, trigger: Trigger, write: Write, *, consequence: str) -> bool:
        """Save the state at the loop's step, on all ranks together.

        Args:
            trigger: why.
            write: writes this rank's files.
            consequence: what a failure means, for the message.

        Returns:
            Whether the checkpoint is committed; the same on every rank.

        Raises:
            PeerError: a rank is gone.
        """
        started_s, time = clock.monotonic_s(), clock.utc_now()
        step = self._framework.step
        working = WorkingCheckpoint(self._output, attempt_id=self._facts.attempt_id, step=step)
        parts = self._peers.gather(self._write_part(working, write))
        commit = self._commit if self._folders.is_shared else self._commit_parts
        manifest, error = commit(
            working, parts, lambda files: self.manifest_facts().to_manifest(trigger=trigger, files=files)
        )
        if self._folders.is_owner:
            working.discard()
        if manifest is None:
            self._context.reporter.report(
                SaveFailed(step=step, trigger=trigger, reason=error, consequence=consequence)
            )
            self._context.progress.not_saved()
            return False
        self._newest = (working.target, manifest)
        self._context.outcome.saved(step)
        self.last_duration_s = took_s = clock.monotonic_s() - started_s
        self._context.progress.saved(
            step, time=time, stall_s=took_s, durable_s=took_s, size_bytes=manifest.size_bytes
        )
        self._context.reporter.report(
            Saved(
                step=step,
                trigger=trigger,
                path=str(working.target),
                num_files=len(manifest.files),
                size_bytes=manifest.size_bytes,
                duration_s=round(self.last_duration_s, 3),
            )
        )
        return True

    def _commit(
        self, working: WorkingCheckpoint, parts: list[RankPart], describe: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> tuple[Manifest | None, str]:
        manifest: Manifest | None = None
        error = ""
        if self._folders.is_owner:
            try:
                manifest = working.commit(parts, describe)
            except (SafepointError, OSError) as reason:
                error = str(reason)
        return self._peers.from_first((manifest, error))

    def _commit_parts(
        self, working: WorkingCheckpoint, parts: list[RankPart], describe: Callable[[tuple[FileEntry, ...]], Manifest]
    ) -> tuple[Manifest | None, str]:
        """Every node commits its part, when all of them have done what can fail."""
        manifest: Manifest | None = None
        error = ""
        if self._context.place.is_first:
            try:
                manifest = describe_all(parts, describe)
            except SafepointError as reason:
                error = str(reason)
        manifest, error = self._peers.from_first((manifest, error))
        if manifest is None:
            return None, error
        node = self._folders.index
        paths = sorted(entry.path for part in parts if part.node == node for entry in part.files)
        part = NodePart(node=node, num_nodes=self._folders.count, paths=tuple(paths), manifest=manifest, is_open=True)
        error = self._on_node(lambda: working.prepare_part(part)) or self._on_node(working.publish_part)
        return (None, error) if error else (manifest, "")

    def _on_node(self, work: Callable[[], object]) -> str:
        """Do something for every node's folder, and say why it failed anywhere; the same on every rank."""
        error = ""
        if self._folders.is_owner:
            try:
                work()
            except (SafepointError, OSError) as reason:
                error = f"node {self._folders.index}: {reason}"
        return "; ".join(error for error in self._peers.gather(error) if error)

    def save_final(self, location: Location) -> None:
        """Bring the finished model into the object store at `location`; see `finishing`.

        Raises:
            PeerError: a rank is gone.
        """
        finishing = Finishing(
            self._context,
            self._peers,
            self._framework,
            self._output,
            self._folders,
            attempt_id=self._facts.attempt_id,
            describe=lambda files: self.manifest_facts().to_manifest(trigger=Trigger.FINAL, files=files),
        )
        finishing.finish(location)

    def adopt_added_files(self) -> None:
        """Name in the manifest what callbacks of all ranks have added to the newest checkpoint since its commit."""
        self._peers.gather(None)  # every rank's callbacks have written their files
        if self._newest is None:
            return
        path, manifest = self._newest
        try:
            if self._folders.is_shared:
                if not self._context.place.is_first:
                    return
                manifest, added = reseal(path, manifest)
            else:
                manifest, added = self._adopt_on_nodes(path, manifest)
        except (OSError, ValueError, SaveError) as error:
            reason = f"files that a callback added cannot be named in its manifest: {error}"
            self._context.reporter.report(
                SaveFailed(
                    step=manifest.step,
                    trigger=manifest.trigger,
                    reason=reason,
                    consequence="the checkpoint will be passed over on resume",
                )
            )
            return
        self._newest = (path, manifest)
        if added:
            self._context.reporter.report(Resealed(step=manifest.step, files=tuple(added)))

    def _adopt_on_nodes(self, path: Path, manifest: Manifest) -> tuple[Manifest, list[str]]:
        mine: list[FileEntry] = []
        error = self._on_node(lambda: mine.extend(added_files(path, manifest)))
        if error:
            raise SaveError(error)
        everything = [entry for entries in self._peers.gather(mine) for entry in entries]
        whole = extended(manifest, everything)
        # Of two files under one name the first node's counts; the other one stays unnamed, and unused.
        named = [entry for entry in mine if entry in whole.files]
        error = self._on_node(lambda: reseal_part(path, read_part(path), whole, named))
        if error:
            raise SaveError(error)
        return whole, sorted({entry.path for entry in everything})

    def _write_part(self, working: WorkingCheckpoint, write: Write) -> RankPart:
        rank = self._context.place.rank
        try:
            root = working.rank_root(rank)
            write(root, root / working.name)
            return dataclasses.replace(working.seal(rank), node=self._folders.index)
        # Whatever the framework raises here, all ranks must hear of it, or the others wait for ever.
        except Exception as error:  # noqa: BLE001
            return RankPart(rank=rank, error=f"{type(error).__name__}: {error}")

    def manifest_facts(self) -> ManifestFacts:
        """What the manifest of a checkpoint of this step says besides files, trigger and time."""
        return self._framework.manifest_facts(self._facts)

    def set_newest(self, path: Path) -> None:
        """The keeper has committed the checkpoint at `path`: it is the newest one."""
        with contextlib.suppress(ManifestError):
            self._newest = (path, read_manifest(path))

    def prune(self) -> None:
        """Delete what `save_total_limit` no longer keeps; a failure is reported, and the next save tries again."""
        if not self._folders.is_owner:
            return
        limit, protected = self._framework.retention()
        policies = [*parse_policies(self._context.settings.keep), *([KeepNewest(limit)] if limit else [])]
        superseded = self._output.superseded(policies, protected=protected)
        try:
            pruned = self._output.prune(superseded)
        except OSError as error:
            self._context.reporter.report(
                SaveFailed(
                    step=self._framework.step,
                    trigger="retention",
                    reason=f"an older checkpoint could not be deleted: {error}",
                    consequence="it stays until the next save",
                )
            )
            return
        for path in pruned:
            self._context.reporter.report(Pruned(step=int(path.name.rsplit("-", 1)[1]), path=str(path)))
