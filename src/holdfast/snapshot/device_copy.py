"""Copies from a CUDA device into pinned memory, on a stream of their own beside the training's.

The copying stream begins after everything that the computing stream has been given so far, and the next step's
changes wait for it on the device; the host waits for neither.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdfast.snapshot.block import Block
from holdfast.snapshot.guard import Guard

if TYPE_CHECKING:
    from holdfast.snapshot.staging import Placed

_cuda: Any = torch.cuda


class DeviceCopier:
    """Copies of the CUDA tensors of one snapshot after the other; does nothing where there are none."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._done: list[Any] = []
        self._kept: list[torch.Tensor] = []

    def begin(self, placed: "Sequence[Placed]", guard: Guard | None) -> None:
        """Start the copies; those of tensors that anybody may change are ordered before whatever comes next."""
        sources = [(place, piece) for place in placed for piece in place.image.pieces if piece.device == "cuda"]
        if not sources:
            return
        others: dict[int, bool] = {}
        for place, piece in sources:
            source = _bytes_of(piece.owner, piece.address, piece.num_bytes)
            index = source.device.index
            stream = self._streams.get(index)
            if stream is None:
                stream = self._streams[index] = _cuda.Stream(device=index)
            if index not in others:
                stream.wait_stream(_cuda.current_stream(index))
                others[index] = False
            target = _host_bytes(place.block, place.offset + piece.offset, piece.num_bytes)
            with _cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            source.record_stream(stream)
            self._kept.append(source)
            others[index] |= guard is None or guard.owner_of(piece.base) is None
        for index, is_anybodys in others.items():
            event = _cuda.Event()
            event.record(self._streams[index])
            self._done.append(event)
            if is_anybodys:  # what comes next on the computing stream might change it
                _cuda.current_stream(index).wait_event(event)

    def before_step(self) -> None:
        """What the computing stream is given from now on waits for the copies, on the device."""
        for event in list(self._done):
            _cuda.current_stream().wait_event(event)

    def finish(self) -> None:
        """Wait on the host until the copies have arrived."""
        for event in self._done:
            event.synchronize()
        self._done.clear()
        self._kept.clear()


def pin(block: Block) -> bool:
    """Lock a block's pages for the device's copy engine; whether it could be done.

    Without it copies still work, synchronously and at a fraction of the speed.
    """
    if not _cuda.is_available() or not _cuda.is_initialized():
        return False
    return int(_cuda.cudart().cudaHostRegister(block.address, block.capacity_bytes, 0)) == 0


def unpin(block: Block) -> None:
    """Undo `pin`; before the block is closed."""
    _cuda.cudart().cudaHostUnregister(block.address)


def _bytes_of(owner: Any, address: int, num_bytes: int) -> torch.Tensor:
    """The bytes of a device's storage or tensor as uint8."""
    storage: Any = owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage, address - storage.data_ptr(), (num_bytes,), (1,))  # pyright: ignore[reportUnknownMemberType]
    return view


def _host_bytes(block: Block, start: int, length: int) -> torch.Tensor:
    content = (ctypes.c_char * length).from_address(block.address + start)
    return torch.frombuffer(content, dtype=torch.uint8)


__all__ = ["DeviceCopier", "pin", "unpin"]
