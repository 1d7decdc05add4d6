"""The ranks of the job, over a process group of Holdfast's own.

The group is gloo on every device: it needs no GPU, disturbs no NCCL stream, and notices a dead peer by its
closed connection. Every call is a collective: all ranks make the same calls in the same order.
"""

import datetime
from typing import Any, TypeVar

import torch
import torch.distributed

from holdfast.errors import PeerError
from holdfast.foundation.environment import Place
from holdfast.foundation.units import format_duration

_T = TypeVar("_T")
# Its functions are decorated without types.
dist: Any = torch.distributed


class Reduction:
    """An all-reduce under way."""

    def __init__(self, peers: "Peers", values: torch.Tensor, work: torch.distributed.Work | None) -> None:
        self._peers = peers
        self._values = values
        self._work = work

    def wait(self) -> list[int]:
        """The element-wise maximum over all ranks.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._peers.lost("vote") from error
        return [int(value) for value in self._values]


class Peers:
    """All ranks of the job; a lone process is its own peer.

    Args:
        place: this rank among them.
        timeout_s: how long to wait for a rank that is alive but silent; a dead one is noticed at once.

    Raises:
        PeerError: the ranks could not form a group.
    """

    def __init__(self, place: Place, *, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._group: torch.distributed.ProcessGroup | None = None
        self._kept_alive: Any = None
        if place.world_size > 1:
            # A script that destroys its process group and then drops its model runs the destructor of torch's
            # gloo group, which waits for a thread that waits for the interpreter's lock: a hang after all the work.
            # With a reference held here the destructor never runs; the process ends with os._exit.
            self._kept_alive = dist.group.WORLD
            timeout = datetime.timedelta(seconds=timeout_s)
            try:
                self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="holdfast")
            except (RuntimeError, ValueError) as error:
                raise self.lost("start") from error

    def start_maximum(self, values: list[int]) -> Reduction:
        """Begin an element-wise maximum over all ranks and return at once."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._group is None:
            return Reduction(self, tensor, None)
        try:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self.lost("vote") from error
        return Reduction(self, tensor, work)

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, by rank.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._group is None:
            return [value]
        values: list[_T | None] = [None] * self.place.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self.lost("exchange") from error
        return values  # pyright: ignore[reportReturnType]

    def from_first(self, value: _T) -> _T:
        """The first rank's value, on every rank.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._group is None:
            return value
        values = [value]
        try:
            dist.broadcast_object_list(values, src=0, group=self._group)
        except RuntimeError as error:
            raise self.lost("exchange") from error
        return values[0]

    def lost(self, during: str) -> PeerError:
        """The error for a rank that is gone or silent."""
        return PeerError(
            f"rank {self.place.rank} lost another rank during the {during}: it died, or did not answer within "
            f"{format_duration(self._timeout_s)}; this rank ends",
            hint="the cause is in the log of the rank that ended first",
        )


__all__ = ["Peers", "Reduction"]
