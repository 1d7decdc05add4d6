"""Snapshots of CUDA tensors: what the copies see, what they do not wait for, and which memory they go to."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.manifest import ManifestFacts, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.snapshot import Checkpointer
from safepoint.snapshot.checkpointer import load_state
from safepoint.snapshot.images.image import Placed
from safepoint.snapshot.images.module_state import ModuleState, OptimizerState
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.keeper_client.snapshotter import Snapshotter
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.protocol.channel import new_keeper_key
from safepoint.snapshot.protocol.messages import CheckpointFacts, Goodbye, KeeperPlan
from safepoint.snapshot.staging.device_copy import _host_bytes, pin
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Stager, Work

NUM_VALUES = 16 << 20
LONG_CYCLES = 1_000_000_000  # half a second and more of a device's time


class Training:
    """A large parameter that one optimizer owns, a buffer that no optimizer owns, and the means to stage both."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        self.parameter = torch.nn.Parameter(torch.full((NUM_VALUES,), 1.0, device=device))
        self.buffer = torch.full((NUM_VALUES,), 5.0, device=device)
        self.on_host = torch.full((NUM_VALUES,), 9.0)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.parameter.grad = torch.ones_like(self.parameter)
        self.marks: list[int] = []
        self.ended: list[bool] = []
        self.stager = Stager(lambda _, mark: self.marks.append(mark))
        self.guard = Guard(self.stager.before_step, [self.optimizer])
        self.images = TorchImages("state.pt")
        self.block: Block | None = None

    def state(self) -> dict[str, torch.Tensor]:
        return {"buffer": self.buffer, "parameter": self.parameter.detach(), "on_host": self.on_host}

    def stage(self) -> None:
        image = self.images.compose(self.state())
        self.block = self.block or Block.allocate(1, image.size_bytes)
        self.block.fit(image.size_bytes)
        placed = [Placed(image=image, block=self.block, offset=0)]
        self.stager.stage(Work(placed=placed, on_begin=lambda: None, on_end=self.ended.append), self.guard)

    def keep_busy(self) -> torch.cuda.Event:
        """Half a second of work for the device, at least; the event at its end."""
        with torch.cuda.device(self.device):
            torch.cuda._sleep(LONG_CYCLES)
            event = torch.cuda.Event()
            event.record()
        return event

    def copied(self) -> dict[str, torch.Tensor]:
        self.stager.wait()
        assert self.block is not None
        return torch.load(Path(f"/proc/self/fd/{self.block.descriptor}"), map_location="cpu")

    def close(self) -> None:
        self.guard.close()
        self.stager.close()
        if self.block is not None:
            self.block.close()


@pytest.fixture
def training() -> Iterator[Training]:
    training = Training()
    yield training
    training.close()


def warm_up(training: Training) -> None:
    """Streams, pinned memory and kernels are there; what follows can be asynchronous."""
    training.optimizer.step()
    with torch.no_grad():
        training.parameter.fill_(1.0)
    training.stage()
    training.stager.wait()
    training.ended.clear()
    training.marks.clear()
    torch.cuda.synchronize()


def test_the_copy_sees_what_was_given_to_the_device_before(training: Training) -> None:
    """A kernel that still runs at the boundary has written before the copy reads; the host does not wait for it."""
    warm_up(training)
    busy = training.keep_busy()
    with torch.no_grad():
        training.parameter.fill_(2.0)
        training.buffer.fill_(6.0)
    training.stage()
    assert not busy.query(), "the call has waited for the device"
    copied = training.copied()
    assert bool((copied["parameter"] == 2.0).all())
    assert bool((copied["buffer"] == 6.0).all())
    assert bool((copied["on_host"] == 9.0).all())
    assert training.ended == [True]


def test_the_next_step_is_not_seen(training: Training) -> None:
    """It is given to the device at once, and runs there when the copy is done."""
    warm_up(training)
    busy = training.keep_busy()
    training.stage()
    training.optimizer.step()
    assert not busy.query(), "the step has waited for the device"
    assert bool((training.copied()["parameter"] == 1.0).all())
    torch.cuda.synchronize()
    assert float(training.parameter.detach()[0]) == 0.0
    assert training.ended == [True]


def test_what_no_optimizer_owns_is_ordered_at_the_boundary(training: Training) -> None:
    """A change given to the device right after the boundary is not seen."""
    warm_up(training)
    busy = training.keep_busy()
    training.stage()
    training.buffer.fill_(7.0)
    assert not busy.query(), "the change has waited for the device"
    assert bool((training.copied()["buffer"] == 5.0).all())
    assert training.ended == [True]


def test_a_change_outside_the_step_is_noticed(training: Training) -> None:
    """Such a snapshot may be half old, half new: it is given up."""
    warm_up(training)
    training.keep_busy()
    training.stage()
    with torch.no_grad():
        training.parameter.mul_(3.0)
    training.optimizer.step()
    training.stager.wait()
    assert training.ended == [False]


def test_the_keeper_does_not_read_on_before_the_devices_copies_are_there(training: Training) -> None:
    """The host's part of a file may be there first, and says nothing of the rest."""
    warm_up(training)
    training.stage()
    training.stager.wait()
    assert set(training.marks) == {0}


def test_tensors_may_go_before_their_copy_is_done(training: Training) -> None:
    """Their memory is not given to others while it is being read."""
    warm_up(training)
    training.keep_busy()
    training.buffer = torch.full((NUM_VALUES,), 8.0, device=training.device)
    training.stage()
    training.buffer = None  # type: ignore[assignment]
    others = [torch.full((NUM_VALUES,), -1.0, device=training.device) for _ in range(4)]
    assert bool((training.copied()["buffer"] == 8.0).all())
    assert len(others) == 4


def test_a_graph_can_be_captured_meanwhile(training: Training) -> None:
    """A capture forbids other threads some calls of the driver; waiting for the copies is none of them."""
    warm_up(training)
    counted, side, graph = torch.zeros(1, device=training.device), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        counted.add_(1)
    torch.cuda.synchronize()
    busy = training.keep_busy()
    training.stage()
    with torch.cuda.stream(side):
        graph.capture_begin()
        counted.add_(1)
        for _ in range(500):
            if training.ended:
                break
            time.sleep(0.01)
        graph.capture_end()
    assert busy.query()
    graph.replay()
    assert bool((training.copied()["parameter"] == 1.0).all())
    assert training.ended == [True]
    assert float(counted) == 2.0


def test_the_second_device_has_a_stream_of_its_own() -> None:
    """Its computing stream is the one that waits, whichever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    training = Training("cuda:1")
    try:
        warm_up(training)
        busy = training.keep_busy()
        with torch.no_grad():
            training.parameter.fill_(2.0)
        training.stage()
        training.optimizer.step()
        assert not busy.query()
        assert bool((training.copied()["parameter"] == 2.0).all())
    finally:
        training.close()


# ---- memory -------------------------------------------------------------------------------------------------------


def is_pinned(block: Block, start: int = 0) -> bool:
    return _host_bytes(block, start, 1).is_pinned()


def test_blocks_are_pinned_as_far_as_they_go() -> None:
    """Shared memory can be registered; pages that were given back and return are registered again."""
    torch.cuda.init()
    block = Block.allocate(1, 8 * PAGE_BYTES)
    assert pin(block, 0)
    assert is_pinned(block)
    block.fit(2 * PAGE_BYTES)
    assert pin(block, 0), "nothing to do"
    block.fit(8 * PAGE_BYTES)
    assert not is_pinned(block)
    assert pin(block, 0)
    assert is_pinned(block, 7 * PAGE_BYTES)
    source = torch.arange(8 * PAGE_BYTES, device="cuda:0").to(torch.uint8)
    _host_bytes(block, 0, 8 * PAGE_BYTES).copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    # As another process sees it: through the file, not through this mapping.
    with Path(f"/proc/self/fd/{block.descriptor}").open("rb") as file:
        assert file.read() == bytes(source.cpu().numpy())
    block.close()


def test_a_closed_blocks_addresses_can_be_pinned_again() -> None:
    """The driver keeps no pages of it."""
    torch.cuda.init()
    for number in range(20):
        block = Block.allocate(number, 64 * PAGE_BYTES)
        assert pin(block, 0)
        block.close()


def test_memory_that_cannot_be_pinned_is_no_error_of_the_trainings() -> None:
    """CUDA reports a failure to the next kernel of the same thread."""
    torch.cuda.init()
    block = Block.allocate(1, 4 * PAGE_BYTES)
    assert pin(block, 0)
    block.pinned_bytes = 0
    block._unpin = None  # the driver knows better: it refuses to register the same pages twice
    assert not pin(block, 0)
    assert float(torch.ones(3, device="cuda:0").sum()) == 3.0
    torch.cuda.cudart().cudaHostUnregister(block.address)
    block.close()


def test_copies_to_pinned_memory_are_as_fast_as_to_the_librarys_own() -> None:
    """Half its speed at least; to memory that is not pinned it is a quarter and less."""
    source = torch.ones(NUM_VALUES * 4, dtype=torch.uint8, device="cuda:0")
    block = Block.allocate(1, source.numel())
    assert pin(block, 0)
    ours, theirs = _host_bytes(block, 0, source.numel()), torch.empty(source.numel(), dtype=torch.uint8).pin_memory()

    def best_s(target: torch.Tensor) -> float:
        seconds = []
        for _ in range(10):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_s)
        return min(seconds)

    best_s(ours)
    assert best_s(ours) <= 2 * best_s(theirs)
    block.close()


# ---- the whole way ------------------------------------------------------------------------------------------------


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = model(torch.randn(16, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def content_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().clone()
        if isinstance(value, dict):
            return {key: to_host(item) for key, item in value.items()}
        return [to_host(item) for item in value] if isinstance(value, list) else value

    return to_host({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def are_equal(ours: Any, theirs: Any) -> bool:
    """Bit for bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(are_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(are_equal, ours, theirs))
    return bool(ours == theirs)


def test_a_checkpointer_saves_and_loads_a_model_on_a_device(tmp_path: Path) -> None:
    """Every save of a running training has the state of its boundary."""
    model, optimizer = model_and_optimizer(1)
    state = {"model": model, "optimizer": optimizer}
    expected: dict[int, Any] = {}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 6):
            train(model, optimizer, 1)
            expected[step] = content_of(model, optimizer)
            saving = checkpointer.save(state, step)
            train(model, optimizer, 1)
            saving.wait(60)
    for step, content in expected.items():
        other, its_optimizer = model_and_optimizer(2)
        load_state(tmp_path / f"checkpoint-{step}", {"model": other, "optimizer": its_optimizer})
        assert are_equal(content_of(other, its_optimizer), content), f"step {step}"


def test_a_restart_loads_from_memory(tmp_path: Path) -> None:
    """A rank that is gone leaves its newest snapshot with the keeper, and the next one gets it."""
    model, optimizer = model_and_optimizer(1)
    train(model, optimizer, 2)
    OutputFolder(tmp_path).prepare()
    host = KeeperProcess(KeeperPlan(key=new_keeper_key()))
    try:
        keeper = KeeperClient.connect(host.key, wait_s=20, rank=0, num_ranks=1)
        assert keeper is not None
        assert keeper.open_folder(str(tmp_path)) == ""
        snapshotter = Snapshotter(keeper, optimizers=[optimizer], on_torn=lambda _: None)
        images = [
            TorchImages("model.pt").compose(ModuleState(model).state_dict()),
            TorchImages("optimizer.pt").compose(OptimizerState(optimizer).state_dict()),
        ]
        manifest = ManifestFacts(
            run_id="r",
            attempt=1,
            step=2,
            epoch=0.0,
            world_size=1,
            global_batch=1,
            gradient_accumulation=1,
            samples_seen=2,
            strategy="single",
        )
        facts = CheckpointFacts(folder=str(tmp_path), attempt_id="a", manifest=manifest)
        expected = content_of(model, optimizer)
        assert snapshotter.take(2, images, trigger=Trigger.PERIODIC, is_requested=True, facts=facts, number=1)
        train(model, optimizer, 1)
        snapshotter.wait_staged()
        keeper.close()  # without a goodbye
        again = KeeperClient.connect(host.key, wait_s=20, rank=0, num_ranks=1, restart=1)
        assert again is not None
        recalled = again.find_earlier_snapshot()
        assert recalled is not None
        other, its_optimizer = model_and_optimizer(2)
        load_state(Path(recalled.folder), {"model": other, "optimizer": its_optimizer})
        assert are_equal(content_of(other, its_optimizer), expected)
        again.send(Goodbye())
        again.close()
        snapshotter.close()
    finally:
        host.finish(20)
