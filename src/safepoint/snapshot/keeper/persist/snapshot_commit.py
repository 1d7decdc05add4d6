"""Writes a snapshot from the keeper's registry to the output folder, and commits it as a checkpoint.

A keeper is the process of a node that writes snapshots to disk. The keepers of several nodes make one checkpoint,
through the folder that all of them share. In the attempt's working folder, each keeper writes small files that the
others read:

    <save>/part-K.json      the files of this save that node K has written, with their digests, or why there are none
    <save>/part-0.json      why node 0 has not committed this save
    <save>/outcome.json     node 0 has committed this save
    offer-K.json            the steps that are complete in the memory of node K, or durable already; written when the
                            ranks of node K have ended or must end

A rename makes each file appear as a whole. Node 0 commits.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, FileEntry, Manifest, read_entry
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.checkpoint.local.thinning import is_full, make_room
from safepoint.checkpoint.local.working_checkpoint import RankPart, WorkingCheckpoint
from safepoint.errors import SaveError
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.events.stream import Event
from safepoint.foundation.files import refresh, write_atomic
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.volumes.occupied import Occupied, occupied
from safepoint.foundation.volumes.room import Room, room_of
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError, Source, digest_source, write_files
from safepoint.snapshot.keeper.snapshot_registry import Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts

_LOOK_EVERY_S = 0.02


class Nodes:
    """This node and the other nodes that share the working folder of an attempt.

    Args:
        folder: the attempt's working folder.
        index: the number of this node.
        count: how many nodes there are.
    """

    def __init__(self, folder: Path, *, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self._folder = folder

    def publish(self, save: int, part: RankPart) -> None:
        """Publish which files this node has written for a save, or the error that prevented the write.

        Args:
            save: the number of the save, the same on all nodes.
            part: what this node has written; `rank` is ignored.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self._folder / str(save)
        no_links.make_folders(folder)
        _write_record(folder / f"part-{self.index}.json", asdict(part))

    def collect(self, save: int, is_over: Callable[[], bool]) -> list[RankPart]:
        """On node 0: wait for the parts of all other nodes.

        Args:
            save: the number of the save.
            is_over: whether to stop waiting.

        Returns:
            One part for each other node. The wait ends early if `is_over` returns True, or if a node publishes an
            error. If a node has published no part before the end of the wait, its part in the result has an error.
        """
        others = range(1, self.count)
        found = self._wait_for(f"{save}/part", others, is_over)
        return [_part_of(index, found.get(index)) for index in others]

    def announce(self, save: int) -> None:
        """On node 0: publish that a save is committed."""
        with contextlib.suppress(OSError):
            _write_record(self._folder / str(save) / "outcome.json", {"error": ""})

    def outcome(self, save: int, is_over: Callable[[], bool]) -> str:
        """Wait for node 0's outcome of a save; returns the error, empty when the save is committed."""
        while True:
            for name in ("outcome", "part-0"):
                record = _read_record(self._folder / str(save) / f"{name}.json")
                if record is not None:
                    return str(record["error"])
            if is_over():
                return "node 0 has not committed the checkpoint in time"
            clock.sleep(_LOOK_EVERY_S)

    def offer(self, steps: Sequence[int]) -> None:
        """Publish which steps are complete in this node's memory, or durable already.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._folder.is_dir():
            _write_record(self._folder / f"offer-{self.index}.json", {"steps": list(steps)})

    def is_called(self) -> bool:
        """Whether another node has published its offer: then the ranks of this node cannot continue."""
        refresh(self._folder)
        return any(
            (self._folder / f"offer-{index}.json").exists() for index in range(self.count) if index != self.index
        )

    def newest_of_all(self, is_over: Callable[[], bool]) -> int | None:
        """Wait for the offers of all nodes. Returns the newest step that is in all offers.

        The result is None if no step is in all offers, if an offer is malformed, or if `is_over` returns True before
        all nodes have published their offers.
        """
        found = self._wait_for("offer", range(self.count), is_over)
        if len(found) < self.count:
            return None
        try:
            first, *others = [{int(step) for step in record["steps"]} for record in found.values()]
        except (KeyError, TypeError, ValueError):
            return None
        return max(first.intersection(*others), default=None)

    def _wait_for(self, name: str, nodes: range, is_over: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Wait for `name-K.json` of each node K, or until one of them has an error. Returns the files that exist."""
        found: dict[int, dict[str, Any]] = {}
        while True:
            for index in nodes:
                record = _read_record(self._folder / f"{name}-{index}.json") if index not in found else None
                if record is not None:
                    found[index] = record
            if len(found) == len(nodes) or any(one.get("error") for one in found.values()) or is_over():
                return found
            clock.sleep(_LOOK_EVERY_S)


def _part_of(index: int, record: dict[str, Any] | None) -> RankPart:
    if record is None:
        return RankPart(rank=index, error=f"node {index} has not sent its file list in time")
    try:
        entries = tuple(map(read_entry, record["files"]))
        return RankPart(rank=index, files=entries, error=record["error"])
    except (KeyError, TypeError, ValueError) as error:
        return RankPart(rank=index, error=f"the record of node {index} is malformed: {error!r}")


def _write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(record).encode(), durable=False)


def _read_record(path: Path) -> dict[str, Any] | None:
    refresh(path.parent)
    with contextlib.suppress(OSError, ValueError):
        return read_object(path, max_bytes=MAX_MANIFEST_BYTES)
    return None


def nodes_of(facts: CheckpointFacts) -> Nodes:
    """The `Nodes` of the save that has these facts."""
    return Nodes(facts.output.work / facts.attempt_id, index=facts.node, count=facts.num_nodes)


def commit_snapshot(
    snapshot: Snapshot,
    sources: dict[int, list[Source]],
    report: Callable[[Event], None],
    is_over: Callable[[], bool],
) -> Manifest:
    """Write, digest, fsync and commit a snapshot; then prune older checkpoints.

    Each node writes its part. Node 0 commits when it has all parts; the other nodes wait for node 0's outcome. If
    there is no room for the checkpoint, node 0 first deletes older checkpoints that the policies allow to delete (see
    `thinning`).

    Args:
        snapshot: the snapshot, with the facts that the first rank has sent.
        sources: the snapshot's files, by rank.
        report: receives an event for each deleted checkpoint.
        is_over: whether to stop waiting for other nodes.

    Raises:
        GivenUpError: a rank will not stage its part.
        SafepointError, OSError: the snapshot cannot be committed. Node 0 deletes the working folder.
    """
    facts = snapshot.facts
    assert facts is not None
    nodes = nodes_of(facts)
    # Each save has a working folder of its own, so the folder contains no files of an earlier save of the same step.
    working = WorkingCheckpoint(facts.output, attempt_id=f"{facts.attempt_id}/{facts.save}", step=snapshot.step)
    manifest: Manifest | None = None
    try:
        if facts.node == 0:
            _make_room(snapshot, report)
        if facts.node > 0:
            nodes.publish(facts.save, _write(working, snapshot, sources))
        elif facts.num_nodes == 1:
            manifest = _commit_where_room(working, snapshot, sources, report)
        else:
            parts = [_write(working, snapshot, sources), *nodes.collect(facts.save, is_over)]
            manifest = working.commit(parts, lambda files: describe(snapshot, files))
    except BaseException as error:
        publish_no_part(facts, str(error))
        raise
    finally:
        if facts.node == 0:
            working.discard()
            with contextlib.suppress(OSError):  # the folder may still contain files of other nodes
                (facts.output.work / facts.attempt_id / str(facts.save)).rmdir()
    if manifest is None:
        problem = nodes.outcome(facts.save, is_over)
        if problem:
            raise SaveError(problem)
        return read_manifest(working.target)
    if facts.num_nodes > 1:
        nodes.announce(facts.save)
    prune(
        facts.output,
        parse_policies(facts.keep, facts.limit),
        report,
        protected={*facts.protected, manifest.step},  # the new checkpoint stays in any case
        run_id=manifest.run_id,
    )
    return manifest


def _make_room(snapshot: Snapshot, report: Callable[[Event], None], *, has_failed: bool = False) -> int:
    """On node 0: if there is no room for the checkpoint, delete older checkpoints; see `thinning.make_room`."""
    facts = snapshot.facts
    assert facts is not None
    output, run_id = facts.output, facts.manifest.run_id
    save = Occupied(num_bytes=snapshot.num_bytes, num_inodes=sum(len(part.files) for part in snapshot.parts.values()))
    if facts.num_nodes > 1:
        # This node does not know how much the other nodes will write. It expects the size of the previous checkpoint.
        with contextlib.suppress(OSError):
            manifests = (manifest for _, manifest in output.manifests() if manifest.run_id == run_id)
            before = next(manifests, None)
            if before is not None and before.size_bytes > save.num_bytes:
                save = Occupied(num_bytes=before.size_bytes, num_inodes=len(before.files))

    def read_room(folder: Path) -> Room | None:
        room = room_of(folder)
        if room is None or facts.num_nodes == 1:
            return room
        written = occupied(output.work / facts.attempt_id / str(facts.save))  # by nodes that began earlier
        return replace(room, free_bytes=room.free_bytes + written.num_bytes)

    return make_room(
        output,
        parse_policies(facts.keep, facts.limit),
        report,
        save=save,
        protected=facts.protected,
        run_id=run_id,
        has_failed=has_failed,
        read_room=read_room,
    )


def _commit_where_room(
    working: WorkingCheckpoint,
    snapshot: Snapshot,
    sources: dict[int, list[Source]],
    report: Callable[[Event], None],
) -> Manifest:
    """Write and commit the snapshot of a single node.

    If the disk or a quota is full, delete an older checkpoint and try again. With several nodes this is not possible:
    all of them would have to write again.
    """
    while True:
        try:
            return working.commit([_write(working, snapshot, sources)], lambda files: describe(snapshot, files))
        except (OSError, SaveError) as error:
            if not is_full(error):
                raise
            working.discard()
            if not _make_room(snapshot, report, has_failed=True):
                raise


def _write(working: WorkingCheckpoint, snapshot: Snapshot, sources: dict[int, list[Source]]) -> RankPart:
    """Write this node's files."""
    no_links.make_folders(working.source)
    entries = write_files(merge(sources), working.source)
    for of_rank in sources.values():
        for source in of_rank:
            source.wait_until_staged()  # before that, files may be from different steps
    if not snapshot.is_intact:
        raise GivenUpError(f"the memory of step {snapshot.step} was used for another snapshot")
    assert snapshot.facts is not None
    return RankPart(rank=snapshot.facts.node, files=tuple(entries))


def publish_no_part(facts: CheckpointFacts | None, error: str) -> None:
    """Report to the other nodes, if there are any, that this node writes no part of a checkpoint, and why."""
    if facts is not None and facts.num_nodes > 1:
        with contextlib.suppress(OSError):
            nodes_of(facts).publish(facts.save, RankPart(rank=facts.node, error=f"node {facts.node}: {error}"))


def describe(snapshot: Snapshot, files: tuple[FileEntry, ...]) -> Manifest:
    """The manifest of a snapshot whose files are known."""
    assert snapshot.facts is not None
    return snapshot.facts.manifest.to_manifest(trigger=snapshot.trigger, files=files)


def merge(sources: dict[int, list[Source]]) -> list[Source]:
    """The files of all ranks, each once.

    Raises:
        SaveError: two ranks have different content under one name.
        GivenUpError: a rank will not stage its part.
    """
    merged: dict[str, Source] = {}
    for of_rank in sources.values():
        for source in of_rank:
            first = merged.setdefault(source.path, source)
            if first is not source and not _are_equal(first, source):
                raise SaveError(f"two ranks wrote {source.path} with different content")
    return list(merged.values())


def _are_equal(first: Source, second: Source) -> bool:
    if first.size_bytes != second.size_bytes:
        return False
    for source in (first, second):
        source.wait_for(source.size_bytes)
    return digest_source(first) == digest_source(second)
