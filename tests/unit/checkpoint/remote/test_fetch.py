"""Fetching: whole and verified, or not at all; only what arrived damaged is fetched again."""

from collections import Counter
from pathlib import Path

import pytest

from safepoint.checkpoint.commit import FolderDestination
from safepoint.checkpoint.commit import commit as finish
from safepoint.checkpoint.format import digest
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.remote.fetch import check_listing, create_files, fetch, share, windows_of
from safepoint.errors import CheckpointError, StorageError
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.room import Room
from safepoint.storage import local_folder
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore, flip


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PART_BYTES", 1000)
    monkeypatch.setattr("safepoint.checkpoint.remote.fetch.PART_BYTES", 1000)
    monkeypatch.setattr(local_folder, "_BLOCK_BYTES", 300)


@pytest.fixture
def store(small_parts: None, tmp_path: Path) -> FaultyStore:
    commit(prepared(tmp_path / "bucket"), 20)
    return FaultyStore(tmp_path / "bucket")


@pytest.fixture
def manifest(store: FaultyStore, tmp_path: Path) -> Manifest:
    return read_manifest(tmp_path / "bucket" / "checkpoint-20")


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 50])
def test_nodes_fetch_disjoint_shares(num_nodes: int, store: FaultyStore, manifest: Manifest, tmp_path: Path) -> None:
    """Together they read every byte of the store once, and the folder is the checkpoint."""
    working = tmp_path / "working"
    create_files(manifest.files, working)
    shares = [share(windows_of(manifest.files), index=index, count=num_nodes) for index in range(num_nodes)]
    assert Counter(part for one in shares for part in one) == Counter(windows_of(manifest.files))
    if num_nodes <= 3:
        sizes = [sum(part.size_bytes for part in one) for one in shares]
        assert max(sizes) - min(sizes) <= 1000
    arrived: list[int] = []
    for one in shares:
        fetch(store, "checkpoint-20", one, working, progress=arrived.append)
    assert sum(arrived) == manifest.size_bytes
    (tmp_path / "trash").mkdir()
    finish(FolderDestination(working, tmp_path / "checkpoint-20", trash=tmp_path / "trash"), manifest)
    assert verify(tmp_path / "checkpoint-20").is_valid


def test_a_damaged_answer_is_fetched_again_and_nothing_else(
    store: FaultyStore, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of one part arrives with a flipped bit: that part is read twice, all others once."""
    real = FaultyStore.stream
    damaged: list[int] = []

    def stream(self: FaultyStore, key: str, sink, *, start: int, **kwargs):
        def damage(block: memoryview) -> None:
            if key.endswith("model.safetensors") and start == 1000 and not damaged:
                damaged.append(start)
                block[5] ^= 4
            sink(block)

        real(self, key, damage, start=start, **kwargs)

    monkeypatch.setattr(FaultyStore, "stream", stream)
    working = tmp_path / "working"
    create_files(manifest.files, working)
    fetch(store, "checkpoint-20", windows_of(manifest.files), working)
    bucket = tmp_path / "bucket" / "checkpoint-20"
    assert (working / "model.safetensors").read_bytes() == (bucket / "model.safetensors").read_bytes()
    reads = Counter(key for name, key in store.calls if name == "read")
    size_bytes = (bucket / "model.safetensors").stat().st_size
    assert reads["checkpoint-20/model.safetensors"] == -(-size_bytes // 1000) + 1


@pytest.mark.parametrize("fault", ["flipped", "missing", "shorter"])
def test_lasting_damage_is_an_error(fault: str, store: FaultyStore, manifest: Manifest, tmp_path: Path) -> None:
    """The file and the reason are named; a wrong size is found before anything is fetched."""
    path = tmp_path / "bucket" / "checkpoint-20" / "sub" / "optimizer.pt"
    if fault == "flipped":
        flip(path)
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    working = tmp_path / "working"
    create_files(manifest.files, working)
    if fault != "flipped":
        with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
            check_listing(store, "checkpoint-20", manifest)
    with pytest.raises((CheckpointError, StorageError), match=r"optimizer\.pt"):
        fetch(store, "checkpoint-20", windows_of(manifest.files), working)


def test_too_little_room_is_found_before_the_first_byte(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has both figures, and nothing was created."""
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=1000))
    with pytest.raises(StorageError, match=r"1(\.0)? kB free") as caught:
        create_files(manifest.files, tmp_path / "working")
    assert "--local-dir" in str(caught.value)
    assert list((tmp_path / "working").iterdir()) == []
