"""Copies images (the bytes that files will have) into shared memory on a thread of its own, while training continues.

A thread that waits for the copy helps to copy. Each copy is one `memmove`, during which other threads run Python
code. A block is a piece of shared memory that holds images. The watermark of a block is the number of bytes, from the
start of the block, that have been copied. The keeper (the process that writes snapshots to disk) may write these
bytes already.
"""

import contextlib
import ctypes
import itertools
import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from safepoint.foundation import clock
from safepoint.snapshot.images.image import Image, Piece, Placed
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.staging.device_copy import DeviceCopier, DevicePlan
from safepoint.snapshot.staging.guard import Guard

_log = logging.getLogger("safepoint")
_version = operator.attrgetter("_version")
_CHUNK_BYTES = 32 << 20
"""The most bytes that a thread copies at a time. This takes about 4 ms."""
_OPERATION_S = 1.0
_LOOK_EVERY_S = 0.002
SMALL_PIECE_BYTES = 64 << 10
"""Smaller tensors are copied in batches, because the bookkeeping for a small tensor takes longer than its copy."""
_PASSING_BYTES = 1 << 20
"""A plan is dropped after the save if tensors of at least this total size may have been made for that save only.
If these tensors are smaller in total, the plan is kept, and the tensors stay in memory."""


class _Copy(NamedTuple):
    """One copy: from the address of a tensor to a place in an image."""

    place: int
    num_bytes: int
    address: int
    owner: int | None
    batch: tuple[tuple[int, int, int], ...] = ()
    """Small copies that are done together: (place, address, bytes) of each."""


class _Plan:
    """What is copied of one image, and when; valid until the image's pieces or their owners change.

    Args:
        pieces: the pieces of the image.
        guard: finds the tensors that only an optimizer changes. If None, any tensor may change at any time.
    """

    def __init__(self, pieces: Sequence[Piece], guard: Guard | None) -> None:
        self.pieces = pieces
        self.epoch = None if guard is None else guard.epoch
        self.unowned: list[Piece] = []
        """The pieces that no optimizer owns."""
        self.is_lasting = True
        """Whether the plan is kept after the save. A plan holds its tensors in memory, so it is dropped if they may
        have been made for one save only."""
        self.at_once: list[tuple[int, int, int]] = []
        self.copies: list[_Copy] = []
        self.guarded: dict[int, list[torch.Tensor]] = {}
        self.on_device = DevicePlan()
        small: dict[int, list[tuple[int, int, int]]] = {}
        for piece in pieces:
            self._add(piece, guard, small)
        # Batches come first: their bytes may be anywhere in the image, and the watermark must not pass a byte that is
        # not copied yet.
        self.copies[:0] = [_Copy(0, 0, 0, owner, tuple(batch)) for owner, batch in small.items()]
        self.counts = Counter(copy.owner for copy in self.copies)

    def _add(self, piece: Piece, guard: Guard | None, small: dict[int, list[tuple[int, int, int]]]) -> None:
        owner = guard.owner_of(piece) if guard is not None else None
        if owner is None:
            self.unowned.append(piece)
        if piece.device != "cpu":
            self.on_device.add(piece, is_owned=owner is not None)
            if owner is not None:
                self.guarded.setdefault(owner.number, []).extend(owner.tensors)
            return
        if owner is None and (guard is not None or piece.num_bytes < SMALL_PIECE_BYTES):
            self.at_once.append((piece.offset, piece.address, piece.num_bytes))
            return
        number = None
        if owner is not None:
            number = owner.number
            self.guarded.setdefault(number, []).extend(owner.tensors)
            if piece.num_bytes < SMALL_PIECE_BYTES:
                small.setdefault(number, []).append((piece.offset, piece.address, piece.num_bytes))
                return
        for start in range(0, piece.num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, piece.num_bytes - start)
            self.copies.append(_Copy(piece.offset + start, length, piece.address + start, number))


@dataclass(slots=True, kw_only=True)
class Work:
    """One snapshot of this rank.

    Args:
        placed: the images, with their places in memory.
        on_begin: called on the copying thread before the first copy.
        on_end: called on the copying thread at the end. The argument is True if the copy is good. It is False if
            tensors were changed while they were copied, or if a device has failed.
    """

    placed: Sequence[Placed]
    on_begin: Callable[[], None]
    on_end: Callable[[bool], None]
    copies: list[tuple[Placed, _Copy]] = field(default_factory=list[tuple[Placed, _Copy]])
    is_done: bytearray = field(default_factory=bytearray)
    versions: dict[int, list[tuple[list[torch.Tensor], list[int]]]] = field(
        default_factory=dict[int, list[tuple[list[torch.Tensor], list[int]]]]
    )
    unmarked: set[int] = field(default_factory=set[int])
    """The numbers of the blocks whose watermark stays 0, because a device copies into them."""
    is_torn: bool = False
    thread: int = field(default_factory=threading.get_ident)
    """The number of the training's thread."""
    began_s: float = field(default_factory=clock.monotonic_s)
    head: int = 0
    tail: int = 0
    """The copies from `head` to `tail` have not begun. The copying thread takes the first of them next. A thread that
    helps takes the last."""
    pending: Counter[int | None] = field(default_factory=Counter[int | None])
    is_ended: bool = False


class Stager:
    """Copies one snapshot after the other.

    Args:
        set_mark: sets the watermark of a block: called with the block and the number of bytes.
    """

    def __init__(self, set_mark: Callable[[Block, int], None]) -> None:
        self._set_mark = set_mark
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._is_closed = False
        self._is_waited_for = False
        """Whether the training's thread waits for the copy. Then that thread changes no tensor."""
        self.waited_s = 0.0
        """How long optimizers have waited for the last snapshot."""
        self._plans: dict[str, _Plan] = {}
        self._seen: dict[str, dict[int, StorageWeakRef]] = {}
        """Path of a file → the storages of its tensors that no optimizer owned when the file's plan was last made."""
        self._fixed: dict[int, tuple[tuple[int, bytes], ...]] = {}
        self._devices = DeviceCopier()
        self._thread = threading.Thread(target=self._run, name="safepoint-stager", daemon=True)
        self._thread.start()

    def stage(self, work: Work, guard: Guard | None) -> frozenset[str]:
        """Copy at once what may change at any time, and begin to copy the rest.

        The last snapshot must have been copied completely.

        Args:
            work: what to copy.
            guard: finds the tensors that only an optimizer changes. If None, this call returns when everything is
                copied.

        Returns:
            The paths of the files with tensors that may have been made for this snapshot only. The stager holds these
            tensors until the copy ends.
        """
        if guard is not None:
            guard.refresh(has_new_pieces=not all(self._is_planned(placed.image) for placed in work.placed))
        self.waited_s = 0.0
        for placed in work.placed:
            self._set_mark(placed.block, 0)
        for placed in work.placed:
            self._plan(work, placed, guard)
        work.tail = len(work.copies)
        work.is_done = bytearray(work.tail)
        plans = [(placed, self._plans[placed.image.path]) for placed in work.placed if placed.image.pieces]
        self._devices.begin([(placed, plan.on_device) for placed, plan in plans if plan.on_device.devices()])
        passing = frozenset(path for path, plan in self._plans.items() if not plan.is_lasting)
        with self._changed:
            self._work = work
            self._changed.notify_all()
        if guard is None:
            self.wait()
        return passing

    def _is_planned(self, image: Image) -> bool:
        plan = self._plans.get(image.path)
        return not image.pieces or (plan is not None and plan.pieces is image.pieces)

    def _plan_of(self, image: Image, guard: Guard | None) -> _Plan:
        plan = self._plans.get(image.path)
        epoch = None if guard is None else guard.epoch
        if plan is None or plan.pieces is not image.pieces or plan.epoch != epoch:
            plan = self._plans[image.path] = _Plan(image.pieces, guard)
            plan.is_lasting = self._is_lasting(image.path, plan)
        return plan

    def _is_lasting(self, path: str, plan: _Plan) -> bool:
        """Whether the tensors that no optimizer owns existed at the last save already, or are small in total.

        Weights that are not trained keep their storages between saves. A tensor that was made for a save has a new
        storage.
        """
        if sum(piece.num_bytes for piece in plan.unowned) < _PASSING_BYTES:
            return True
        storages = [_storage_of(piece.owner) for piece in plan.unowned]
        # While a weak reference to a storage exists, no other storage gets the same number.
        now = {int(storage._cdata): StorageWeakRef(storage) for storage in storages}
        before, self._seen[path] = self._seen.get(path, {}), now
        return now.keys() <= before.keys()

    def _plan(self, work: Work, placed: Placed, guard: Guard | None) -> None:
        if not placed.image.pieces:
            return
        plan = self._plan_of(placed.image, guard)
        if plan.on_device.devices():
            # The progress of copies from a device is not known before their end. Until then the watermark stays 0,
            # and the keeper does not read the block.
            work.unmarked.add(placed.block.number)
        begin = placed.block.address + placed.offset
        for offset, address, num_bytes in plan.at_once:
            ctypes.memmove(begin + offset, address, num_bytes)
        work.copies.extend(zip(itertools.repeat(placed), plan.copies))
        work.pending += plan.counts
        for owner, tensors in plan.guarded.items():
            work.versions.setdefault(owner, []).append((tensors, list(map(_version, tensors))))

    # ---- waiting ----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: int | None) -> None:
        """The optimizer with this number is about to step: wait until its tensors have been copied, and help to copy.

        Args:
            optimizer: see `Guard`; None waits for everything.
        """
        work = self._work
        if work is None:
            return
        began_s = clock.monotonic_s()
        self._devices.before_step()
        if optimizer is None or work.pending.get(optimizer):
            self._help(work)
            with self._changed:
                self._changed.wait_for(lambda: not self._is_pending(work, optimizer))
        # Compare the versions now, because the step that follows changes them.
        self._verify(work, list(work.versions) if optimizer is None else [optimizer])
        self.waited_s += clock.monotonic_s() - began_s

    def wait(self) -> None:
        """Wait until everything has been copied and the keeper is notified, and help to copy."""
        work = self._work
        if work is None:
            return
        self._is_waited_for = threading.get_ident() == work.thread
        try:
            self._help(work)
            with self._changed:
                self._changed.wait_for(lambda: work.is_ended)
        finally:
            self._is_waited_for = False

    def _verify(self, work: Work, optimizers: Sequence[int]) -> None:
        """Compare the versions of the copied tensors with their versions at the time of the snapshot."""
        with self._changed:
            for optimizer in optimizers:
                # `pop`, because the tensors of each optimizer are compared only once.
                versions = work.versions.pop(optimizer, [])
                work.is_torn |= any(list(map(_version, tensors)) != then for tensors, then in versions)

    def _is_pending(self, work: Work, optimizer: int | None) -> bool:
        if work.is_ended:
            return False
        counts = work.pending.values() if optimizer is None else [work.pending.get(optimizer, 0)]
        return any(counts)

    def _help(self, work: Work) -> None:
        """Help to copy, from the last copy backwards. The copying thread goes forwards, so the watermark advances."""
        while True:
            with self._changed:
                if work.head >= work.tail:
                    return
                work.tail -= 1
                index = work.tail
            self._copy(work, index)

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._is_closed)
                work = self._work
            if work is None:
                return
            try:
                self._do(work)
            except Exception:  # noqa: BLE001  otherwise threads that wait for this copy would wait forever
                _log.exception("a snapshot is lost: it could not be copied")
                with contextlib.suppress(Exception):
                    work.on_end(False)
            finally:
                self._end(work)
                del work  # while this thread waits, it must not hold the tensors and the memory of the last snapshot

    def _do(self, work: Work) -> None:
        self._devices.go_on()
        for placed in work.placed:
            self._write_literals(placed)
        work.on_begin()
        marked = 0
        while True:
            with self._changed:
                if work.head >= work.tail:
                    break
                index = work.head
                work.head += 1
            self._copy(work, index)
            marked = self._mark(work, marked)
        with self._changed:
            self._changed.wait_for(lambda: all(work.is_done))
        work.is_torn |= not self._devices.finish()
        self._wait_for_operation(work)
        self._verify(work, list(work.versions))
        work.on_end(not work.is_torn)

    def _wait_for_operation(self, work: Work) -> None:
        """Wait for the end of the operation that the training's thread executed when the last byte was copied.

        torch increments the version of a tensor when the operation that changes it ends. So the change by an
        operation that still runs is not visible in the version. If the end of the operation cannot be observed, this
        call waits four times as long as the copy took, and one second more: an operation on the same bytes takes
        about as long as their copy.
        """
        passed = threading.Event()
        deadline_s = clock.monotonic_s() + _OPERATION_S + 4 * (clock.monotonic_s() - work.began_s)
        if work.versions:
            when_between_operations(work.thread, passed.set)
        while work.versions and not self._is_waited_for and not passed.is_set():
            if clock.monotonic_s() >= deadline_s:
                return
            passed.wait(_LOOK_EVERY_S)

    def _end(self, work: Work) -> None:
        with self._changed:
            self._plans = {path: plan for path, plan in self._plans.items() if plan.is_lasting}
            work.is_ended = True
            self._work = None
            self._changed.notify_all()

    def _write_literals(self, placed: Placed) -> None:
        image, block = placed.image, placed.block
        literals = image.literals
        if placed.offset or self._fixed.get(block.number) is not image.fixed:
            literals += image.fixed
        # An archive has hundreds of fixed literals. If the block's last image had the same literals, the block
        # contains them already.
        self._fixed[block.number] = image.fixed if placed.offset == 0 else ()
        for offset, content in literals:
            block.write(placed.offset + offset, content)

    def _copy(self, work: Work, index: int) -> None:
        placed, copy = work.copies[index]
        is_whole = False
        try:
            for place, address, num_bytes in copy.batch or ((copy.place, copy.address, copy.num_bytes),):
                ctypes.memmove(placed.block.address + placed.offset + place, address, num_bytes)
            is_whole = True
        finally:  # report the copy as done even after Ctrl-C, because other threads wait for it
            with self._changed:
                work.is_torn |= not is_whole
                work.is_done[index] = 1
                work.pending[copy.owner] -= 1
                self._changed.notify_all()

    def _mark(self, work: Work, marked: int) -> int:
        """Set the watermarks up to the first copy that is not done. Returns the index of this copy."""
        copies = work.copies
        while marked < len(copies) and work.is_done[marked]:
            placed = copies[marked][0]
            marked += 1
            if placed.block.number in work.unmarked:
                continue
            is_last = marked == len(copies) or copies[marked][0] is not placed
            end = placed.image.size_bytes if is_last else copies[marked][1].place
            self._set_mark(placed.block, placed.offset + end)
        return marked

    def close(self) -> None:
        """End the thread after the copy in progress."""
        self.wait()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()


def _storage_of(owner: Any) -> Any:
    return owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner


# ---- the end of an operation -------------------------------------------------------------------------------------

_call_back: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_numbers = itertools.count(1)
_waiting: dict[int, Callable[[], None]] = {}


@_call_back
def _arrived(number: int | None) -> int:
    call = _waiting.pop(number or 0, None)
    if call is not None:
        call()
    return 0


def when_between_operations(thread: int, call: Callable[[], None]) -> None:
    """Call `call` on `thread` when that thread next goes from one Python instruction to another.

    If that is impossible, `call` is never called.

    Args:
        thread: the number of the thread; only the main thread is supported.
        call: a function that returns soon, and raises nothing.
    """
    if thread != threading.main_thread().ident:
        return
    number = next(_numbers)
    _waiting[number] = call
    if ctypes.pythonapi.Py_AddPendingCall(_arrived, ctypes.c_void_p(number)) != 0:  # too many calls are pending
        del _waiting[number]
