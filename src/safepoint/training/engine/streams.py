"""Collects the files of a model whose weights are spread over the ranks: the first rank receives the bytes in order.

The first rank requests one range of a weight after another, and the rank that holds the range sends its bytes. While
the store is slow, the first rank sends empty messages, so that the other ranks do not time out. When an upload is
repeated, the first rank requests the same ranges again.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from safepoint.errors import PeerError, SaveError
from safepoint.storage.store import Content, Sink
from safepoint.training.collective.peers import Peers

BLOCK_BYTES = 8 << 20
_ALIVE_EVERY_S = 20.0
_T = TypeVar("_T")


class WeightRange(NamedTuple):
    """A range of bytes of a weight that one rank holds.

    Args:
        rank: the rank that holds the range.
        name: the name of the weight.
        begin: the offset, in the weight, of the first byte of the range.
        num_bytes: the length of the range.
    """

    rank: int
    name: str
    begin: int
    num_bytes: int


class StreamedFile(NamedTuple):
    """A file of the model.

    Args:
        path: relative to the model's folder.
        size_bytes: the size of the whole file.
        parts: the content of the file, in order. Each part is either bytes or a range that a rank holds.
    """

    path: str
    size_bytes: int
    parts: Sequence[bytes | WeightRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The large files of a finished model.

    Args:
        files: used on the first rank only.
        bytes_of: (name, begin, number of bytes) → the bytes that this rank holds, as uint8 on the CPU.
        step: the step of the checkpoint that has the same weights; None if there is no such checkpoint.
    """

    files: tuple[StreamedFile, ...]
    bytes_of: Callable[[str, int, int], torch.Tensor]
    step: int | None


_CHECK, _END = "check", "end"
"""Commands of the first rank to all ranks: `_CHECK` gathers their errors, `_END` ends `follow`."""


def follow(peers: Peers, streams: Streams) -> None:
    """Send the first rank the ranges that it requests, until it sends the `end` command.

    Raises:
        PeerError: a rank is gone.
    """
    problem = ""
    while True:
        order: WeightRange | str | None = peers.from_first(cast("WeightRange | str | None", None))
        if isinstance(order, WeightRange):
            if order.rank == peers.place.rank:
                problem = _send(peers, streams, order) or problem
        elif order == _CHECK:
            peers.gather(problem)
        elif order == _END:
            return


def _send(peers: Peers, streams: Streams, requested: WeightRange) -> str:
    problem = ""
    try:
        block = streams.bytes_of(requested.name, requested.begin, requested.num_bytes)
    except Exception as error:  # noqa: BLE001  reported to the first rank, which waits for the bytes
        problem = f"rank {requested.rank}: {type(error).__name__}: {error}"
        block = torch.zeros(requested.num_bytes, dtype=torch.uint8)
    peers.to_first(block, requested.rank)
    return problem


class Leader:
    """Runs work on a thread of the first rank, for example an upload of bytes that other ranks hold.

    The leader requests these bytes from the other ranks, which call `follow`.

    Args:
        peers: all ranks.
        streams: the files, and the bytes that this rank holds.
        patience_s: how long the other ranks wait for a message from this rank, in seconds.
    """

    def __init__(self, peers: Peers, streams: Streams, *, patience_s: float) -> None:
        self._peers = peers
        self._streams = streams
        self._every_s = min(_ALIVE_EVERY_S, patience_s / 3)
        self._requests = queue.SimpleQueue[WeightRange | str]()
        self._answers = queue.SimpleQueue[object]()
        size = BLOCK_BYTES if peers.place.world_size > 1 else 0
        self._buffer = torch.empty(size, dtype=torch.uint8)

    def lead(self, work: Callable[[], _T]) -> _T:
        """Do the work, which may call `content_of` and `check`. The other ranks call `follow` at the same time.

        Returns:
            What the work returns.

        Raises:
            PeerError: a rank is gone. The call does not wait for the work's thread, because this rank ends.
            BaseException: what the work raises.
        """
        running: Future[_T] = Future()

        def run() -> None:
            try:
                running.set_result(work())
            except BaseException as error:  # noqa: BLE001  `lead` raises it
                running.set_exception(error)
            self._requests.put(_END)

        threading.Thread(target=run, name="safepoint-final", daemon=True).start()
        try:
            self._serve()
        except BaseException:
            self._answers.put(PeerError("the connection between the ranks failed"))
            raise
        return running.result()

    def _serve(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=self._every_s)
            except queue.Empty:
                self._peers.from_first(None)
                continue
            self._peers.from_first(request)
            if isinstance(request, WeightRange):
                block = self._buffer[: request.num_bytes]
                self._peers.to_first(block, request.rank)
                self._answers.put(block)
            elif request == _CHECK:
                self._answers.put(self._peers.gather(""))
            else:
                return

    def _ask(self, request: WeightRange | str) -> object:
        self._requests.put(request)
        answer = self._answers.get()
        if isinstance(answer, PeerError):
            raise answer
        return answer

    def content_of(self, file: StreamedFile) -> Content:
        """The file's bytes; other ranks send some of them. Read the bytes only on the thread that runs the work."""

        def write_to(sink: Sink) -> None:
            for part in file.parts:
                if isinstance(part, bytes):
                    sink(memoryview(part))
                    continue
                for begin in range(part.begin, part.begin + part.num_bytes, BLOCK_BYTES):
                    count = min(BLOCK_BYTES, part.begin + part.num_bytes - begin)
                    sink(self._block(WeightRange(part.rank, part.name, begin, count)).numpy().data)

        return Content(size_bytes=file.size_bytes, write_to=write_to)

    def _block(self, requested: WeightRange) -> torch.Tensor:
        if requested.rank == 0:
            return self._streams.bytes_of(requested.name, requested.begin, requested.num_bytes)
        return cast("torch.Tensor", self._ask(requested))

    def check(self) -> None:
        """Raise an error if a rank could not read the bytes that the first rank requested.

        Raises:
            SaveError: a rank could not read the bytes.
        """
        problems = [text for text in cast("list[str]", self._ask(_CHECK)) if text]
        if problems:
            raise SaveError("; ".join(problems))
