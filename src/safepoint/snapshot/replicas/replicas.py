"""Which bytes of a snapshot every rank of a node has, and who copies which of them.

Where all ranks hold the same model, a parameter and each tensor of its optimizer state have the same place among the
optimizers of every rank; by that place one rank tells another which of its tensors is meant. Whether their content
is the same is not believed: sums of it are compared (`team`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from safepoint.snapshot.images.image import Image, Piece
from safepoint.snapshot.staging.guard import Guard, is_dense
from safepoint.snapshot.staging.stager import SMALL_PIECE_BYTES

_LEAST_BYTES = SMALL_PIECE_BYTES
"""Smaller pieces stay with the lead, and none is cut into smaller ones: those would be summed up in another order."""
_WORD_BYTES = 8


class TensorKey(NamedTuple):
    """A tensor's place among the optimizers of its rank.

    Args:
        optimizer: which one.
        parameter: which of its parameters, over all groups.
        name: of the tensor in the parameter's state; empty for the parameter itself.
    """

    optimizer: int
    parameter: int
    name: str


class Slice(NamedTuple):
    """Bytes of one tensor, and their place in a file.

    Args:
        file: which image of the snapshot.
        offset: in the file.
        num_bytes: how many; whole words.
        key: whose bytes.
        start: the first one's place in the tensor.
    """

    file: int
    offset: int
    num_bytes: int
    key: TensorKey
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who copies what of a snapshot.

    Args:
        own: by image, what the lead copies.
        slices: what each helper does.
        pieces: what the helpers copy, as the lead has it; in their order.
    """

    own: tuple[tuple[Piece, ...], ...]
    slices: tuple[tuple[Slice, ...], ...]
    pieces: tuple[Piece, ...]


class CannotHelpError(Exception):
    """This rank has not what the lead has; the text says what is missing."""


def divide(images: Sequence[Image], guard: Guard, num_helpers: int, *, least_bytes: int) -> Division | None:
    """Divide the pieces of images equally, by bytes, between their rank and others with the same tensors.

    Args:
        images: of large files.
        guard: refreshed; only what one optimizer alone changes is shared.
        num_helpers: how many other ranks there are.
        least_bytes: with less that could be shared, dividing is not worth it.

    Returns:
        None where it is not worth it.
    """
    shareable = _Shareable(images, guard)
    total = sum(piece.num_bytes for image in images for piece in image.pieces)
    if shareable.num_bytes < max(least_bytes, 1):
        return None
    # What cannot be shared is the lead's; it counts as a part of what he has to do.
    lead = max(0.0, total / (num_helpers + 1) - (total - shareable.num_bytes))
    dividing = _Dividing(lead, (shareable.num_bytes - lead) / num_helpers, num_helpers)
    own = tuple(
        tuple(
            mine
            for piece in image.pieces
            for mine in dividing.divide(file, piece, shareable.keys.get(_place_of(piece)))
        )
        for file, image in enumerate(images)
    )
    return Division(own=own, slices=tuple(map(tuple, dividing.slices)), pieces=tuple(dividing.pieces))


class _Shareable:
    """The tensors that pieces consist of and that other ranks may copy: whole ones, all on one device."""

    def __init__(self, images: Sequence[Image], guard: Guard) -> None:
        pieces = [piece for image in images for piece in image.pieces]
        device = next((piece.owner.device for piece in pieces if piece.device == "cuda"), torch.device("cpu"))
        found = {tensor.data_ptr(): (key, tensor) for key, tensor in _tensors_of(guard)}
        self.num_bytes = 0
        self.keys: dict[tuple[int, int], TensorKey] = {}
        """By the place of the piece."""
        for piece in pieces:
            key, tensor = found.get(piece.address, (None, None))
            if key is None or tensor is None or piece.address % _WORD_BYTES or piece.num_bytes < _LEAST_BYTES:
                continue
            if piece.num_bytes <= tensor.nbytes and tensor.device == device and guard.owner_of(piece) is not None:
                self.keys[_place_of(piece)] = key
                self.num_bytes += piece.num_bytes


def _place_of(piece: Piece) -> tuple[int, int]:
    return piece.address, piece.num_bytes


class _Dividing:
    """Goes through all pieces in their order; the lead has the first part, then one helper after the other."""

    def __init__(self, lead_bytes: float, helper_bytes: float, num_helpers: int) -> None:
        self.slices: list[list[Slice]] = [[] for _ in range(num_helpers)]
        self.pieces: list[Piece] = []
        self._lead_bytes, self._helper_bytes = lead_bytes, helper_bytes
        self._done = 0

    def divide(self, file: int, piece: Piece, key: TensorKey | None) -> list[Piece]:
        """Divide a piece; what the lead copies of it, all where it has no key."""
        if key is None:
            return [piece]
        mine: list[Piece] = []
        start, end = 0, piece.num_bytes // _WORD_BYTES * _WORD_BYTES
        while start < end:
            who, left = self._next()
            length = end - start
            if left < length and length - _cut(left) >= _LEAST_BYTES:
                length = _cut(left)
            part = _part_of(piece, start, length)
            if who == 0:
                mine.append(part)
            else:
                self.slices[who - 1].append(Slice(file, part.offset, length, key, start))
                self.pieces.append(part)
            self._done += length
            start += length
        if end < piece.num_bytes:
            mine.append(_part_of(piece, end, piece.num_bytes - end))
        return mine

    def _next(self) -> tuple[int, float]:
        """Whose turn it is, 0 for the lead, and how many bytes are left for him."""
        end = self._lead_bytes
        for who in range(len(self.slices)):
            if end - self._done >= _LEAST_BYTES:
                return who, end - self._done
            end += self._helper_bytes
        return len(self.slices), float("inf")


def _cut(num_bytes: float) -> int:
    return max(1, int(num_bytes) // _LEAST_BYTES) * _LEAST_BYTES


def _part_of(piece: Piece, start: int, num_bytes: int) -> Piece:
    return piece._replace(offset=piece.offset + start, num_bytes=num_bytes, address=piece.address + start)


def resolve(slices: Sequence[Slice], guard: Guard, device: str) -> tuple[Piece, ...]:
    """This rank's bytes of what the lead has given it to copy.

    Args:
        slices: what to copy.
        guard: refreshed.
        device: the kind on which the lead has them.

    Returns:
        A piece for each slice, with its place in the file.

    Raises:
        CannotHelpError: there are no such bytes here.
    """
    tensors = dict(_tensors_of(guard))
    pieces: list[Piece] = []
    for one in slices:
        tensor = tensors.get(one.key)
        what = f"parameter {one.key.parameter}" + (f", {one.key.name}" if one.key.name else "")
        if tensor is None or tensor.nbytes < one.start + one.num_bytes:
            raise CannotHelpError(f"it does not have {what}")
        storage: Any = tensor.untyped_storage()
        address, base = tensor.data_ptr() + one.start, storage.data_ptr()
        piece = Piece(one.offset, one.num_bytes, address, base, storage, tensor.device.type)
        is_there = piece.device == device and (not pieces or storage.device == pieces[0].owner.device)
        if not is_there or address % _WORD_BYTES or guard.owner_of(piece) is None:
            raise CannotHelpError(f"it has {what} in another place, or several optimizers change it")
        pieces.append(piece)
    return tuple(pieces)


def _tensors_of(guard: Guard) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    """Those whose elements lie side by side."""
    for number, optimizer in enumerate(guard.optimizers):
        every: Any = optimizer
        parameters: list[Any] = [one for group in every.param_groups for one in group["params"]]
        for index, parameter in enumerate(parameters):
            state: dict[Any, Any] = every.state.get(parameter, {})
            for name, tensor in [("", parameter), *state.items()]:
                is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout is torch.strided
                if is_plain and tensor.numel() and is_dense(tensor):
                    yield TensorKey(number, index, str(name)), tensor
