"""Who copies what of a checkpoint of ZeRO, and who hears of it."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.manifest import FileEntry, Manifest, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import CheckpointError, ConflictError, StorageError
from safepoint.foundation.events.run_events import Repartitioned
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.room import Room
from safepoint.training.integrations.deepspeed import universal
from safepoint.training.integrations.transformers.sharding.repartition import Repartition
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.folders import Folders
from tests.support.contexts import rank_context
from tests.support.ranks import ThreadPeers, run_ranks
from tests.support.zero import MOMENTS, WEIGHTS, random_states, write_zero

LOCAL_RANKS = (0, 1, 0, 1)
"""Two nodes of two ranks each."""


def trainer(stage: int) -> Any:
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(
        args=SimpleNamespace(world_size=len(LOCAL_RANKS)),
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
    )


def manifest(ranks: int, stage: int) -> Manifest:
    return Manifest(
        run_id="run",
        attempt=1,
        step=5,
        epoch=0.5,
        trigger=Trigger.PERIODIC,
        world_size=ranks,
        global_batch=8,
        gradient_accumulation=1,
        samples_seen=40,
        strategy="deepspeed",
        zero_stage=stage,
        created="2026-01-01T00:00:00Z",
        files=(FileEntry(path="latest", size_bytes=1, digest="xxh3-128:" + "0" * 32),),
    )


class Rank:
    """One rank's `Repartition`, and what it has reported."""

    def __init__(self, peers: ThreadPeers, roots: Sequence[Path], stage: int = 2) -> None:
        rank = peers.place.rank
        index = rank // 2 if len(roots) > 1 else 0
        owners = (0, 2) if len(roots) > 1 else (0,)
        output = OutputFolder(roots[index])
        output.prepare()
        self.reported: list[Any] = []
        context = rank_context(peers.place, reported=self.reported)
        folders = Folders(owners=owners, index=index, is_owner=rank in owners)
        self.root = roots[index]
        self.repartition = Repartition(context, peers, trainer(stage), output, folders)  # type: ignore[arg-type]

    @property
    def copy(self) -> Path:
        return self.root / ".safepoint" / "work" / "universal-checkpoint-5"


def assert_whole(copy: Path, states: Any) -> None:
    for name in WEIGHTS:
        for state in ("fp32", *MOMENTS):
            found = torch.load(copy / "global_step5" / "zero" / name / f"{state}.pt")["param"]
            assert torch.equal(found, states[name][state])


@pytest.mark.parametrize("num_folders", [1, 2])
def test_each_folder_gets_one_copy(num_folders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that share a folder share the work; the first rank of a node does it."""
    roots = [tmp_path / f"node-{index}" for index in range(num_folders)]
    states = random_states()
    for root in roots:
        write_zero(root / "checkpoint-5", states, stage=2, ranks=3)
    shares: list[tuple[int, int]] = []
    write = universal.Universal.write
    monkeypatch.setattr(
        universal.Universal,
        "write",
        lambda self, index, count, watch=None: (shares.append((index, count)), write(self, index, count, watch)),
    )

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, roots)
        rank.repartition.prepare(ResumePoint(path=rank.root / "checkpoint-5", manifest=manifest(3, 2)))
        peers.gather(None)
        if peers.place.local_rank == 0:
            assert_whole(rank.copy, states)
        peers.gather(None)
        rank.repartition.close()
        peers.gather(None)
        assert not rank.copy.exists()
        return rank.reported

    reported = run_ranks(4, start, local_ranks=LOCAL_RANKS)
    assert sorted(shares) == ([(0, 2), (1, 2)] if num_folders == 1 else [(0, 1), (0, 1)])
    for events in reported:
        assert [type(event) for event in events] == [Repartitioned]
        assert "ZeRO-2 on 3 ranks → ZeRO-2 on 4 ranks: 6 weights" in events[0].line


def test_as_many_ranks_copy_nothing(tmp_path: Path) -> None:
    """DeepSpeed loads its own files."""

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, [tmp_path])
        rank.repartition.prepare(ResumePoint(path=tmp_path / "checkpoint-5", manifest=manifest(4, 2)))
        return rank.reported, rank.copy.exists()

    assert run_ranks(4, start, local_ranks=LOCAL_RANKS) == [([], False)] * 4


def test_what_one_node_cannot_do_all_ranks_hear(tmp_path: Path) -> None:
    """The other node's copy is deleted, too."""
    roots = [tmp_path / "node-0", tmp_path / "node-1"]
    for root in roots:
        place = write_zero(root / "checkpoint-5", random_states(), stage=2, ranks=3)
    (place / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, roots)
        with pytest.raises(CheckpointError, match="lacks the file of a rank; training was not started"):
            rank.repartition.prepare(ResumePoint(path=rank.root / "checkpoint-5", manifest=manifest(3, 2)))
        peers.gather(None)
        return rank.reported, rank.copy.exists()

    assert run_ranks(4, start, local_ranks=LOCAL_RANKS) == [([], False)] * 4


def test_too_little_room_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, and nothing stays."""
    write_zero(tmp_path / "checkpoint-5", random_states(), stage=2, ranks=3)
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=1000))

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, [tmp_path])
        with pytest.raises(StorageError, match=r"1.0 kB free.*; training was not started"):
            rank.repartition.prepare(ResumePoint(path=tmp_path / "checkpoint-5", manifest=manifest(3, 2)))
        peers.gather(None)
        return rank.copy.exists()

    assert run_ranks(4, start, local_ranks=LOCAL_RANKS) == [False] * 4


def test_a_model_that_differs_is_refused_by_all(tmp_path: Path) -> None:
    """Before DeepSpeed looks at the copy, which is deleted."""
    write_zero(tmp_path / "checkpoint-5", random_states(), stage=2, ranks=3)

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, [tmp_path])
        rank.repartition.prepare(ResumePoint(path=tmp_path / "checkpoint-5", manifest=manifest(3, 2)))
        engine = SimpleNamespace(module=torch.nn.Linear(2, 3))
        original = lambda *_: pytest.fail("it was loaded")  # noqa: E731
        with pytest.raises(ConflictError, match=r"this run's is of shape .*; training was not started"):
            rank.repartition.load(original, engine, str(tmp_path / "checkpoint-5"), load_module_strict=True)
        peers.gather(None)
        return rank.copy.exists()

    assert run_ranks(4, start, local_ranks=LOCAL_RANKS) == [False] * 4


def test_another_folder_is_deepspeeds(tmp_path: Path) -> None:
    """A checkpoint without a manifest, which the script names itself."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "latest").write_text("global_step7")
    engine = SimpleNamespace(optimizer=None, load_checkpoint=None)

    def start(peers: ThreadPeers) -> Any:
        rank = Rank(peers, [tmp_path])
        loaded: list[Any] = []
        original = lambda *arguments, **options: loaded.append((arguments, options))  # noqa: E731
        rank.repartition.load(original, engine, tmp_path / "theirs", load_module_strict=False)
        (call,) = loaded
        return call

    expected = ((engine, tmp_path / "theirs"), {"load_module_strict": False})
    assert run_ranks(4, start, local_ranks=LOCAL_RANKS) == [expected] * 4
