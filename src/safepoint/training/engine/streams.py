"""A model whose bytes are on all ranks, as files that their writer receives in order.

The first rank requests one stretch after another, and the rank that has it sends it. While a store is slow, the first
rank reports that it is alive. When it starts a file again, it requests the same stretches again.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from safepoint.errors import PeerError, SaveError
from safepoint.storage.store import Content, Sink
from safepoint.training.collective.peers import Peers

BLOCK_BYTES = 8 << 20
_SAY_SOMETHING_EVERY_S = 20.0
_T = TypeVar("_T")


class Stretch(NamedTuple):
    """Bytes of a weight that one rank has.

    Args:
        rank: which.
        name: of the weight.
        begin: the first of them in the weight.
        num_bytes: how many.
    """

    rank: int
    name: str
    begin: int
    num_bytes: int


class StreamedFile(NamedTuple):
    """A file of the model.

    Args:
        path: within the model.
        size_bytes: of the whole file.
        parts: what it consists of, in order.
    """

    path: str
    size_bytes: int
    parts: Sequence[bytes | Stretch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The large files of a finished model.

    Args:
        files: on the first rank; the others need not know them.
        bytes_of: (name, begin, number of bytes) → what this rank has, as uint8 on the CPU.
        step: of the checkpoint that has the same weights; None when there is none.
    """

    files: tuple[StreamedFile, ...]
    bytes_of: Callable[[str, int, int], torch.Tensor]
    step: int | None


class _Word(NamedTuple):
    """What the first rank says to all: `tell` what has gone wrong, or that it is the `end`."""

    text: str


_TELL, _END = _Word("tell"), _Word("end")


def follow(peers: Peers, streams: Streams) -> None:
    """Give the first rank what it wants, until it says that it has ended.

    Raises:
        PeerError: a rank is gone.
    """
    problem = ""
    while True:
        order: Stretch | _Word | None = peers.from_first(cast("Stretch | _Word | None", None))
        if isinstance(order, Stretch):
            if order.rank == peers.place.rank:
                problem = _send(peers, streams, order) or problem
        elif order == _TELL:
            peers.gather(problem)
        elif order == _END:
            return


def _send(peers: Peers, streams: Streams, stretch: Stretch) -> str:
    problem = ""
    try:
        block = streams.bytes_of(stretch.name, stretch.begin, stretch.num_bytes)
    except Exception as error:  # noqa: BLE001  reported to the first rank, which waits for it
        problem = f"rank {stretch.rank}: {type(error).__name__}: {error}"
        block = torch.zeros(stretch.num_bytes, dtype=torch.uint8)
    peers.to_first(block, stretch.rank)
    return problem


class Leader:
    """The first rank's side: some work on a thread of its own, and what it wants of the others.

    Args:
        peers: all ranks.
        streams: of this rank.
        patience_s: how long the others wait for this one.
    """

    def __init__(self, peers: Peers, streams: Streams, *, patience_s: float) -> None:
        self._peers = peers
        self._streams = streams
        self._every_s = min(_SAY_SOMETHING_EVERY_S, patience_s / 3)
        self._wanted = queue.SimpleQueue[Stretch | _Word]()
        self._given = queue.SimpleQueue[object]()
        size = BLOCK_BYTES if peers.place.world_size > 1 else 0
        self._buffer = torch.empty(size, dtype=torch.uint8)

    def lead(self, work: Callable[[], _T]) -> _T:
        """Do the work, in which `content_of` and `check` may be called; the other ranks follow.

        Returns:
            What the work returns.

        Raises:
            PeerError: a rank is gone; the work is left to itself, because this rank ends.
            BaseException: what the work raises.
        """
        outcome: list[_T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001  it is raised where somebody waits for it
                failure.append(error)
            self._wanted.put(_END)

        threading.Thread(target=run, name="safepoint-final", daemon=True).start()
        try:
            self._serve()
        except BaseException:
            self._given.put(PeerError("the ranks no longer work together"))
            raise
        if failure:
            raise failure[0]
        return outcome[0]

    def _serve(self) -> None:
        while True:
            try:
                wanted = self._wanted.get(timeout=self._every_s)
            except queue.Empty:
                self._peers.from_first(None)
                continue
            self._peers.from_first(wanted)
            if isinstance(wanted, Stretch):
                block = self._buffer[: wanted.num_bytes]
                self._peers.to_first(block, wanted.rank)
                self._given.put(block)
            elif wanted == _TELL:
                self._given.put(self._peers.gather(""))
            else:
                return

    def _ask(self, what: Stretch | _Word) -> object:
        self._wanted.put(what)
        given = self._given.get()
        if isinstance(given, PeerError):
            raise given
        return given

    def content_of(self, file: StreamedFile) -> Content:
        """The file's bytes, to be poured on the thread that works."""

        def pour(sink: Sink) -> None:
            for part in file.parts:
                if isinstance(part, bytes):
                    sink(memoryview(part))
                    continue
                for begin in range(part.begin, part.begin + part.num_bytes, BLOCK_BYTES):
                    count = min(BLOCK_BYTES, part.begin + part.num_bytes - begin)
                    sink(self._block(Stretch(part.rank, part.name, begin, count)).numpy().data)

        return Content(size_bytes=file.size_bytes, pour=pour)

    def _block(self, stretch: Stretch) -> torch.Tensor:
        if stretch.rank == 0:
            return self._streams.bytes_of(stretch.name, stretch.begin, stretch.num_bytes)
        return cast("torch.Tensor", self._ask(stretch))

    def check(self) -> None:
        """See that every rank could give what it was asked for.

        Raises:
            SaveError: one could not.
        """
        problems = [text for text in cast("list[str]", self._ask(_TELL)) if text]
        if problems:
            raise SaveError("; ".join(problems))
