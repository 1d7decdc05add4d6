"""Keepers of several nodes make one checkpoint, through the folder that all of them see.

Below the attempt's working folder, each keeper writes small files that the others look for:

    <save>/part-K.json      the files of this save that node K has written, with their digests, or why it has none
    <save>/part-0.json      why node 0 has not committed this save
    <save>/outcome.json     node 0 has committed this save
    offer-K.json            the ranks of node K are gone or must go: these steps are complete in its memory

A file appears whole, by a rename. Node 0 commits. A waiting keeper stops when its caller requests it.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, FileEntry
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.files import write_atomic

_LOOK_EVERY_S = 0.02


class Nodes:
    """One node among those that share the folder of an attempt.

    Args:
        folder: the attempt's working folder.
        index: of this node.
        count: of all nodes.
    """

    def __init__(self, folder: Path, *, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self._folder = folder

    # ---- one save ---------------------------------------------------------------------------------------------

    def publish(self, save: int, part: RankPart) -> None:
        """Publish which files this node has written for a save, or why it has written none.

        Args:
            save: its number, the same on all nodes.
            part: of the node; its `rank` is ignored.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self._folder / str(save)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"part-{self.index}.json", asdict(part))

    def collect(self, save: int, is_over: Callable[[], bool]) -> list[RankPart]:
        """Wait for the parts of all nodes but node 0, which calls this.

        Args:
            save: its number.
            is_over: whether to stop waiting.

        Returns:
            One for each of these nodes; of a node that has not come in time, one with an error.
        """
        others = range(1, self.count)
        found = self._wait_for(f"{save}/part", others, is_over)
        return [_part_of(index, found.get(index)) for index in others]

    def announce(self, save: int) -> None:
        """Publish that a save is committed, on node 0."""
        with contextlib.suppress(OSError):
            _write(self._folder / str(save) / "outcome.json", {"error": ""})

    def outcome(self, save: int, is_over: Callable[[], bool]) -> str:
        """Wait for node 0's outcome of a save; returns the error, empty when the save is committed."""
        while True:
            for name in ("outcome", "part-0"):
                record = _read(self._folder / str(save) / f"{name}.json")
                if record is not None:
                    return str(record["error"])
            if is_over():
                return "node 0 has not committed it"
            clock.sleep(_LOOK_EVERY_S)

    # ---- rescue -----------------------------------------------------------------------------------------------

    def offer(self, steps: Sequence[int]) -> None:
        """Publish which steps are complete in this node's memory, or durable already.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._folder.is_dir():
            _write(self._folder / f"offer-{self.index}.json", {"steps": list(steps)})

    def is_called(self) -> bool:
        """Whether another node has made its offer: the ranks of this node cannot continue without it."""
        return any(
            (self._folder / f"offer-{index}.json").exists() for index in range(self.count) if index != self.index
        )

    def newest_of_all(self, is_over: Callable[[], bool]) -> int | None:
        """Wait for every node's offer; the newest step that all of them have, or None."""
        found = self._wait_for("offer", range(self.count), is_over)
        if len(found) < self.count:
            return None
        try:
            first, *others = [{int(step) for step in record["steps"]} for record in found.values()]
        except (KeyError, TypeError, ValueError):
            return None
        return max(first.intersection(*others), default=None)

    def _wait_for(self, name: str, nodes: range, is_over: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Wait for the file `name-K.json` of each node K, or until one has an error; those that are there."""
        found: dict[int, dict[str, Any]] = {}
        while True:
            for index in nodes:
                record = _read(self._folder / f"{name}-{index}.json") if index not in found else None
                if record is not None:
                    found[index] = record
            if len(found) == len(nodes) or any(one.get("error") for one in found.values()) or is_over():
                return found
            clock.sleep(_LOOK_EVERY_S)


def _part_of(index: int, record: dict[str, Any] | None) -> RankPart:
    if record is None:
        return RankPart(rank=index, error=f"node {index} has not come with its part")
    try:
        entries = tuple(
            FileEntry(path=one["path"], size_bytes=one["size_bytes"], digest=one["digest"], parts=tuple(one["parts"]))
            for one in record["files"]
        )
        return RankPart(rank=index, files=entries, error=record["error"])
    except (KeyError, TypeError, ValueError) as error:
        return RankPart(rank=index, error=f"the record of node {index} is malformed: {error!r}")


def _write(path: Path, record: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(record).encode(), durable=False)


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return read_object(path, max_bytes=MAX_MANIFEST_BYTES)
    return None
