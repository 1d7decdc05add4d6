"""Copies images into memory beside the training: a thread, and whoever has to wait for it, who helps.

A copy is one call that leaves the interpreter to other threads. The watermark of a block says how far the copies have
come without a gap, so that the keeper can follow.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.snapshot.block import Block
from holdfast.snapshot.device_copy import DeviceCopier
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.image import Image, Piece

_CHUNK_BYTES = 32 << 20
"""What one thread copies at a time: 4 ms."""
_AT_ONCE_BYTES = 64 << 10
"""Smaller tensors are copied at the boundary, which takes less time than to keep books about them."""


@dataclass(slots=True)
class _Copy:
    block: Block
    place: int
    num_bytes: int
    address: int
    owner: int | None
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An image and where it goes.

    Args:
        image: what.
        block: into which block.
        offset: where in it.
    """

    image: Image
    block: Block
    offset: int


@dataclass(slots=True, kw_only=True)
class Work:
    """One snapshot of this rank.

    Args:
        placed: the images.
        on_begin: called on the copying thread before the first copy.
        on_end: called on the copying thread when all is copied; with False when tensors were changed meanwhile.
    """

    placed: Sequence[Placed]
    on_begin: Callable[[], None]
    on_end: Callable[[bool], None]
    copies: list[_Copy] = field(default_factory=list[_Copy])
    versions: dict[int, list[tuple[torch.Tensor, int]]] = field(
        default_factory=dict[int, list[tuple[torch.Tensor, int]]]
    )
    is_torn: bool = False
    head: int = 0
    tail: int = 0
    pending: dict[int | None, int] = field(default_factory=dict[int | None, int])
    is_ended: bool = False


class Stager:
    """Copies one snapshot after the other.

    Args:
        set_mark: told (block, bytes that are there without a gap).
    """

    def __init__(self, set_mark: Callable[[Block, int], None]) -> None:
        self._set_mark = set_mark
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._is_closed = False
        self._devices = DeviceCopier()
        self._thread = threading.Thread(target=self._run, name="holdfast-stager", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied."""
        return self._work is None

    def stage(self, work: Work, guard: Guard | None) -> None:
        """Copy at once what may change at any time, and begin to copy the rest; only when idle.

        Args:
            work: what to copy.
            guard: knows what only optimizers change; without one everything is copied before this returns.
        """
        if guard is not None:
            guard.refresh()
        for placed in work.placed:
            self._set_mark(placed.block, 0)
        for placed in work.placed:
            for piece in placed.image.pieces:
                self._plan(work, placed, piece, guard)
        work.tail = len(work.copies)
        for copy in work.copies:
            work.pending[copy.owner] = work.pending.get(copy.owner, 0) + 1
        self._devices.begin(work.placed, guard)
        with self._changed:
            self._work = work
            self._changed.notify_all()
        if guard is None:
            self.wait()

    def _plan(self, work: Work, placed: Placed, piece: Piece, guard: Guard | None) -> None:
        if piece.device != "cpu":
            return  # the device's own engine copies it
        place = placed.block.address + placed.offset + piece.offset
        owner = guard.owner_of(piece.base) if guard is not None else None
        if piece.num_bytes < _AT_ONCE_BYTES or (owner is None and guard is not None):
            ctypes.memmove(place, piece.address, piece.num_bytes)
            return
        number = None
        if owner is not None:
            number = owner[0]
            work.versions.setdefault(number, []).append((owner[1], owner[1]._version))
        for start in range(0, piece.num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, piece.num_bytes - start)
            work.copies.append(_Copy(placed.block, place + start, length, piece.address + start, number))

    # ---- waiting ----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: int | None) -> None:
        """The optimizer with this number is about to step: wait until what it owns has been copied, and help.

        Args:
            optimizer: see `Guard`; None waits for everything.
        """
        work = self._work
        if work is None:
            return
        self._devices.before_step()
        if optimizer is None or work.pending.get(optimizer):
            self._help(work)
            with self._changed:
                self._changed.wait_for(lambda: not self._is_pending(work, optimizer))
        # Now, because the step that follows changes the versions itself.
        self._verify(work, list(work.versions) if optimizer is None else [optimizer])

    def wait(self) -> None:
        """Wait until everything has been copied and the keeper knows, and help."""
        work = self._work
        if work is None:
            return
        self._help(work)
        with self._changed:
            self._changed.wait_for(lambda: work.is_ended)

    def _verify(self, work: Work, optimizers: Sequence[int]) -> None:
        """Compare the versions of what has been copied with those of the boundary."""
        for optimizer in optimizers:
            with self._changed:
                versions = work.versions.pop(optimizer, [])
                work.is_torn |= any(tensor._version != version for tensor, version in versions)

    def _is_pending(self, work: Work, optimizer: int | None) -> bool:
        if work.is_ended:
            return False
        counts = work.pending.values() if optimizer is None else [work.pending.get(optimizer, 0)]
        return any(counts)

    def _help(self, work: Work) -> None:
        """From the other end, so that the keeper's watermark goes on without a gap."""
        while True:
            with self._changed:
                if work.head >= work.tail:
                    return
                work.tail -= 1
                copy = work.copies[work.tail]
            self._copy(work, copy)

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._is_closed)
                work = self._work
            if work is None:
                return
            self._do(work)

    def _do(self, work: Work) -> None:
        for placed in work.placed:
            for offset, content in placed.image.literals:
                placed.block.write(placed.offset + offset, content)
        work.on_begin()
        marked = 0
        while True:
            with self._changed:
                if work.head >= work.tail:
                    break
                copy = work.copies[work.head]
                work.head += 1
            self._copy(work, copy)
            marked = self._mark(work, marked)
        with self._changed:
            self._changed.wait_for(lambda: all(copy.is_done for copy in work.copies))
        self._devices.finish()
        self._verify(work, list(work.versions))
        work.on_end(not work.is_torn)
        with self._changed:
            work.is_ended = True
            self._work = None
            self._changed.notify_all()

    def _copy(self, work: Work, copy: _Copy) -> None:
        ctypes.memmove(copy.place, copy.address, copy.num_bytes)
        with self._changed:
            copy.is_done = True
            work.pending[copy.owner] -= 1
            self._changed.notify_all()

    def _mark(self, work: Work, marked: int) -> int:
        """Say how far the copies have come without a gap."""
        copies = work.copies
        while marked < len(copies) and copies[marked].is_done:
            copy = copies[marked]
            marked += 1
            is_last = marked == len(copies) or copies[marked].block is not copy.block
            if not is_last:
                self._set_mark(copy.block, copies[marked].place - copy.block.address)
        return marked

    def close(self) -> None:
        """End the thread, after what is being copied."""
        self.wait()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()


__all__ = ["Placed", "Stager", "Work"]
