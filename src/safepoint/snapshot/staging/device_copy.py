"""Copies from CUDA devices into pinned memory, on separate streams while training continues.

The targets of the copies are images: the bytes that files will have, in memory.

The copies begin after the work that is queued in the training's current stream (the computing stream). The work of
the next optimizer step waits for the copies, on the device; the host does not wait. The copies do not wait for work
on other streams, unless the computing stream waits for that work.

Code that runs on a thread of this module selects its device explicitly. A new thread uses device 0, where its first
call would create a context. In every rank, that would take half a gigabyte of the memory of device 0.
"""

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from safepoint.foundation.units import format_bytes
from safepoint.snapshot.images.image import Piece, Placed
from safepoint.snapshot.memory.block import Block

_log = logging.getLogger("safepoint")
_cuda: Any = torch.cuda
_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MOST_TARGETS = 16
"""How many lists of targets a plan holds. A few suffice, because a file alternates between the blocks of two
snapshots."""


class DevicePlan:
    """What is copied from devices into one image; valid until the image's pieces or their owners change.

    The plan holds the tensors that the device copies from and to, because making them takes longer than starting a
    copy.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, bool], list[Piece]] = {}
        """(device, whether an optimizer owns the pieces) → the pieces."""
        self._sources: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._targets: dict[tuple[int, int, int, int, bool], list[torch.Tensor]] = {}

    def add(self, piece: Piece, *, is_owned: bool) -> None:
        """Add a piece on a device."""
        self._pieces.setdefault((piece.owner.device.index, is_owned), []).append(piece)

    def devices(self) -> set[int]:
        """The devices of the pieces."""
        return {index for index, _ in self._pieces}

    def copies(self, place: Placed, index: int, *, is_owned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two lists of uint8 tensors: the targets in `place`, and the source of each target, on device `index`."""
        pieces = self._pieces.get((index, is_owned), [])
        if (index, is_owned) not in self._sources:
            self._sources[index, is_owned] = [_bytes_of(one.owner, one.address, one.num_bytes) for one in pieces]
        block = place.block
        key = (block.number, block.address, place.offset, index, is_owned)
        if key not in self._targets:
            if len(self._targets) >= _MOST_TARGETS:
                self._targets.clear()
            self._targets[key] = [_host_bytes(block, place.offset + one.offset, one.num_bytes) for one in pieces]
        return self._targets[key], self._sources[index, is_owned]


class DeviceCopier:
    """Copies the CUDA tensors of one snapshot after the other; does nothing for a snapshot without CUDA tensors.

    The training's thread calls `begin` and `before_step`, the copying thread `go_on` and `finish`.
    """

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._later: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        """(device, targets, sources) of the copies that `go_on` starts."""
        self._have_started = threading.Event()
        self._have_started.set()
        self._done: tuple[tuple[int, Any], ...] = ()
        """(device, the event after its last copy). The tuple is replaced as a whole, because two threads read it."""
        self._failure: RuntimeError | None = None
        self._unpinned: set[int] = set()

    def begin(self, placed: Sequence[tuple[Placed, DevicePlan]]) -> None:
        """Start the copies of tensors that no optimizer owns, and make the computing stream wait for them.

        The other copies begin after the same work of the computing stream. `go_on` starts them, because a call of
        the driver for each of a thousand tensors takes milliseconds.

        Args:
            placed: the images and their plans. They must exist until `finish`, because they keep the tensors in
                memory.
        """
        self._failure = None
        done: list[tuple[int, Any]] = []
        for index in sorted({index for _, plan in placed for index in plan.devices()}):
            these = [(place, plan) for place, plan in placed if index in plan.devices()]
            for block in {place.block.number: place.block for place, _ in these}.values():
                self._pin(block, index)
            try:
                done += self._begin_on(index, these)
            except BaseException:
                self._later.clear()
                self._wait_for_streams()
                raise
        self._done = tuple(done)
        if self._later:
            self._have_started.clear()

    def _begin_on(self, index: int, placed: list[tuple[Placed, DevicePlan]]) -> list[tuple[int, Any]]:
        """Start the copies of tensors of one device that no optimizer owns, and record the other copies for `go_on`.

        Return the device and the event at the end of the started copies; an empty list if no copies were started.
        """
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = _cuda.Stream(device=index)
        computing = _cuda.current_stream(index)
        stream.wait_stream(computing)
        owned = _joined(plan.copies(place, index, is_owned=True) for place, plan in placed)
        if owned[0]:
            self._later.append((index, *owned))
        unowned = _joined(plan.copies(place, index, is_owned=False) for place, plan in placed)
        if not unowned[0]:
            return []
        event = _copy(stream, *unowned)
        computing.wait_event(event)
        return [(index, event)]

    def go_on(self) -> None:
        """Start the copies of the tensors that optimizers own."""
        later = self._later
        try:
            if later or self._done:
                _allow_captures()
            done = dict(self._done)
            for index, targets, sources in later:
                with _cuda.device(index):
                    done[index] = _copy(self._streams[index], targets, sources)
            self._done = tuple(done.items())
        except RuntimeError as error:
            self._failure = error
            self._wait_for_streams()
        finally:
            self._later = []
            self._have_started.set()

    def _wait_for_streams(self) -> None:
        """After an error, wait until no copy is running, because the caller reuses the memory."""
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):
                stream.synchronize()

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
        self._have_started.wait()
        for index, event in self._done:
            _cuda.current_stream(index).wait_event(event)

    def finish(self) -> bool:
        """Wait on the host until the copies have arrived; returns False if a device has failed."""
        done = self._done
        try:
            if self._failure is not None:
                raise self._failure
            for index, event in done:
                with _cuda.device(index):
                    event.synchronize()
        except RuntimeError as error:  # the training's next call on that device raises the same error
            _log.warning("a snapshot is lost, because its device has failed: %s", error)
            return False
        finally:
            self._done, self._failure = (), None
        return True


def _joined(
    copies: Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = list(copies)
    return [one for targets, _ in pairs for one in targets], [one for _, sources in pairs for one in sources]


def _copy(stream: Any, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
    """Start copies on a stream; returns the event at their end.

    One call starts all copies. It runs without the interpreter's lock, so the training's thread continues.
    """
    with _cuda.stream(stream):
        _foreach_copy(targets, sources, non_blocking=True)
    # With `blocking`, a thread that waits for the event sleeps, and uses no processor time.
    event = _cuda.Event(blocking=True)
    event.record(stream)
    return event


def _allow_captures() -> None:
    """Make it possible that another thread captures a CUDA graph while the calling thread uses the device.

    During a capture the driver refuses calls of other threads that may be unsafe, such as a copy into memory that is
    not pinned. Then the capture fails too.
    """
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


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

    # This runs on another thread, because CUDA stores an error in the thread that made the call, and the next kernel
    # launch on that thread would raise the error.
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
