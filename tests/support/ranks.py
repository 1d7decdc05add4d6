"""Ranks as threads of one process, with the collective calls of `Peers` and without a process group."""

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from safepoint.foundation.environment import Place


class _Meeting:
    """Lets a fixed number of threads exchange values."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.values: list[bytes] = [b""] * count

    def exchange(self, index: int, value: Any) -> list[Any]:
        self.values[index] = pickle.dumps(value)  # as over a network: no object is shared
        self.barrier.wait()
        values = [pickle.loads(data) for data in self.values]
        self.barrier.wait()
        return values


class ThreadPeers:
    """One rank."""

    def __init__(self, meetings: "Meetings", place: Place) -> None:
        self.place = place
        self.secret: bytes | None = None
        self._meetings = meetings

    def gather(self, value: Any) -> list[Any]:
        return self._meetings.all.exchange(self.place.rank, value)

    def from_first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def to_first(self, block: torch.Tensor, source: int) -> None:
        if source == 0 or self.place.rank not in {0, source}:
            return
        meeting = self._meetings.among((0, source))
        _, sent = meeting.exchange(0 if self.place.rank == 0 else 1, None if self.place.rank == 0 else block.clone())
        if self.place.rank == 0:
            block.copy_(sent)

    def sender_among(self, ranks: Sequence[int]) -> "_Sender":
        self.gather(None)
        return _Sender(self._meetings.among(tuple(ranks)), tuple(ranks), self.place.rank)


class _Sender:
    def __init__(self, meeting: _Meeting, ranks: tuple[int, ...], rank: int) -> None:
        self._meeting, self._ranks, self._rank = meeting, ranks, rank

    def send(self, block: torch.Tensor, source: int) -> None:
        mine = block if self._rank == source else None
        values = self._meeting.exchange(self._ranks.index(self._rank), mine)
        block.copy_(values[self._ranks.index(source)])


class Meetings:
    """All groups of one job."""

    def __init__(self, count: int) -> None:
        self.all = _Meeting(count)
        self._groups: dict[tuple[int, ...], _Meeting] = {}
        self._lock = threading.Lock()

    def among(self, ranks: tuple[int, ...]) -> _Meeting:
        with self._lock:
            return self._groups.setdefault(ranks, _Meeting(len(ranks)))


def run_ranks(
    count: int, function: Callable[[ThreadPeers], Any], *, local_ranks: Sequence[int] | None = None
) -> list[Any]:
    """Call `function` on `count` ranks at the same time.

    Returns:
        By rank, what it returned, or the exception that it raised. A rank that leaves a collective call out makes all
        others fail with a broken barrier after a while, not hang.
    """
    meetings = Meetings(count)

    def one(rank: int) -> Any:
        local_rank = local_ranks[rank] if local_ranks else 0
        try:
            return function(ThreadPeers(meetings, Place(rank=rank, world_size=count, local_rank=local_rank)))
        except Exception as error:  # noqa: BLE001  the test looks at it
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))
