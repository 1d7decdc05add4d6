"""Copies from CUDA devices into pinned memory, on separate streams while training continues.

The copies begin after the work that is queued in the training's current stream (the computing stream). The work of
the next optimizer step waits for the copies, on the device; the host does not wait. The copies do not wait for work
on other streams, unless the computing stream waits for that work.

Code that runs on a thread of this module selects its device explicitly. A new thread uses device 0, where its first
call would create a context. In every rank, that would take half a gigabyte of the memory of device 0.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from safepoint.foundation.units import format_bytes
from safepoint.snapshot.images.image import Piece, Placed
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.staging.guard import Guard

_log = logging.getLogger("safepoint")
_cuda: Any = torch.cuda
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class DeviceCopier:
    """Copies the CUDA tensors of one snapshot after the other; does nothing for a snapshot without CUDA tensors."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._done: tuple[tuple[int, Any], ...] = ()
        """(device, the event after its last copy). The tuple is replaced as a whole, because two threads read it."""
        self._unpinned: set[int] = set()

    def begin(self, placed: Sequence[Placed], guard: Guard | None) -> None:
        """Start the copies. The computing stream waits for the copies of tensors that no optimizer owns.

        Args:
            placed: the images. They must exist until `finish`, because they keep the tensors in memory.
            guard: see `Stager.stage`.
        """
        by_device: dict[int, list[tuple[Placed, Piece]]] = {}
        for place in placed:
            for piece in place.image.pieces:
                if piece.device == "cuda":
                    by_device.setdefault(piece.owner.device.index, []).append((place, piece))
        done: list[tuple[int, Any]] = []
        for index, sources in by_device.items():
            for block in {place.block.number: place.block for place, _ in sources}.values():
                self._pin(block, index)
            try:
                done.append((index, self._begin_on(index, sources, guard)))
            except BaseException:
                # The caller reuses the memory, into which copies may still be running.
                for stream in self._streams.values():
                    with contextlib.suppress(RuntimeError):
                        stream.synchronize()
                raise
        self._done = tuple(done)

    def _begin_on(self, index: int, sources: list[tuple[Placed, Piece]], guard: Guard | None) -> Any:
        """Start the copies of one device; returns the event at their end."""
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = _cuda.Stream(device=index)
        computing = _cuda.current_stream(index)
        stream.wait_stream(computing)
        unowned: list[tuple[Placed, Piece]] = []
        owned: list[tuple[Placed, Piece]] = []
        for one in sources:
            (unowned if guard is None or guard.owner_of(one[1]) is None else owned).append(one)
        event: Any = None
        with _cuda.stream(stream):
            # The unowned pieces come first, because the computing stream waits for their copies.
            for these in (unowned, owned):
                for place, piece in these:
                    source = _bytes_of(piece.owner, piece.address, piece.num_bytes)
                    target = _host_bytes(place.block, place.offset + piece.offset, piece.num_bytes)
                    target.copy_(source, non_blocking=True)
                if these:
                    # With `blocking`, a thread that waits for the event sleeps, and uses no processor time.
                    event = _cuda.Event(blocking=True)
                    event.record(stream)
                    if these is unowned:
                        computing.wait_event(event)
        return event

    def _pin(self, block: Block, index: int) -> None:
        if block.number in self._unpinned or pin(block, index):
            return
        if not self._unpinned:
            _log.warning(
                "%s of host memory cannot be pinned for cuda:%s: training waits while the data of a save is copied",
                format_bytes(block.length_bytes),
                index,
            )
        self._unpinned.add(block.number)

    def before_step(self) -> None:
        """Let all later work of the computing streams wait for the copies, on the device."""
        for index, event in self._done:
            _cuda.current_stream(index).wait_event(event)

    def finish(self) -> bool:
        """Wait on the host until the copies have arrived; returns False if a device has failed."""
        done = self._done
        try:
            for index, event in done:
                with _cuda.device(index):
                    event.synchronize()
        except RuntimeError as error:  # the training's next call on that device raises the same error
            _log.warning("a snapshot is lost, because its device has failed: %s", error)
            return False
        finally:
            self._done = ()
        return True


def pin(block: Block, index: int) -> bool:
    """Lock a block's pages for the copy engine of device `index`; returns whether they are locked.

    Copies into pages that are not locked work too, but synchronously and at a fraction of the speed.
    """
    if block.pinned_bytes and block.pinned_bytes >= block.length_bytes:
        return True
    block.unpin()
    cudart, pid = _cuda.cudart(), os.getpid()
    address, num_bytes = block.address, block.length_bytes
    codes: list[int] = []

    def register() -> None:
        with _cuda.device(index):
            codes.append(int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE)))

    def unregister() -> None:
        # A forked child cannot use the device. When the interpreter ends, the driver unlocks all pages.
        if os.getpid() == pid and not sys.is_finalizing():
            with _cuda.device(index):
                cudart.cudaHostUnregister(address)

    # On another thread: CUDA stores an error in the thread that made the call, and the next kernel launch on that
    # thread would raise it.
    thread = threading.Thread(target=register, name="safepoint-pin")
    thread.start()
    thread.join()
    if codes != [0]:
        return False
    block.note_pinned(unregister)
    return True


def _bytes_of(owner: Any, address: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` at `address` in the storage of `owner`, on its device, as a uint8 tensor."""
    storage: Any = owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage, address - storage.data_ptr(), (num_bytes,), (1,))  # pyright: ignore[reportUnknownMemberType]
    return view


def _host_bytes(block: Block, start: int, length: int) -> torch.Tensor:
    return torch.frombuffer(block.view(start, length), dtype=torch.uint8)
