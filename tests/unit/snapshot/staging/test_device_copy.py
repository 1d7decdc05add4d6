"""What is asked of CUDA, in which order; a stand-in takes the calls, and the real thing is in `tests/gpu`."""

import contextlib
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.snapshot.images.image import Image, Piece, Placed
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.staging import device_copy
from safepoint.snapshot.staging.device_copy import DeviceCopier, DevicePlan, pin
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Stager, Work, _Plan


class Cuda:
    """Records the calls of streams, events and the runtime; copies happen at once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self.fails = False
        self.refuses_to_pin = False

    def Stream(self, device: Any) -> Any:  # noqa: N802
        return self._stream("copying")

    def current_stream(self, _: Any = None) -> Any:
        return self._stream("computing")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.calls.append(f"{name} waits for event {event.number}"),
        )

    def Event(self, blocking: bool) -> Any:  # noqa: N802
        assert blocking
        event = SimpleNamespace(number=sum("recorded" in call for call in self.calls))
        event.record = lambda stream: self.calls.append(f"event {event.number} recorded on {stream.name}")

        def synchronize() -> None:
            if self.fails:
                raise RuntimeError("device-side assert triggered")
            self.calls.append(f"host waits for event {event.number}")

        event.synchronize = synchronize
        return event

    @contextlib.contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, _: Any) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        def register(address: int, num_bytes: int, _: int) -> int:
            if self.refuses_to_pin or address in self.registered:
                return 712
            self.registered[address] = num_bytes
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.registered.pop)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(device_copy, "_cuda", cuda)
    return cuda


def piece_of(tensor: torch.Tensor, offset: int, device: str = "cuda") -> Piece:
    base = tensor.untyped_storage().data_ptr()
    return Piece(offset, tensor.nbytes, tensor.data_ptr(), base, tensor, device)


def image_of(*pieces: Piece) -> Image:
    return Image(path="state.pt", size_bytes=1 << 20, literals=(), pieces=pieces)


class Training:
    """A parameter that one optimizer owns and a buffer, both on the stand-in, and a large tensor of the host's."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.full((1000,), 3.0))
        self.buffer = torch.full((1000,), 4.0)
        self.on_host = torch.full((20_000,), 5.0)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.parameter.grad = torch.ones_like(self.parameter)
        self.block = Block.allocate(1, 1 << 20)
        self.marks: list[int] = []
        self.ended: list[bool] = []
        self.stager = Stager(lambda _, mark: self.marks.append(mark))
        self.guard = Guard(self.stager.before_step, [self.optimizer])
        self.guard.refresh()

    def image(self) -> Image:
        return image_of(
            piece_of(self.on_host, 16384, "cpu"),
            piece_of(self.parameter.detach(), 0),
            piece_of(self.buffer, 8192),
            piece_of(self.on_host, 200_000, "cpu"),
        )

    def placed(self) -> list[Placed]:
        return [Placed(image=self.image(), block=self.block, offset=0)]

    def planned(self, guard: Guard | None) -> list[tuple[Placed, DevicePlan]]:
        """The images and what is copied of them, as the stager gives it."""
        return [(placed, _Plan(placed.image.pieces, guard).on_device) for placed in self.placed()]

    def stage(self) -> None:
        self.stager.stage(Work(placed=self.placed(), on_begin=lambda: None, on_end=self.ended.append), self.guard)

    def content(self, start: int) -> float:
        return float(torch.frombuffer(bytearray(self.block.view(start, 4)), dtype=torch.float32))

    def close(self) -> None:
        self.guard.close()
        self.stager.close()
        self.block.close()


@pytest.fixture
def training(cuda: Cuda) -> Iterator[Training]:
    training = Training()
    yield training
    training.close()


def test_the_computing_stream_waits_for_what_anybody_may_change_only(cuda: Cuda, training: Training) -> None:
    """Copies of what optimizers own are waited for before a step, not at the boundary."""
    copier = DeviceCopier()
    copier.begin(training.planned(training.guard))
    at_boundary = ["copying waits for computing", "event 0 recorded on copying", "computing waits for event 0"]
    assert cuda.calls == at_boundary
    assert training.content(0) == 0.0
    copier.go_on()
    assert cuda.calls[3:] == ["event 1 recorded on copying"]
    copier.before_step()
    assert copier.finish()
    assert cuda.calls[4:] == ["computing waits for event 1", "host waits for event 1"]
    copier.before_step()
    assert len(cuda.calls) == 6, "what has arrived is not waited for"
    assert (training.content(0), training.content(8192)) == (3.0, 4.0)


def test_a_step_waits_until_the_copies_have_started(cuda: Cuda, training: Training) -> None:
    """An event that does not exist yet cannot be waited for on the device."""
    copier = DeviceCopier()
    copier.begin(training.planned(training.guard))
    step = threading.Thread(target=copier.before_step)
    step.start()
    step.join(0.1)
    assert step.is_alive()
    copier.go_on()
    step.join()
    assert cuda.calls[-1] == "computing waits for event 1"


def test_without_a_guard_the_computing_stream_waits_for_all(cuda: Cuda, training: Training) -> None:
    """Anybody may change anything."""
    DeviceCopier().begin(training.planned(None))
    assert cuda.calls[1:] == ["event 0 recorded on copying", "computing waits for event 0"]


def test_tensors_of_a_plan_are_made_once(cuda: Cuda, training: Training) -> None:
    """For each place in memory; what the copies write is the content of the moment."""
    copier, plan = DeviceCopier(), _Plan(training.image().pieces, training.guard).on_device
    for value in (3.0, 7.0):
        training.parameter.data.fill_(value)
        copier.begin([(placed, plan) for placed in training.placed()])
        copier.go_on()
        assert copier.finish()
        assert training.content(0) == value
    place = training.placed()[0]
    index = training.parameter.device.index
    assert plan.copies(place, index, is_owned=True)[0] is plan.copies(place, index, is_owned=True)[0]


@pytest.mark.parametrize("when", ["at the boundary", "later"])
def test_copies_that_have_begun_are_over_before_an_error_is_heard_of(
    when: str, cuda: Cuda, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is free then, and may be another snapshot's next."""
    copier = DeviceCopier()
    copier.begin(training.planned(training.guard))
    copier.go_on()
    assert copier.finish()
    copier._streams[None].synchronize = lambda: cuda.calls.append("host waits for copying")  # type: ignore[index]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    if when == "later":
        copier.begin(training.planned(training.guard))
    monkeypatch.setattr(device_copy, "_foreach_copy", fail)
    if when == "later":
        copier.go_on()
        copier.before_step()
        assert not copier.finish()
    else:
        with pytest.raises(RuntimeError):
            copier.begin(training.planned(training.guard))
    assert "host waits for copying" in cuda.calls


def test_a_change_outside_the_step_is_noticed(training: Training) -> None:
    """A device's tensors have versions too."""
    training.stage()
    training.stager.wait()
    assert training.ended.pop()
    held = training.stager._changed
    with held:  # the copying thread cannot end meanwhile
        training.stage()
        with torch.no_grad():
            training.parameter.add_(1)
    training.stager.wait()
    assert training.ended == [False]


def test_nobody_reads_on_before_a_devices_copies_are_there(training: Training) -> None:
    """The watermark of a file with tensors of a device stays where it is until the end."""
    training.stage()
    training.stager.wait()
    assert set(training.marks) == {0}
    assert training.ended == [True]


def test_a_failed_device_ends_the_snapshot_and_not_the_thread(
    cuda: Cuda, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that waits for the copies would wait for ever."""
    cuda.fails = True
    training.stage()
    training.stager.wait()
    assert training.ended == [False]
    assert "device-side assert" in caplog.text


# ---- memory -------------------------------------------------------------------------------------------------------


def test_pages_that_come_anew_are_pinned_anew(cuda: Cuda) -> None:
    """A device would go on writing to those that were given back."""
    block = Block.allocate(1, 8 * PAGE_BYTES)
    assert pin(block, 0)
    assert cuda.registered == {block.address: 8 * PAGE_BYTES}
    block.fit(2 * PAGE_BYTES + 1)
    assert pin(block, 0)
    assert block.pinned_bytes == 3 * PAGE_BYTES
    block.fit(3 * PAGE_BYTES)
    assert cuda.registered
    block.fit(3 * PAGE_BYTES + 1)
    assert not cuda.registered
    assert pin(block, 0)
    assert cuda.registered == {block.address: 4 * PAGE_BYTES}
    block.close()
    assert not cuda.registered


def test_blocks_are_pinned_before_the_first_copy_and_free_when_they_go(cuda: Cuda, training: Training) -> None:
    """A closed block's addresses may be another's next."""
    training.stage()
    training.stager.wait()
    assert list(cuda.registered) == [training.block.address]
    training.block.close()
    assert not cuda.registered


def test_what_cannot_be_pinned_is_said_once(cuda: Cuda, training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Saves work, slowly."""
    cuda.refuses_to_pin = True
    for _ in range(2):
        training.stage()
        training.stager.wait()
    assert training.ended == [True, True]
    assert len([record for record in caplog.records if "cannot be pinned" in record.message]) == 1


def test_a_forked_child_leaves_the_devices_pages_alone(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the mapping, and no context."""
    block = Block.allocate(1, PAGE_BYTES)
    assert pin(block, 0)
    child = os.getpid() + 1
    monkeypatch.setattr(device_copy.os, "getpid", lambda: child)
    block.close()
    assert cuda.registered
