"""Dividing a snapshot between ranks that hold the same: every byte once, and only what others have too."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from safepoint.snapshot.images.image import Image, Piece
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.replicas.replicas import CannotHelpError, Division, divide, resolve
from safepoint.snapshot.staging.guard import Guard

KIB = 1 << 10


class Rank:
    """A model with large and small parameters, a large buffer, and an optimizer that has stepped."""

    def __init__(
        self, stack: ExitStack, *, reverse: bool = False, moments: bool = True, sizes: tuple[int, ...]
    ) -> None:
        torch.manual_seed(3)
        self.parameters = [torch.nn.Parameter(torch.randn(size // 4)) for size in sizes]
        self.buffer = torch.randn(64 * KIB)
        parameters = self.parameters[::-1] if reverse else self.parameters
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if moments else 0)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.guard = Guard(lambda _: None, [self.optimizer])
        stack.callback(self.guard.close)
        self.guard.refresh()
        state = {str(number): parameter.detach() for number, parameter in enumerate(self.parameters)}
        self.images = [
            TorchImages("model.pt").compose({**state, "buffer": self.buffer}),
            TorchImages("optimizer.pt").compose(self.optimizer.state_dict()),
        ]

    def divide(self, num_helpers: int, least_bytes: int = 0) -> Division | None:
        return divide(self.images, self.guard, num_helpers, least_bytes=least_bytes)


Make = Callable[..., Rank]
SIZES = (1024 * KIB, 100 * KIB, 12, 300 * KIB + 4, 64 * KIB)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda sizes=SIZES, **options: Rank(stack, sizes=sizes, **options)


def content(piece: Piece) -> bytes:
    return ctypes.string_at(piece.address, piece.num_bytes)


def filled(image: Image, pieces: "list[Piece]") -> bytearray:
    """What is in the file when these pieces have been copied; each byte once."""
    file, is_there = bytearray(image.size_bytes), bytearray(image.size_bytes)
    for piece in pieces:
        end = piece.offset + piece.num_bytes
        assert not any(is_there[piece.offset : end])
        is_there[piece.offset : end] = b"\1" * piece.num_bytes
        file[piece.offset : end] = content(piece)
    return file


@pytest.mark.parametrize("num_helpers", [1, 2, 3, 7])
def test_all_ranks_together_fill_the_files(make: Make, num_helpers: int) -> None:
    """As the lead alone would, whoever has the rest of a tensor's last word."""
    lead, other = make(), make()
    division = lead.divide(num_helpers)
    assert division is not None
    theirs = [resolve(slices, other.guard, "cpu") for slices in division.slices]
    for file, image in enumerate(lead.images):
        pieces = [*division.own[file]]
        for slices, resolved in zip(division.slices, theirs, strict=True):
            pieces += [piece for one, piece in zip(slices, resolved, strict=True) if one.file == file]
        is_same = filled(image, pieces) == filled(image, list(image.pieces))
        assert is_same, image.path
    pairs = zip(itertools.chain(*theirs), division.pieces, strict=True)
    assert all(content(here) == content(there) for here, there in pairs)


@pytest.mark.parametrize("num_helpers", [1, 2, 3])
def test_everybody_copies_as_much(make: Make, num_helpers: int) -> None:
    """Within the least piece that is cut off; what only the lead has counts for it."""
    lead = make(sizes=(4096 * KIB, 12, 2048 * KIB, 512 * KIB))
    division = lead.divide(num_helpers)
    assert division is not None
    total = sum(piece.num_bytes for image in lead.images for piece in image.pieces)
    shares = [sum(piece.num_bytes for own in division.own for piece in own)]
    shares += [sum(one.num_bytes for one in slices) for slices in division.slices]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 3 * 64 * KIB


def test_what_may_differ_stays_with_the_lead(make: Make) -> None:
    """Buffers, small tensors, and what no optimizer changes."""
    lead = make()
    division = lead.divide(1)
    assert division is not None
    own = {(piece.address, piece.num_bytes) for pieces in division.own for piece in pieces}
    for tensor in (lead.buffer, lead.parameters[2]):
        assert (tensor.data_ptr(), tensor.nbytes) in own
    owned = {parameter.data_ptr() for parameter in lead.parameters} - {lead.parameters[2].data_ptr()}
    owned |= {state["momentum_buffer"].data_ptr() for state in lead.optimizer.state.values()}
    assert {piece.base for piece in division.pieces} <= owned


def test_a_storage_of_several_tensors_stays_with_the_lead(make: Make) -> None:
    """Which of them another rank has where, nobody knows."""
    lead = make(sizes=(1024 * KIB,))
    flat = torch.zeros(512 * KIB)
    halves = [torch.nn.Parameter(half) for half in flat.chunk(2)]
    optimizer = torch.optim.SGD(halves, lr=0.1)
    guard = Guard(lambda _: None, [lead.optimizer, optimizer])
    guard.refresh()
    image = TorchImages("flat.pt").compose({"first": halves[0].detach(), "second": halves[1].detach()})
    assert len(image.pieces) == 1
    assert divide([image], guard, 1, least_bytes=0) is None
    guard.close()


def test_a_little_is_not_divided(make: Make) -> None:
    """It is copied before anybody could be told."""
    lead = make()
    assert lead.divide(1, least_bytes=3 << 20) is None
    assert make(sizes=(12, 800)).divide(1) is None


def test_other_parameters_are_found_out(make: Make) -> None:
    """Where sizes differ, before anything is copied."""
    division = make().divide(1)
    assert division is not None
    with pytest.raises(CannotHelpError, match="it does not have parameter"):
        resolve(division.slices[0], make(reverse=True).guard, "cpu")
    with pytest.raises(CannotHelpError, match=r"it does not have parameter \d, momentum_buffer"):
        resolve(division.slices[0], make(moments=False).guard, "cpu")
    with pytest.raises(CannotHelpError, match="in another place"):
        resolve(division.slices[0], make().guard, "cuda")


def test_what_two_optimizers_change_is_not_copied_beside(make: Make) -> None:
    """Neither for the own files nor for another rank's."""
    division, other = make().divide(1), make()
    assert division is not None
    guard = Guard(lambda _: None, [other.optimizer, torch.optim.SGD(other.parameters, lr=1.0)])
    guard.refresh()
    with pytest.raises(CannotHelpError, match="several optimizers"):
        resolve([one for one in division.slices[0] if not one.key.name], guard, "cpu")
    theirs = divide(other.images, guard, 1, least_bytes=0)
    assert theirs is not None
    assert all(one.key.name == "momentum_buffer" for one in theirs.slices[0])
    guard.close()
