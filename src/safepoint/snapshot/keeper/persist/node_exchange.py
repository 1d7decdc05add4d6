"""Keepers of several nodes make one checkpoint, through the folder that all of them see.

Below the attempt's working folder, each keeper leaves small files that the others look for:

    <save>/part-K.json      node K has written its files of this save, with their digests, or why it has not
    <save>/outcome.json     node 0 has committed it, or why it has not
    offer-K.json            the ranks of node K are gone or must go: these steps are complete in its memory

A file appears whole, by a rename. Node 0 commits. A waiting keeper stops when its caller requests it.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.foundation import clock
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
        """Wait for every node's part of a save.

        Args:
            save: its number.
            is_over: whether waiting makes no sense any more.

        Returns:
            One for each node; of a node that has not come in time, one with an error.
        """
        parts: dict[int, RankPart] = {}
        while True:
            for index in range(self.count):
                record = _read(self._folder / str(save) / f"part-{index}.json") if index not in parts else None
                if record is not None:
                    parts[index] = _part_of(index, record)
            if len(parts) == self.count or any(part.error for part in parts.values()) or is_over():
                break
            clock.sleep(_LOOK_EVERY_S)
        missing = [
            RankPart(rank=index, error=f"node {index} has not come with its part")
            for index in range(self.count)
            if index not in parts
        ]
        return [*parts.values(), *missing]

    def announce(self, save: int, error: str) -> None:
        """Publish the outcome of a save, on node 0; an empty error means that it is committed."""
        with contextlib.suppress(OSError):
            _write(self._folder / str(save) / "outcome.json", {"error": error})

    def outcome(self, save: int, is_over: Callable[[], bool]) -> str:
        """Wait for node 0's outcome of a save; returns the error, empty when the save is committed."""
        while True:
            record = _read(self._folder / str(save) / "outcome.json")
            if record is not None:
                return str(record["error"])
            part = _read(self._folder / str(save) / "part-0.json")
            if part is not None and part["error"]:
                return str(part["error"])
            if is_over():
                return "node 0 has not committed it"
            clock.sleep(_LOOK_EVERY_S)

    # ---- rescue -----------------------------------------------------------------------------------------------

    def offer(self, steps: Sequence[int]) -> None:
        """Say which steps are complete in this node's memory, or durable already.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._folder.is_dir():
            _write(self._folder / f"offer-{self.index}.json", {"steps": list(steps)})

    def is_called(self) -> bool:
        """Whether another node has made its offer: this one's ranks will not get any further."""
        return any(
            (self._folder / f"offer-{index}.json").exists() for index in range(self.count) if index != self.index
        )

    def newest_of_all(self, is_over: Callable[[], bool]) -> int | None:
        """Wait for every node's offer; the newest step that all of them have, or None."""
        common: set[int] | None = None
        waiting = set(range(self.count))
        while waiting:
            for index in sorted(waiting):
                record = _read(self._folder / f"offer-{index}.json")
                if record is not None:
                    waiting.discard(index)
                    steps = {int(step) for step in record["steps"]}
                    common = steps if common is None else common & steps
            if waiting and is_over():
                return None
            if waiting:
                clock.sleep(_LOOK_EVERY_S)
        return max(common, default=None) if common else None


def _part_of(index: int, record: dict[str, Any]) -> RankPart:
    entries = tuple(
        FileEntry(path=one["path"], size_bytes=one["size_bytes"], digest=one["digest"], parts=tuple(one["parts"]))
        for one in record["files"]
    )
    return RankPart(rank=index, files=entries, error=record["error"])


def _write(path: Path, record: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(record).encode(), durable=False)


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None
