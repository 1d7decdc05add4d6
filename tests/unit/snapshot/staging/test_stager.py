"""Copies beside the training: who waits, who does not, and what is noticed when somebody changes what is copied."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from safepoint.snapshot.images.image import Image, Piece, Placed
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.staging import stager
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Stager, Work
from tests.support.snapshots import piece_of, render

LARGE = 1 << 20  # bytes; copied beside the training
TIMEOUT_S = 60


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Gate:
    """Copies beside the training wait until it is opened; a helping thread passes as long as `lets_help`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.lets_help = False
        copy = Stager._copy

        def waiting(stager: Stager, work: Work, *one: Any) -> None:
            if threading.current_thread().name == "safepoint-stager" or not self.lets_help:
                self.reached.set()
                assert self.opened.wait(TIMEOUT_S)
            copy(stager, work, *one)

        monkeypatch.setattr(Stager, "_copy", waiting)


class Marks:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, block: Block, num_bytes: int) -> None:
        self.seen.append((block.number, num_bytes))


class Trainer:
    """Two optimizers with a large parameter each, a buffer, and the means to stage them."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((LARGE // 4,), float(n + 1))) for n in range(2)]
        self.buffer = torch.full((LARGE // 4,), 7.0)
        self.optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in self.parameters]
        self.marks = Marks()
        self.stager = Stager(self.marks)
        self.guard: Guard | None = Guard(self.stager.before_step, self.optimizers)
        self.begun = threading.Event()
        self.ended: list[bool] = []
        self.images = TorchImages("state.pt")

    def state(self) -> dict[str, torch.Tensor]:
        first, second = (parameter.detach() for parameter in self.parameters)
        return {"first": first, "second": second, "buffer": self.buffer, "small": torch.ones(3)}

    def stage(self) -> tuple[Block, bytes]:
        """Begin a snapshot; its block, and what is to be in it."""
        image = self.images.compose(self.state())
        expected = render(image)
        block = Block.allocate(1, image.size_bytes)
        work = Work(
            placed=[Placed(image=image, block=block, offset=0)], on_begin=self.begun.set, on_end=self.ended.append
        )
        self.stager.stage(work, self.guard)
        return block, expected

    def step(self, number: int) -> None:
        parameter = self.parameters[number]
        parameter.grad = torch.ones_like(parameter)
        self.optimizers[number].step()

    def step_beside(self, number: int) -> "threading.Thread":
        thread = threading.Thread(target=self.step, args=[number])
        thread.start()
        return thread

    def content(self, block: Block, expected: bytes) -> bool:
        """Whether the block holds what was to be in it, but for checksums."""
        self.stager.wait()
        image = self.images.compose(self.state())
        ours = bytes(block.view(0, image.size_bytes))
        return all(
            ours[p.offset : p.offset + p.num_bytes] == expected[p.offset : p.offset + p.num_bytes]
            for p in image.pieces
        )

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self.stager.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.close()


@pytest.fixture
def gate(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    # Opened before the trainer waits for its stager's end.
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_copies_go_on_beside_the_training(gate: Gate, trainer: Trainer) -> None:
    """`stage` returns while the copy of what optimizers own has not begun."""
    block, expected = trainer.stage()
    assert trainer.stager._work is not None
    assert not trainer.ended
    assert gate.reached.wait(TIMEOUT_S)
    gate.opened.set()
    assert trainer.content(block, expected)
    assert trainer.ended == [True]
    assert trainer.stager._work is None


def test_what_was_made_for_a_snapshot_is_let_go(trainer: Trainer) -> None:
    """Its file is named, and nothing holds it when it has been copied; what outlives a snapshot is remembered."""
    images = {"made.pt": TorchImages("made.pt")}

    def stage(made: torch.Tensor) -> frozenset[str]:
        image = images["made.pt"].compose({"first": trainer.parameters[0].detach(), "made": made})
        placed = [Placed(image=image, block=Block.allocate(1, image.size_bytes), offset=0)]
        work = Work(placed=placed, on_begin=trainer.begun.set, on_end=trainer.ended.append)
        passing = trainer.stager.stage(work, trainer.guard)
        trainer.stager.wait()
        return passing

    stays, goes = torch.ones(LARGE // 4), torch.ones(LARGE // 4)
    storage = StorageWeakRef(goes.untyped_storage())
    assert stage(stays) == {"made.pt"}  # not detected yet
    assert stage(stays) == stage(stays) == frozenset()
    assert stage(goes) == {"made.pt"}
    assert trainer.ended == [True] * 4
    images.clear()
    del goes
    wait_for(storage.expired)


def test_a_step_waits_for_what_it_changes(gate: Gate, trainer: Trainer) -> None:
    """The optimizer's step begins when its tensors have been copied; what is in memory is the state before it."""
    block, expected = trainer.stage()
    stepping = trainer.step_beside(0)
    assert gate.reached.wait(TIMEOUT_S)
    assert trainer.parameters[0][0].item() == 1.0
    gate.opened.set()
    stepping.join()
    assert trainer.parameters[0][0].item() == 0.0
    assert trainer.content(block, expected)
    assert trainer.ended == [True]


def test_the_waiting_thread_helps(gate: Gate, trainer: Trainer) -> None:
    """It copies from the other end, while the copying thread is held up in its first piece."""
    gate.lets_help = True
    trainer.stage()
    assert gate.reached.wait(TIMEOUT_S)
    work = trainer.stager._work
    assert work is not None
    trainer.stager._help(work)
    assert list(work.is_done) == [False, True]


def test_another_optimizer_s_step_does_not_wait(gate: Gate, trainer: Trainer) -> None:
    """What it owns is small, and was copied at the boundary."""
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([other], lr=1.0)
    assert trainer.guard is not None
    trainer.guard.close()
    trainer.guard = Guard(trainer.stager.before_step, [*trainer.optimizers, optimizer])
    trainer.stage()
    assert gate.reached.wait(TIMEOUT_S)
    other.grad = torch.ones(3)
    optimizer.step()
    assert not gate.opened.is_set()
    assert not trainer.ended
    assert other[0].item() == 0.0


def test_an_optimizer_that_was_not_named_waits_for_everything(gate: Gate, trainer: Trainer) -> None:
    """It may own anything."""
    stranger = torch.optim.SGD([trainer.parameters[0]], lr=1.0)
    trainer.parameters[0].grad = torch.ones_like(trainer.parameters[0])
    block, expected = trainer.stage()
    stepping = threading.Thread(target=stranger.step)
    stepping.start()
    assert gate.reached.wait(TIMEOUT_S)
    assert trainer.parameters[0][0].item() == 1.0
    gate.opened.set()
    stepping.join()
    assert trainer.content(block, expected)
    assert trainer.ended == [True]


def test_what_anybody_may_change_is_copied_at_the_boundary(gate: Gate, trainer: Trainer) -> None:
    """Buffers, and small tensors of any owner."""
    block, expected = trainer.stage()
    trainer.buffer.fill_(-1.0)
    gate.opened.set()
    assert trainer.content(block, expected)
    assert trainer.ended == [True]


def test_a_change_outside_a_step_is_noticed(gate: Gate, trainer: Trainer) -> None:
    """Whether it is found at the end or by the step after it."""
    for is_followed_by_a_step in (False, True):
        trainer.ended.clear()
        gate.opened.clear()
        trainer.stage()
        with torch.no_grad():
            trainer.parameters[1].add_(1)
        gate.opened.set()
        if is_followed_by_a_step:
            trainer.step(1)
        trainer.stager.wait()
        assert trainer.ended == [False]


def test_without_a_guard_everything_is_copied_at_once(trainer: Trainer) -> None:
    """Before `stage` returns."""
    assert trainer.guard is not None
    trainer.guard.close()
    trainer.guard = None
    block, expected = trainer.stage()
    with torch.no_grad():
        trainer.parameters[0].zero_()
    assert trainer.content(block, expected)
    assert trainer.ended == [True]


def test_the_mark_never_goes_beyond_what_is_there(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each mark, everything before it has been copied; it begins at zero."""
    monkeypatch.setattr(stager, "_CHUNK_BYTES", 256 << 10)
    blocks: list[tuple[Block, bytes, int]] = []
    faults: list[int] = []

    def check(block: Block, num_bytes: int) -> None:
        if blocks:
            _, expected, size = blocks[0]
            assert num_bytes <= size
            for piece in image.pieces:
                end = min(piece.offset + piece.num_bytes, num_bytes)
                if (
                    piece.offset < end
                    and bytes(block.view(piece.offset, end - piece.offset)) != (expected[piece.offset : end])
                ):
                    faults.append(num_bytes)

    image = trainer.images.compose(trainer.state())
    trainer.stager._set_mark = check
    block = Block.allocate(1, image.size_bytes)
    blocks.append((block, render(image), image.size_bytes))
    for _ in range(5):
        work = Work(
            placed=[Placed(image=image, block=block, offset=0)], on_begin=lambda: None, on_end=trainer.ended.append
        )
        trainer.stager.stage(work, trainer.guard)
        trainer.stager.wait()
        for place in range(0, image.size_bytes, 4096):
            block.write(place, b"\1")
    assert not faults
    assert trainer.ended == [True] * 5


def test_what_a_device_copies_is_not_marked(trainer: Trainer) -> None:
    """Its engine goes its own way: how far it has come is known at the end only."""

    class Engine:
        def begin(self, *_: object) -> None:
            pass

        before_step = go_on = finish = begin

    trainer.stager._devices = Engine()  # type: ignore[assignment]
    host = trainer.images.compose(trainer.state())
    there = Piece(0, 4096, 0, 0, torch.ones(1).untyped_storage(), "cuda")
    moved = tuple(piece._replace(offset=piece.offset + 4096) for piece in host.pieces)
    image = Image(path="mixed", size_bytes=host.size_bytes + 4096, literals=(), pieces=(there, *moved))
    block = Block.allocate(1, image.size_bytes)
    work = Work(
        placed=[Placed(image=image, block=block, offset=0)], on_begin=lambda: None, on_end=trainer.ended.append
    )
    trainer.stager.stage(work, trainer.guard)
    trainer.stager.wait()
    assert trainer.marks.seen == [(1, 0)]


def test_tensors_of_optimizers_are_found_as_they_come() -> None:
    """States that a step has made, and storages that were replaced, from the next boundary on."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard(lambda _: None, [optimizer])

    def owner_of(tensor: torch.Tensor) -> int | None:
        guard.refresh()
        found = guard.owner_of(piece_of(tensor))
        return None if found is None else found[0]

    assert owner_of(model.weight) == 0
    assert owner_of(torch.ones(4)) is None
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert owner_of(optimizer.state[model.weight]["exp_avg"]) == 0
    before = model.weight.data
    model.weight.data = torch.ones(4, 4)
    assert owner_of(model.weight) == 0
    assert owner_of(before) is None
    optimizer.load_state_dict(optimizer.state_dict())
    guard.close()


def test_what_two_optimizers_change_has_no_owner() -> None:
    """It is copied at the boundary; what only one of them changes still belongs to that one."""
    parameter = torch.nn.Parameter(torch.ones(LARGE // 4))
    parameter.grad = torch.ones_like(parameter)
    first = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    first.step()
    guard = Guard(lambda _: None, [first, torch.optim.SGD([parameter], lr=1.0)])
    guard.refresh()
    assert guard.owner_of(piece_of(parameter)) is None
    owner = guard.owner_of(piece_of(first.state[parameter]["momentum_buffer"]))
    assert owner is not None
    assert owner.number == 0
    guard.close()


def test_another_guard_s_plan_is_not_used(trainer: Trainer, gate: Gate) -> None:
    """The same tensors have other owners by it, who wait for them."""
    gate.opened.set()
    trainer.stage()
    trainer.stager.wait()
    gate.opened.clear()
    assert trainer.guard is not None
    trainer.guard.close()
    trainer.guard = Guard(trainer.stager.before_step, trainer.optimizers[::-1])
    block, expected = trainer.stage()
    stepping = trainer.step_beside(1)
    assert gate.reached.wait(TIMEOUT_S)
    gate.opened.set()
    stepping.join()
    assert trainer.content(block, expected)
    assert trainer.ended == [True, True]


def test_a_guard_that_is_closed_hears_nothing() -> None:
    """Nor does one whose optimizers do not step."""
    heard: list[int | None] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([parameter]) for _ in range(2)]
    guard = Guard(heard.append, optimizers[:1])
    for optimizer in optimizers:
        optimizer.step()
    assert heard == [0, None]
    guard.close()
    optimizers[0].step()
    assert heard == [0, None]
