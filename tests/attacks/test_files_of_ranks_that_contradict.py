"""A checkpoint in which the files of two ranks contradict each other.

They differ in the work that is due, or in the position in the data. One rank would begin an evaluation, or end an
epoch, and the others would train on: the ranks would wait for each other until a time limit, in each start, and no
message would name the checkpoint.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from transformers import Trainer

from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import CheckpointError, NothingValidError
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.integrations.lightning.lightning_data import LightningData
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.data_position import may_dispatch
from safepoint.training.integrations.transformers.resume.trainer_state import (
    DeferredWork,
    LossTotals,
    RankState,
    contradiction_in,
)
from safepoint.training.plain.data.position import DataSource, Position
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.plain.plain_loop import PlainLoop
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import Examine, ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from safepoint.training.state.rng import capture_rng
from tests.support.checkpoints import commit, prepared
from tests.support.ranks import ThreadPeers, run_ranks

_LOSS = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)
_STATE = RankState(loss=_LOSS, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0)
_SAMPLES = list(range(80))
"""40 batches for each of two ranks. The checkpoints of step 10 and 20 are of epoch 1 and 2."""


class Stream(IterableDataset[int]):
    """States a length, which need not be true."""

    def __iter__(self) -> Any:
        return iter(_SAMPLES[:40])

    def __len__(self) -> int:
        return 40


def in_session(peers: ThreadPeers, data: Any = None) -> PlainLoop:
    sampler: DistributedSampler[int] = DistributedSampler(_SAMPLES, 2, peers.place.rank)  # pyright: ignore
    return _loop(peers, TrackedData(DataLoader(_SAMPLES, sampler=sampler) if data is None else data, print))


def in_lightning(peers: ThreadPeers) -> PlainLoop:
    return _loop(peers, LightningData(SimpleNamespace(), print))


def _loop(peers: ThreadPeers, data: DataSource) -> PlainLoop:
    parts: Any = SimpleNamespace(strategy="ddp", zero_stage=0, written_fraction=1.0, contradiction_in=lambda *_: "")
    return PlainLoop(parts, data, peers.place)


def _in_lightning_at(epoch: int, batches: int, loader: Position | None = None, **others: Any) -> dict[str, Any]:
    mine = loader or Position(epoch=epoch, batches=batches)
    return _at(epoch, batches, loader=[mine.as_dict()], **others)


def _at(epoch: int, batches: int, *, step: int | None = 20, **fields: Any) -> dict[str, Any]:
    position = Position(epoch=epoch, batches=batches, **fields)
    stated = {} if step is None else {"step": step}
    return {"rng": capture_rng(), "position": position.as_dict(), **stated}


def write(output: OutputFolder, step: int, *states: dict[str, Any]) -> None:
    folder = output.root / "rank"
    files: dict[int, dict[str, bytes]] = {0: {"model.safetensors": b"weights"}}
    for rank, state in enumerate(states):
        torch.save(state, folder)
        files.setdefault(rank, {})[f"rank_{rank}.pt"] = folder.read_bytes()
    folder.unlink(missing_ok=True)
    commit(output, step, files)


def resume(
    output: OutputFolder, examine: Callable[[ThreadPeers], Examine], *, num_ranks: int = 2, **options: Any
) -> tuple[list[Any], list[Event]]:
    """Start on several ranks; returns what each rank resumes from, or its error, and the events of the first rank."""
    events: list[Event] = []

    def one(peers: Any) -> int | None:
        settings, is_first = RunSettings(**options), peers.place.is_first
        folders = Folders(is_owner=is_first, owner_of=dict.fromkeys(range(num_ranks), 0))
        first = FirstStart(peers, output, None, settings)
        report = events.append if is_first else lambda event: None
        chooser = CheckpointChooser(peers, output, folders, None, settings, first, report, examine=examine(peers))
        point = chooser.choose()
        return None if point is None else point.manifest.step

    return run_ranks(num_ranks, one), events


def of(loop: Callable[[ThreadPeers], PlainLoop]) -> Callable[[ThreadPeers], Examine]:
    def examine(peers: Any) -> Examine:
        made = loop(peers)
        return lambda point: made.contradiction_in(point, peers)

    return examine


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    return prepared(tmp_path / "out")


# ---- the position in the data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "first", "second", "reason"),
    [
        (in_session, _at(1, 5, taken=45), _at(1, 6, taken=45), "different positions in the data"),
        (in_session, _at(1, 5, taken=45), _at(2, 5, taken=45), "different positions in the data"),
        (in_session, _at(0, 5, taken=5), _at(0, 6, taken=5), "different positions in the data"),
        (in_session, _at(1, 5, taken=45, step=10), _at(1, 15, taken=55), "is of step 10"),
        (in_session, _at(9, 0), _at(9, 0), "the manifest says epoch 2"),
        (in_lightning, _in_lightning_at(1, 5), _in_lightning_at(1, 6), "different positions in the data"),
        (in_lightning, _in_lightning_at(1, 5), _at(2, 0), "different positions in the data"),
        (
            in_lightning,
            _in_lightning_at(1, 5),
            _in_lightning_at(1, 5, loader=Position(epoch=1, batches=9)),
            "different positions in the data",
        ),
        (in_lightning, _in_lightning_at(1, 5), _in_lightning_at(1, 5, taken=3, step=10), "is of step 10"),
    ],
)
def test_the_checkpoint_before_is_taken(
    output: OutputFolder,
    loop: Callable[[ThreadPeers], PlainLoop],
    first: dict[str, Any],
    second: dict[str, Any],
    reason: str,
) -> None:
    """By all ranks. The event names the checkpoint and the reason, and the checkpoint is moved aside."""
    write(output, 10, *[_in_lightning_at(1, 0, step=10) if loop is in_lightning else _at(1, 0, step=10)] * 2)
    write(output, 20, first, second)
    points, events = resume(output, of(loop))
    assert points == [10, 10]
    (rejected,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert rejected.path.endswith("checkpoint-20")
    assert reason in rejected.reason
    assert output.steps() == [10]


@pytest.mark.parametrize("loop", [in_session, in_lightning])
def test_usual_checkpoints_are_taken(output: OutputFolder, loop: Callable[[ThreadPeers], PlainLoop]) -> None:
    """Also one of a commit that did not count yet; a file of another kind of loop is refused later."""
    place = _in_lightning_at if loop is in_lightning else _at
    for states in ([place(1, 5, taken=45), place(1, 5, taken=45)], [place(1, 5, step=None)] * 2, []):
        write(output, 20, *states)
        assert resume(output, of(loop))[0] == [20, 20]
        output.set_aside([output.root / "checkpoint-20"])


def test_loops_that_skip_batches_on_a_rank(output: OutputFolder) -> None:
    """A rank may leave out a batch that it cannot use, and take the next one: the ranks then are at other places."""
    write(output, 20, _at(1, 5, taken=45), _at(1, 6, taken=46))
    assert resume(output, of(in_session))[0] == [20, 20]


def test_a_checkpoint_of_a_release_that_did_not_count_batches(output: OutputFolder) -> None:
    """Its ranks may have left out different numbers of batches, so their positions are not compared."""
    old = [_at(1, 5, step=None), _at(1, 6, step=None)]
    for state in old:
        del state["position"]["taken"]
    write(output, 20, *old)
    assert resume(output, of(in_session))[0] == [20, 20]


class Shorter(SequentialSampler):
    """States one batch more than it has, as samplers that group samples by their length may do."""

    def __iter__(self) -> Any:
        return iter(_SAMPLES[:9])

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("is_shorter", [True, False], ids=["sampler", "break"])
def test_epochs_that_end_early_on_a_rank(output: OutputFolder, *, is_shorter: bool) -> None:
    """The ranks have then taken equal numbers of batches, and are at different positions in the next epoch."""
    states: list[dict[str, Any]] = []
    for rank in range(2):
        sampler = Shorter(_SAMPLES) if is_shorter and rank else SequentialSampler(_SAMPLES[:10])
        data = TrackedData(DataLoader(_SAMPLES, sampler=sampler), print)
        taken = itertools.count(1)
        for batches in data.epochs(2):
            for number, _ in enumerate(batches):
                if next(taken) == 12 or (not is_shorter and rank and data.epoch == 0 and number == 6):
                    break
            if data.epoch:
                break
        states.append({"rng": capture_rng(), "position": data.position().as_dict(), "step": 20})
    first, second = (state["position"]["batches"] for state in states)
    assert first != second
    write(output, 20, *states)
    assert resume(output, of(in_session))[0] == [20, 20]


@pytest.mark.parametrize("data", [Stream(), DataLoader(Stream())], ids=["any", "loader"])
def test_streams_of_other_lengths(output: OutputFolder, data: Any) -> None:
    """A stream does not state where an epoch ends. In the first epoch, the number of batches decides."""

    def loop(peers: ThreadPeers) -> PlainLoop:
        return in_session(peers, data)

    write(output, 10, _at(0, 9, taken=9, step=10), _at(0, 8, taken=9, step=10))
    write(output, 20, _at(0, 41, taken=41), _at(1, 1, taken=41))
    assert resume(output, of(loop))[0] == [20, 20]
    output.set_aside([output.root / "checkpoint-20"])
    assert {type(one) for one in resume(output, of(loop))[0]} == {NothingValidError}


def test_a_named_checkpoint_is_refused(output: OutputFolder) -> None:
    write(output, 10, *[_at(1, 0, step=10)] * 2)
    write(output, 20, _at(1, 5, taken=45), _at(1, 6, taken=45))
    found, _ = resume(output, of(in_session), resume=str(output.root / "checkpoint-20"))
    assert {type(one) for one in found} == {CheckpointError}
    assert "checkpoint-20 cannot be used: the files of the ranks 0 and 1" in str(found[1])
    assert output.steps() == [20, 10]


@pytest.mark.parametrize(
    "broken", [{"position": 5}, {"position": {"epoch": -1}}, {}, 5, {"position": {}, "step": []}]
)
def test_a_file_without_a_position_is_refused_by_all(output: OutputFolder, broken: Any) -> None:
    """The checkpoint before is taken; without one, the run ends with exit code 14."""
    write(output, 20, _at(1, 5), broken)
    found, events = resume(output, of(in_session))
    assert {type(one) for one in found} == {NothingValidError}
    write(output, 10, *[_at(1, 0, step=10)] * 2)
    points, more = resume(output, of(in_session))
    assert points == [10, 10]
    rejected = [event for event in [*events, *more] if isinstance(event, CheckpointRejected)]
    assert len(rejected) == 2
    assert all("rank_1.pt could not be loaded" in event.reason for event in rejected)


def test_what_a_loop_counts() -> None:
    """The number of batches goes on after a resume, also in another epoch."""
    data = TrackedData(_SAMPLES[:4], print)
    for batches in data.epochs(1):
        list(batches)
    data.resume(replace(data.position(), batches=0), None)
    batches = next(iter(data.epochs(2)))
    next(batches)
    assert (data.position().epoch, data.position().batches, data.position().taken) == (1, 1, 5)


# ---- the work that is due -----------------------------------------------------------------------------------------


def in_trainer(peers: Any) -> Examine:
    return lambda point: contradiction_in(point, peers)


def write_states(output: OutputFolder, step: int, states: Sequence[RankState | None]) -> None:
    folder = output.root / "rank"
    files: dict[int, dict[str, bytes]] = {0: {"weights": b"weights"}}
    folder.mkdir()
    for rank, state in enumerate(states):
        if state is not None:
            state.write(folder, rank)
            (path,) = folder.iterdir()
            files.setdefault(rank, {})[path.name] = path.read_bytes()
            path.unlink()
    folder.rmdir()
    commit(output, step, files)


@pytest.mark.parametrize(
    "other",
    [
        *(replace(_STATE, pending=DeferredWork(**{name: True})) for name in ("evaluate", "save", "epoch_end")),
        replace(_STATE, pending=DeferredWork(complete=True)),
        replace(_STATE, asked_accumulation=7), replace(_STATE, is_irregular=True), None,
    ],
)  # fmt: skip
def test_due_work_that_contradicts(output: OutputFolder, other: RankState | None) -> None:
    write_states(output, 10, [_STATE, _STATE])
    write_states(output, 20, [_STATE, other])
    points, events = resume(output, in_trainer)
    assert points == [10, 10]
    (rejected,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert "the files of the ranks 0 and 1 contradict each other about the work that is due" in rejected.reason


_CYCLE = {"_step": 10, "_buffered_inputs": [{}, {}]}
_LOADER = {
    "_sampler_iter_state": {"samples_yielded": 20},
    "_sampler_iter_yielded": 10,
    "_num_yielded": 10,
    "_iterator_finished": False,
}
_IN_WORKERS = {"_snapshot": {"_snapshot_step": 4, "_main_snapshot": {"_base_seed": 7}}, "_steps_since_snapshot": 1}
_POSITION = "the position in the data"


@pytest.mark.parametrize(
    ("own", "other", "subject"),
    [
        ({}, {"loss": replace(_LOSS, last_logged_step=10)}, "the last log line"),
        ({"loss": replace(_LOSS, last_logged_step=9)}, {}, "the last log line"),
        ({"loss": replace(_LOSS, last_logged_step=9, first_step=9)}, {}, "the last log line"),
        ({}, {"counted": TrainerCounters(is_training=False)}, "the mode of the model"),
        *(
            ({"counted": TrainerCounters(cycle=_CYCLE)}, {"counted": TrainerCounters(cycle=cycle)}, "the completions")
            for cycle in ({**_CYCLE, "_step": 8}, {**_CYCLE, "_buffered_inputs": [{}]}, {"_step": 10}, {})
        ),
        *(
            ({"loader": _LOADER}, {"loader": loader}, _POSITION)
            for loader in (
                {**_LOADER, "_num_yielded": 15},
                {**_LOADER, "_sampler_iter_yielded": 15},
                {**_LOADER, "_sampler_iter_state": {"samples_yielded": 60}},
                {**_LOADER, "_iterator_finished": True},
                None,
                {},
            )
        ),
        ({"loader": _IN_WORKERS}, {"loader": {**_IN_WORKERS, "_snapshot": {"_snapshot_step": 5}}}, _POSITION),
        ({"loader": _IN_WORKERS}, {"loader": {**_IN_WORKERS, "_steps_since_snapshot": 2}}, _POSITION),
        ({}, {"epoch_rng": capture_rng()}, _POSITION),
        ({}, {"generators": [torch.zeros(5, dtype=torch.uint8)]}, _POSITION),
    ],
)  # fmt: skip
def test_states_that_contradict(
    output: OutputFolder, own: dict[str, Any], other: dict[str, Any], subject: str
) -> None:
    """The ranks would log, evaluate, generate or end an epoch at different steps."""
    write_states(output, 10, [_STATE, _STATE])
    write_states(output, 20, [replace(_STATE, **own), replace(_STATE, **other)])
    points, events = resume(output, in_trainer)
    assert points == [10, 10]
    (rejected,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert f"the files of the ranks 0 and 1 contradict each other about {subject}" in rejected.reason


@pytest.mark.parametrize(("first", "last"), [(24, 24), (5, 4), (0, 21), (0, 10**9)])
def test_log_lines_of_later_steps(output: OutputFolder, first: int, last: int) -> None:
    """With such a state on all ranks, no log line would be written until that step."""
    write_states(output, 10, [_STATE, _STATE])
    write_states(output, 20, [replace(_STATE, loss=replace(_LOSS, first_step=first, last_logged_step=last))] * 2)
    points, events = resume(output, in_trainer)
    assert points == [10, 10]
    (rejected,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert "the file of a rank is not of step 20" in rejected.reason


def test_states_of_loaders_that_may_differ(output: OutputFolder) -> None:
    """The states of workers and data sets, and seeds. A loader that receives its batches has read nothing."""
    others: dict[str, Any] = {
        "dataset_state": {"_num_yielded": 7},
        "_shared_seed": 5,
        "_snapshot": {"_snapshot_step": 4, "_main_snapshot": {"_base_seed": 9}, "_worker_snapshots": {"a": 5}},
    }
    states = [
        replace(_STATE, loader={**_LOADER, **_IN_WORKERS}),
        replace(_STATE, loader={**_LOADER, **_IN_WORKERS, **others}),
    ]
    write_states(output, 10, states)
    assert resume(output, in_trainer)[0] == [10, 10]
    write_states(output, 20, [states[0], replace(_STATE, loader={"_num_yielded": 0, "_iterator_finished": False})])

    def dispatched(peers: Any) -> Examine:
        return lambda point: contradiction_in(point, peers, may_dispatch=True)

    assert resume(output, dispatched)[0] == [20, 20]
    assert resume(output, in_trainer)[0] == [10, 10]


@pytest.mark.parametrize(
    ("dispatch_batches", "data", "expected"),
    [
        (None, [1], False),
        (None, Stream(), True),
        (None, iter([1]), True),
        (True, [1], True),
        (False, Stream(), False),
    ],
)
def test_loaders_that_receive_their_batches(dispatch_batches: bool | None, data: Any, *, expected: bool) -> None:
    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return None

    for kind in (Trainer, OwnLoader):
        trainer = object.__new__(kind)
        trainer.accelerator, trainer.train_dataset = SimpleNamespace(dispatch_batches=dispatch_batches), data  # pyright: ignore
        assert may_dispatch(trainer) == (expected or (kind is OwnLoader and dispatch_batches is None))


def test_they_may_differ_in_all_else(output: OutputFolder) -> None:
    work = DeferredWork(evaluate=True, grad_norm=1.5, learning_rate=0.1)
    states = [
        replace(
            _STATE, pending=replace(work, grad_norm=number), elapsed_s=number, loss=replace(_LOSS, since_log=number)
        )
        for number in (1.0, 2.0)
    ]
    write_states(output, 10, states)
    assert resume(output, in_trainer)[0] == [10, 10]
    write_states(output, 20, [None, None])
    assert resume(output, in_trainer)[0] == [20, 20]


def test_the_point_states_the_ranks_before(output: OutputFolder) -> None:
    """On another number of ranks each rank reads the file of one that was there, and losses of all."""
    write_states(output, 10, [_STATE, replace(_STATE, asked_accumulation=7)])
    point = ResumePoint(path=output.root / "checkpoint-10", manifest=read_manifest(output.root / "checkpoint-10"))
    assert run_ranks(3, lambda peers: in_trainer(peers)(point)) == ["", "", ""]
