"""The end of a training on all ranks: one that cannot write its model reports it to all, and by the exit code."""

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, ManifestFacts
from safepoint.checkpoint.local.final_model import final_folder
from safepoint.checkpoint.local.working_checkpoint import WorkingCheckpoint
from safepoint.errors import PeerError
from safepoint.foundation.events.run_events import FinalMissing
from safepoint.foundation.events.stream import Event
from safepoint.storage.location import parse_location
from safepoint.training.engine.final_model_save import FinalModelSave
from safepoint.training.engine.setup import TrainingSetup
from safepoint.training.start.folders import Folders
from safepoint.training.start.start import Attempt, Start
from tests.support.checkpoints import prepared
from tests.support.contexts import rank_context
from tests.support.ranks import ThreadPeers, run_ranks

_NO_ROOM = OSError(errno.ENOSPC, "No space left on device")
FACTS = ManifestFacts(
    run_id="run",
    attempt=1,
    step=9,
    epoch=1.0,
    world_size=2,
    global_batch=8,
    gradient_accumulation=1,
    samples_seen=72,
    strategy="ddp",
)
Write = Callable[[ThreadPeers, Path], None]


def gathers(peers: ThreadPeers, folder: Path) -> None:
    """As a framework does whose weights lie on all ranks."""
    assert peers.gather(("weights of", peers.place.rank)) == [("weights of", 0), ("weights of", 1)]
    if peers.place.is_first:
        (folder / "model.safetensors").write_bytes(b"weights")


def finish(output: Any, write: Write) -> list[SimpleNamespace | Exception]:
    """What two ranks have reported, and what is missing for them, after the end."""

    def run(peers: ThreadPeers) -> SimpleNamespace:
        reported: list[Event] = []
        context = rank_context(peers.place, reported=reported)
        context.uploads.uploader = SimpleNamespace()  # type: ignore[assignment]
        loop: Any = SimpleNamespace(
            step=9, write_final=lambda folder: write(peers, folder), manifest_facts=lambda attempt: FACTS
        )
        location = parse_location("s3://bucket/run")
        start = Start(
            point=None,
            attempt=Attempt(run_id="run", attempt=1, attempt_id="attempt"),
            folders=Folders(is_owner=peers.place.is_first),
        )
        everyone: Any = peers
        setup = TrainingSetup(
            context=context, peers=everyone, loop=loop, output=output, location=location, start=start
        )
        FinalModelSave(setup, location).save()
        return SimpleNamespace(reported=reported, missing=context.uploads.missing(is_complete=True))

    return run_ranks(2, run)


def assert_told(ranks: list[Any], reason: str) -> None:
    """On the first rank, whose word becomes the exit code."""
    first, other = ranks
    (event,) = first.reported
    assert isinstance(event, FinalMissing)
    assert reason in event.reason
    assert "s3://bucket/run/final" in first.missing
    assert "run the same command again" in first.missing
    assert other.missing == ""


def test_all_is_well(tmp_path: Path) -> None:
    """The model waits for the uploader, without a message."""
    output = prepared(tmp_path)
    ranks: list[Any] = finish(output, gathers)
    assert [(rank.reported, rank.missing) for rank in ranks] == [([], ""), ([], "")]
    assert (final_folder(output) / MANIFEST_NAME).is_file()


def test_a_rank_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk is full: no rank begins with the framework's collective calls."""
    original = WorkingCheckpoint.rank_root

    def rank_root(self: WorkingCheckpoint, rank: int) -> Path:
        if rank == 1:
            raise _NO_ROOM
        return original(self, rank)

    monkeypatch.setattr(WorkingCheckpoint, "rank_root", rank_root)
    assert_told(finish(prepared(tmp_path), gathers), "rank 1: OSError: [Errno 28]")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_cannot_be_written(rank: int, tmp_path: Path) -> None:
    """The framework fails on one rank, after its collective calls."""

    def write(peers: ThreadPeers, folder: Path) -> None:
        gathers(peers, folder)
        if peers.place.rank == rank:
            raise _NO_ROOM

    output = prepared(tmp_path)
    assert_told(finish(output, write), f"rank {rank}: OSError: [Errno 28]")
    assert not final_folder(output).exists()


def test_a_model_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written, and does not become durable."""

    def seal(self: WorkingCheckpoint, rank: int, *, node: int) -> Any:
        raise _NO_ROOM

    monkeypatch.setattr(WorkingCheckpoint, "seal", seal)
    assert_told(finish(prepared(tmp_path), gathers), "No space left")


def test_a_rank_that_is_gone(tmp_path: Path) -> None:
    """Nothing is gathered of it."""

    def write(peers: ThreadPeers, folder: Path) -> None:
        raise PeerError("rank 3 is gone")

    assert all(isinstance(rank, PeerError) for rank in finish(prepared(tmp_path), write))
