"""Writes a snapshot from the keeper's registry to the output folder and commits it as a checkpoint."""

import contextlib
from collections.abc import Callable

from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.checkpoint.local.working_checkpoint import RankPart, WorkingCheckpoint
from safepoint.errors import SaveError
from safepoint.foundation.events.stream import Event
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError, Source, digest_source, write_files
from safepoint.snapshot.keeper.persist.node_exchange import Nodes
from safepoint.snapshot.keeper.snapshot_registry import Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts


def nodes_of(facts: CheckpointFacts) -> Nodes:
    """This node among those that save together."""
    return Nodes(facts.output.work / facts.attempt_id, index=facts.node, count=facts.num_nodes)


def commit_snapshot(
    snapshot: Snapshot,
    sources: dict[int, list[Source]],
    report: Callable[[Event], None],
    is_over: Callable[[], bool],
) -> Manifest:
    """Write, digest, fsync and commit; then prune.

    Each node writes its part. Node 0 commits when it has all parts; the others wait for its outcome.

    Args:
        snapshot: what, with the first rank's facts.
        sources: its files, by rank.
        report: receives what was pruned.
        is_over: whether to stop waiting for other nodes.

    Raises:
        GivenUpError: a rank will not stage its part.
        SafepointError, OSError: it cannot be committed; nothing is left of it.
    """
    facts = snapshot.facts
    assert facts is not None
    nodes = nodes_of(facts)
    # Each save has its own folder: files that an earlier save of the same step has left are not in it.
    working = WorkingCheckpoint(facts.output, attempt_id=f"{facts.attempt_id}/{facts.save}", step=snapshot.step)
    manifest: Manifest | None = None
    try:
        part = _write(working, snapshot, sources)
        if facts.node > 0:
            nodes.publish(facts.save, part)
        else:
            parts = [part, *nodes.collect(facts.save, is_over)]
            manifest = working.commit(parts, lambda files: describe(snapshot, files))
    except BaseException as error:
        publish_no_part(snapshot, str(error))
        raise
    finally:
        if facts.node == 0:
            working.discard()
            with contextlib.suppress(OSError):  # other nodes may have left their files in it
                (facts.output.work / facts.attempt_id / str(facts.save)).rmdir()
    if manifest is None:
        problem = nodes.outcome(facts.save, is_over)
        if problem:
            raise SaveError(problem)
        return read_manifest(working.target)
    if facts.num_nodes > 1:
        nodes.announce(facts.save)
    prune(facts.output, parse_policies(facts.keep, facts.limit), report, protected=facts.protected)
    return manifest


def _write(working: WorkingCheckpoint, snapshot: Snapshot, sources: dict[int, list[Source]]) -> RankPart:
    """Write this node's files."""
    working.source.mkdir(parents=True, exist_ok=True)
    entries = write_files(merge(sources), working.source)
    for of_rank in sources.values():
        for source in of_rank:
            source.wait_until_staged()  # only then is it known that they belong to one boundary
    if not snapshot.is_intact:
        raise GivenUpError(f"the memory of step {snapshot.step} was used for another one")
    assert snapshot.facts is not None
    return RankPart(rank=snapshot.facts.node, files=tuple(entries))


def publish_no_part(snapshot: Snapshot, error: str) -> None:
    """Report to the other nodes, if there are any, that this one writes no part of a snapshot, and why."""
    facts = snapshot.facts
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
