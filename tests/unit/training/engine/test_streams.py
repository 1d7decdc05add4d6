"""A model from the ranks into a store: in order, tried again, or reported with the reason."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import upload_record
from safepoint.errors import AccessDeniedError, SaveError, StorageError
from safepoint.training.engine import final_model_save, streams
from safepoint.training.engine.final_model_save import FinalUpload
from safepoint.training.engine.streams import Leader, StreamedFile, Streams, WeightRange, follow
from tests.support.checkpoints import describe, prepared
from tests.support.ranks import ThreadPeers, run_ranks
from tests.support.stores import FaultyStore

_NUM_RANKS = 3


class Scene:
    """Two weights of which every rank has a third, in two files, and a small file beside them."""

    def __init__(self, root: Path) -> None:
        self.output = prepared(root / "local")
        self.small = root / "small"
        self.small.mkdir()
        (self.small / "config.json").write_bytes(b"{}")
        self.bucket = root / "bucket"
        self.store = FaultyStore(self.bucket)
        self.remote = RemoteFolder(self.store)
        self.remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="here"))
        self.weights = {"a": os.urandom(3000), "b": os.urandom(999)}
        self.reported: list[StorageError] = []
        self.broken: set[tuple[int, str]] = set()

    def file(self, name: str) -> StreamedFile:
        third = len(self.weights[name]) // _NUM_RANKS
        stretches = [WeightRange(rank, name, rank * third, third) for rank in range(_NUM_RANKS)]
        return StreamedFile(f"{name}.safetensors", 6 + 3 * third, [b"header", *stretches])

    def run(self, peers: ThreadPeers) -> Any:
        def bytes_of(name: str, begin: int, num_bytes: int) -> torch.Tensor:
            if (peers.place.rank, name) in self.broken:
                raise RuntimeError("its memory is gone")
            data = self.weights[name][begin : begin + num_bytes]
            assert begin // (len(self.weights[name]) // _NUM_RANKS) == peers.place.rank
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        mine = Streams(files=(self.file("a"), self.file("b")), bytes_of=bytes_of, step=9)
        if not peers.place.is_first:
            return follow(peers, mine)  # type: ignore[arg-type]
        leader = Leader(peers, mine, patience_s=60)  # type: ignore[arg-type]
        upload = FinalUpload(
            self.remote, self.output, leader, large=mine.files, small=self.small, failed=self.reported.append
        )
        return leader.lead(lambda: upload.run(describe(9)))

    def run_all(self) -> Any:
        """What the first rank returns or raises; the others end well whatever that is."""
        first, *others = run_ranks(_NUM_RANKS, self.run)
        assert others == [None] * (_NUM_RANKS - 1)
        return first


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(final_model_save, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 256)
    return Scene(tmp_path)


def assert_there(scene: Scene) -> None:
    assert verify(scene.bucket / FINAL).is_valid
    for name, data in scene.weights.items():
        assert (scene.bucket / FINAL / f"{name}.safetensors").read_bytes() == b"header" + data
    assert (scene.bucket / FINAL / "config.json").read_bytes() == b"{}"
    assert not list(scene.store.list(UNFINISHED))


def test_every_stretch_comes_from_who_has_it(scene: Scene) -> None:
    """In the files' order, and the manifest names what has passed by."""
    manifest = scene.run_all()
    assert [entry.path for entry in manifest.files] == ["a.safetensors", "b.safetensors", "config.json"]
    assert_there(scene)
    assert all(upload_record(scene.output, FINAL).version_of(entry) for entry in manifest.files)


def failing(num_times: int, method: str, key: str, error: StorageError) -> Callable[[str, str], None]:
    left = [num_times]

    def before(name: str, called: str) -> None:
        if (name, called) == (method, key) and left[0]:
            left[0] -= 1
            raise error

    return before


def test_what_fails_is_tried_again(scene: Scene) -> None:
    """Reported once; parts that have arrived are not sent again."""
    scene.store.before = failing(3, "upload", "final/b.safetensors", StorageError("busy"))
    scene.run_all()
    assert_there(scene)
    assert [str(error) for error in scene.reported] == ["busy"]
    uploads = [key for name, key in scene.store.calls if name == "upload"]
    assert uploads.count("final/a.safetensors") == 1
    assert uploads.count("final/b.safetensors") == 4


@pytest.mark.parametrize("key", ["final/b.safetensors", "final/safepoint-manifest.json"])
def test_patience_has_an_end(key: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses whatever is tried: the error comes out, nothing counts, and it is marked for cleaning."""
    monkeypatch.setattr(final_model_save, "patience_s", lambda error: 0.3)
    method = "upload" if key.endswith("safetensors") else "write"
    scene.store.before = failing(10_000, method, key, AccessDeniedError("no"))
    first = scene.run_all()
    assert isinstance(first, AccessDeniedError)
    assert not (scene.bucket / FINAL / "safepoint-manifest.json").exists()
    assert [item.key for item in scene.store.list(UNFINISHED)] == [f"{UNFINISHED}/final"]
    assert scene.remote.clean(keep=()) >= 1
    assert not (scene.bucket / FINAL).exists()


@pytest.mark.parametrize("rank", range(_NUM_RANKS))
def test_a_rank_that_cannot_give_its_share(rank: int, scene: Scene) -> None:
    """All end, the reason is said, and no model with a hole in it counts."""
    scene.broken.add((rank, "b"))
    first = scene.run_all()
    assert isinstance(first, SaveError if rank else RuntimeError)
    assert "its memory is gone" in str(first)
    assert not (scene.bucket / FINAL / "safepoint-manifest.json").exists()


def test_whoever_waits_hears_that_it_goes_on(scene: Scene) -> None:
    """The store takes long; the first rank says something again and again meanwhile."""
    said: list[object] = []

    def slow(name: str, key: str) -> None:
        if (name, key) == ("upload", "final/config.json"):
            time.sleep(1)

    def run(peers: ThreadPeers) -> Any:
        if peers.place.rank == 1:
            original = peers.from_first

            def from_first(value: object) -> object:
                said.append(original(value))
                return said[-1]

            peers.from_first = from_first  # type: ignore[method-assign]
        return scene.run(peers)

    scene.store.before = slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_ALIVE_EVERY_S", 0.1)
        first, *_ = run_ranks(_NUM_RANKS, run)
    assert not isinstance(first, Exception), first
    assert said.count(None) >= 3
    assert_there(scene)
