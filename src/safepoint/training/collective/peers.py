"""The ranks of the job, connected by a process group that only Safepoint uses.

The group's backend is gloo on every device. gloo needs no GPU and disturbs no NCCL stream. It notices a dead peer by
the closed connection, except if this rank was stopped (SIGSTOP) when the peer died.

The calls are collective: every rank makes the same calls in the same order. If only some ranks make a call, its
docstring names these ranks.
"""

import contextlib
import datetime
import functools
from array import array
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed

from safepoint.errors import PeerError
from safepoint.foundation.environment import Place
from safepoint.foundation.units import format_duration
from safepoint.training.collective.seal import Seal, SealError

_T = TypeVar("_T")
# The functions of torch.distributed have no types.
dist: Any = torch.distributed

NUM_VALUES = 9
"""How many integers the ranks combine in one all-reduce."""


class Reduction:
    """A running all-reduce."""

    def __init__(self, peers: "Peers", work: torch.distributed.Work | None) -> None:
        self._peers = peers
        self._work = work
        self._result: list[int] | None = None

    def wait(self) -> list[int]:
        """Wait for the element-wise maximum over all ranks. Later calls return the same values.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._result is None:
            if self._work is not None:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    raise self._peers.lost("vote") from error
            self._result = self._peers.values.tolist()
        return self._result


class Sender:
    """Sends blocks of bytes from one rank to several others. The ranks that take part have their own process group.

    Args:
        peers: all ranks of the job.
        group: the process group of the ranks that take part.
    """

    def __init__(self, peers: "Peers", group: Any) -> None:
        self._peers = peers
        self._group = group

    def send(self, block: torch.Tensor, source: int) -> None:
        """Send a block from rank `source` to the other ranks of the group.

        Every rank of the group calls this method, with a block of the same size.

        Args:
            block: a uint8 tensor of one dimension. Rank `source` sends the content of its block. The other ranks
                receive the content in their blocks.
            source: the rank that sends.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        with self._peers.raising_peer_error():
            dist.broadcast(block, src=source, group=self._group)


class Peers:
    """All ranks of the job. In a job of one process there is no process group, and the calls return at once.

    Args:
        place: the position of this rank.
        timeout_s: how long to wait for a rank that runs but does not answer. A dead rank is noticed at once.

    Raises:
        PeerError: the ranks could not form a group.
    """

    def __init__(self, place: Place, *, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._group: torch.distributed.ProcessGroup | None = None
        self._world: Any = None
        # All reductions use the same tensor, and call the backend directly. The tensor shares the memory of `values`.
        # A new tensor for each reduction, and the checks of `dist.all_reduce`, would take longer than the exchange
        # itself (docs/benchmarks.md).
        self._backend: Any = None
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp.MAX
        self.values = array("q", [0] * NUM_VALUES)
        self._tensor = torch.frombuffer(self.values, dtype=torch.int64)
        self._running: Reduction | None = None
        self.secret: bytes | None = None
        """Bytes that only the ranks of this job know; None in a job of one process."""
        if place.world_size > 1:
            # The destructor of torch's gloo group can hang: it waits for a thread, and the thread waits for the
            # interpreter's lock. Because of this reference, the destructor does not run when a script destroys its
            # process group. The process ends with `os._exit`, which runs no destructors.
            self._world = dist.group.WORLD
            group = self._new_group(None, "safepoint")
            self._group = group
            self._backend = group._get_backend(torch.device("cpu"))
            self._seal = Seal()
            self.secret = self._seal.derive(b"ranks")

    def start_maximum(self, values: list[int]) -> Reduction:
        """Begin an element-wise maximum of `NUM_VALUES` integers over all ranks.

        If the previous reduction is still running, this call first waits for its end, because all reductions share
        one array. Otherwise the call returns at once. The previous `Reduction` keeps its result.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._running is not None:
            self._running.wait()
        self.values[:] = array("q", values)
        work = None
        if self._group is not None:
            try:
                work = self._backend.allreduce([self._tensor], self._maximum)
            except RuntimeError as error:
                raise self.lost("vote") from error
        self._running = Reduction(self, work)
        return self._running

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value, in the order of the ranks.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._group is None:
            return [value]
        message = self._seal.close(value, self.place.rank)
        with self.raising_peer_error():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.place.world_size)]
            dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
            longest = int(max(sizes))
            blocks = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
            dist.all_gather(blocks, _tensor_of(message.ljust(longest, b"\0")), group=self._group)
            messages = [block.numpy()[: int(size)].tobytes() for block, size in zip(blocks, sizes, strict=True)]
            return self._seal.open_all(messages)

    def from_first(self, value: _T) -> _T:
        """Return the first rank's value on every rank. The `value` of other ranks is ignored.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if self._group is None:
            return value
        message = self._seal.close(value, 0) if self.place.is_first else b""
        with self.raising_peer_error():
            size = torch.tensor([len(message)])
            dist.broadcast(size, src=0, group=self._group)
            block = _tensor_of(message.ljust(int(size), b"\0"))
            dist.broadcast(block, src=0, group=self._group)
            return self._seal.open_all([block.numpy().tobytes()])[0]

    def to_first(self, block: torch.Tensor, source: int) -> None:
        """Send a block from rank `source` to the first rank.

        Only these two ranks call this method, with blocks of one size.

        Args:
            block: a uint8 tensor of one dimension on the CPU. Rank `source` sends the content of its block. The first
                rank receives the content in its own block.
            source: the rank that sends.

        Raises:
            PeerError: the other rank is gone or does not answer.
        """
        if source == 0 or self._group is None:
            return
        with self.raising_peer_error():
            if self.place.is_first:
                dist.recv(block, src=source, group=self._group)
            elif self.place.rank == source:
                dist.send(block, dst=0, group=self._group)

    def sender_among(self, ranks: Sequence[int]) -> Sender:
        """A `Sender` for transfers between `ranks`. Every rank of the job calls this method.

        Raises:
            PeerError: the ranks could not form a group.
        """
        return Sender(self, self._new_group(list(ranks), "safepoint-nodes"))

    def _new_group(self, ranks: list[int] | None, name: str) -> Any:
        timeout = datetime.timedelta(seconds=self._timeout_s)
        try:
            return dist.new_group(ranks, backend="gloo", timeout=timeout, group_desc=name)
        except (RuntimeError, ValueError) as error:
            raise self.lost("start") from error

    @contextlib.contextmanager
    def raising_peer_error(self) -> Generator[None]:
        """Raise `PeerError` for errors of the process group, and for messages that no rank has sent.

        The vote does not use this context manager. The vote runs in every step, and to enter a context manager takes
        too long.

        Raises:
            PeerError: a rank is gone or does not answer, or a message does not come from the rank that it names.
        """
        try:
            yield
        except SealError as error:
            raise PeerError(
                f"rank {self.place.rank} received {error}; the message was not read, and this rank ends",
                hint="another program reached a port of this rank; close that port to other pods (docs/security.md)",
            ) from error
        except RuntimeError as error:
            raise self.lost("exchange") from error

    def lost(self, during: str) -> PeerError:
        """The error to raise when another rank has ended or does not answer.

        Args:
            during: what this rank was doing: `start`, `vote` or `exchange`.
        """
        return PeerError(
            f"rank {self.place.rank} lost the connection to another rank during the {during}: that rank died, or did "
            f"not answer within {format_duration(self._timeout_s)}; this rank ends",
            hint="the cause is in the log of the rank that ended first",
        )


@functools.cache
def join_peers(place: Place, *, timeout_s: float) -> Peers:
    """Return the `Peers` of this process. Every call returns the same object."""
    return Peers(place, timeout_s=timeout_s)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
