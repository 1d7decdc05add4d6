"""What a location holds, and what the commands do to it: the same in a folder and in an object store."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools import difference
from safepoint.checkpoint.tools.difference import compare
from safepoint.checkpoint.tools.inventory import Inventory, Kind, open_inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import (
    AccessDeniedError,
    CheckpointError,
    ConflictError,
    NotFoundError,
    NothingValidError,
    StorageError,
)
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.leases import reading
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from safepoint.storage.store import Store
from tests.support.checkpoints import commit, prepared, sealed
from tests.support.safetensors import tensor_file
from tests.support.stores import flip


class BucketLike(LocalStore):
    """A folder that says it is a bucket, so that everything goes through the Store's methods."""

    def __init__(self, root: Path) -> None:
        super().__init__(Location(scheme=Scheme.FILE, path=str(root)))
        self.location = Location(scheme=Scheme.S3, bucket="bucket", path="run")


@pytest.fixture(params=["folder", "bucket"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30; the same layout either way."""
    output = prepared(tmp_path / "out")
    for step in (10, 20, 30):
        commit(output, step)
    return output.root


@pytest.fixture
def look(kind: str, place: Path) -> Callable[[], Inventory]:
    """A new look at the place."""
    store: Store = (
        BucketLike(place) if kind == "bucket" else LocalStore(Location(scheme=Scheme.FILE, path=str(place)))
    )
    return lambda: Inventory(store)


def names(inventory: Inventory) -> list[str]:
    return [item.name for item in inventory.items()]


def test_everything_is_listed_newest_first(place: Path, look: Callable[[], Inventory]) -> None:
    """Complete, damaged and foreign ones each for what they are."""
    (place / "checkpoint-30" / MANIFEST_NAME).unlink()
    (place / "checkpoint-20" / "rng_state_0.pth").unlink()
    (place / "final").mkdir()
    (place / "final" / "model.safetensors").write_bytes(b"the script's own, without a manifest")
    (place / "notes.txt").write_text("foreign")
    inventory = look()
    assert names(inventory) == ["checkpoint-30", "checkpoint-20", "checkpoint-10"]
    foreign, damaged, complete = inventory.items()
    assert foreign.kind is Kind.FOREIGN
    assert [fault.file for fault in damaged.faults] == ["rng_state_0.pth"]
    assert (complete.is_complete, complete.num_files, complete.size_bytes) == (True, 4, 5120 + 2700 + 7)
    assert inventory.item().name == "checkpoint-10"
    with pytest.raises(NotFoundError, match="there is no checkpoint-7"):
        inventory.item("checkpoint-7")


def test_a_renamed_checkpoint_is_damaged(place: Path, look: Callable[[], Inventory]) -> None:
    """It would count as the newest otherwise."""
    (place / "checkpoint-30").rename(place / "checkpoint-300")
    assert [item.is_complete for item in look().items()] == [False, True, True]


def test_hostile_names_do_nothing(place: Path, look: Callable[[], Inventory]) -> None:
    """A manifest that points outside and a name with control characters are reported, escaped, and not followed."""
    path = place / "checkpoint-30" / MANIFEST_NAME
    record = json.loads(path.read_bytes())
    record["files"][0]["path"] = "../../etc/passwd"
    path.write_bytes(sealed(record))
    (place / "checkpoint-20" / "\x1b[2Jboo").write_text("")
    worst, bad, _ = look().items()
    assert "leaves the checkpoint's folder" in worst.faults[0].reason
    assert bad.is_complete


def test_only_reading_finds_a_flipped_bit(place: Path, look: Callable[[], Inventory]) -> None:
    """A look at names and sizes does not; `verify` does, and names the file."""
    flip(place / "checkpoint-20" / "sub" / "optimizer.pt")
    inventory = look()
    read: list[int] = []
    item = inventory.item("checkpoint-20")
    assert item.is_complete
    faults = inventory.verify(item, progress=lambda done_bytes, total_bytes: read.append(done_bytes))
    assert [fault.file for fault in faults] == ["sub/optimizer.pt"]
    assert read[-1] == item.size_bytes
    assert inventory.verify(inventory.item("checkpoint-30")) == ()


def test_pruning_spares_the_newest_complete_one(place: Path, look: Callable[[], Inventory]) -> None:
    """A damaged one does not count as the newest."""
    (place / "checkpoint-30" / "rng_state_0.pth").unlink()
    inventory = look()
    doomed = inventory.superseded([KeepNewest(1)])
    assert [item.name for item in doomed] == ["checkpoint-10"]
    assert all(inventory.delete(item) for item in doomed)
    assert names(look()) == ["checkpoint-30", "checkpoint-20"]


def test_what_is_read_stays(tmp_path: Path) -> None:
    """A reader's lease holds against deletion, also when it comes between choice and deletion."""
    output = prepared(tmp_path / "out")
    for step in (10, 20, 30):
        commit(output, step)
    inventory, _ = open_inventory(str(output.root))
    doomed = inventory.superseded([KeepNewest(1)])
    with reading(output.root / "checkpoint-10" / MANIFEST_NAME):
        assert [item.name for item in inventory.superseded([KeepNewest(1)])] == ["checkpoint-20"]
        assert [inventory.delete(item) for item in doomed] == [False, True]
    assert [path.name for path in list_checkpoints(output.root)] == ["checkpoint-30", "checkpoint-10"]


def test_a_copy_is_the_same(look: Callable[[], Inventory], place: Path, tmp_path: Path) -> None:
    """Into a new folder: valid, once, and never over another one of the same name."""
    inventory = look()
    target = Location(scheme=Scheme.FILE, path=str(tmp_path / "copy"))
    assert copying.copy(inventory, inventory.item("checkpoint-20"), target)
    assert verify(tmp_path / "copy" / "checkpoint-20").is_valid
    assert not copying.copy(inventory, inventory.item("checkpoint-20"), target)
    other = prepared(tmp_path / "other")
    commit(other, 20, {0: {"model.safetensors": b"other"}})
    with pytest.raises(ConflictError, match="a different checkpoint-20"):
        copying.copy(inventory, inventory.item("checkpoint-20"), Location(scheme=Scheme.FILE, path=str(other.root)))
    assert (other.root / "checkpoint-20" / "model.safetensors").read_bytes() == b"other"
    assert list((tmp_path / "copy" / ".safepoint" / "work").iterdir()) == []
    foreign = tmp_path / "plain" / "checkpoint-20"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"another tool's")
    with pytest.raises(ConflictError, match="exists already"):
        copying.copy(
            inventory, inventory.item("checkpoint-20"), Location(scheme=Scheme.FILE, path=str(foreign.parent))
        )
    assert os.listdir(foreign) == ["model.safetensors"]


def test_a_damaged_one_is_not_copied(look: Callable[[], Inventory], place: Path, tmp_path: Path) -> None:
    """Nothing appears at the target."""
    flip(place / "checkpoint-20" / "model.safetensors")
    inventory = look()
    target = Location(scheme=Scheme.FILE, path=str(tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="damaged"):
        copying.copy(inventory, inventory.item("checkpoint-20"), target)
    assert list_checkpoints(tmp_path / "copy") == []


def test_a_folder_in_use_gets_no_copy(tmp_path: Path, look: Callable[[], Inventory]) -> None:
    """A run's own folder is its own while it runs; the claim of another process is needed to see it."""
    target = prepared(tmp_path / "busy")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        target.claim(wait_s=0, waiting=lambda who: None)
        os.write(writer, b"x")
        os.read(os.pipe()[0], 1)
        os._exit(0)
    os.read(reader, 1)
    try:
        inventory = look()
        with pytest.raises(ConflictError, match="in use by another run"):
            copying.copy(inventory, inventory.item(), Location(scheme=Scheme.FILE, path=str(target.root)))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_export_is_the_model_alone(look: Callable[[], Inventory], place: Path, tmp_path: Path) -> None:
    """No optimizer, no random numbers, no manifest; and only into an empty place."""
    inventory = look()
    target = Location(scheme=Scheme.FILE, path=str(tmp_path / "model"))
    # `sub/optimizer.pt` is no name that a framework gives to what only training needs, but it is no archive either.
    assert copying.export(inventory, inventory.item(), target) == ["model.safetensors"]
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    with pytest.raises(ConflictError, match="not empty"):
        copying.export(inventory, inventory.item(), target)


def test_what_trainings_keep_beside_a_model_is_not_exported(tmp_path: Path) -> None:
    """TRL's reference is as large as the model."""
    output = prepared(tmp_path / "out")
    beside = ("safepoint_reference.pt", "safepoint_state_0.pt", "optimizer.pt", "trainer_state.json")
    commit(output, 10, {0: {"model.safetensors": b"weights", **dict.fromkeys(beside, b"x")}})
    inventory, _ = open_inventory(str(output.root))
    target = Location(scheme=Scheme.FILE, path=str(tmp_path / "model"))
    assert copying.export(inventory, inventory.item(), target) == ["model.safetensors"]


def test_shards_are_not_exported(tmp_path: Path) -> None:
    """Weights in pieces of ranks are no model that `from_pretrained` reads."""
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: {"pytorch_model_fsdp_0/__0_0.distcp": b"shard", "config.json": b"{}"}})
    inventory, _ = open_inventory(str(output.root))
    with pytest.raises(CheckpointError, match="no model in a known format"):
        copying.export(inventory, inventory.item(), Location(scheme=Scheme.FILE, path=str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()


def test_repair_drops_what_never_was_a_checkpoint(
    kind: str, place: Path, look: Callable[[], Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished ones go, damaged ones only when asked, what is young in a bucket stays, looking changes nothing.

    A checkpoint that another tool has written, which has no manifest either, always stays.
    """
    (place / "checkpoint-40").mkdir()
    (place / "checkpoint-40" / "model.safetensors").write_bytes(b"written by another tool")
    if kind == "bucket":
        sizes = {
            path.relative_to(place / "checkpoint-30").as_posix(): path.stat().st_size
            for path in (place / "checkpoint-30").rglob("*")
        }
        (place / "checkpoint-30" / MANIFEST_NAME).unlink()
        (place / ".safepoint" / "unfinished").mkdir(parents=True)
        (place / ".safepoint" / "unfinished" / "checkpoint-30").write_text(json.dumps({"files": sizes}))
    flip(place / "checkpoint-20" / "model.safetensors")

    def run(**options: bool):
        chosen = {"deep": True, "drop_damaged": False, "dry_run": False, **options}
        return repair(look(), idle_s=3600, **chosen)

    looked = run(dry_run=True)
    assert [item.name for item in looked.damaged] == ["checkpoint-20"]
    found = run()
    if kind == "bucket":
        assert [item.name for item in found.recent] == ["checkpoint-30"]
        now_s = clock.wall_s()
        monkeypatch.setattr(clock, "wall_s", lambda: now_s + 7200)
        found = run()
        assert [item.name for item in found.unfinished] == ["checkpoint-30"]
        assert names(look()) == ["checkpoint-40", "checkpoint-20", "checkpoint-10"]
    assert [item.name for item in found.foreign] == ["checkpoint-40"]
    found = run(drop_damaged=True)
    assert names(look())[0] == "checkpoint-40"
    assert "checkpoint-20" not in names(look())
    assert (place / "checkpoint-40" / "model.safetensors").read_bytes() == b"written by another tool"
    if kind == "folder":
        assert found.moved_to is not None
        assert os.listdir(found.moved_to) == ["checkpoint-20"]
    found = run()
    assert (found.unfinished, found.recent, found.damaged, found.num_leftovers) == ((), (), (), 0)


def test_a_guest_gives_way_to_a_run(tmp_path: Path) -> None:
    """Once a run claims the bucket, nothing more is written or deleted beside it."""
    store = BucketLike(tmp_path / "bucket")
    guest = RemoteFolder.as_guest(store)
    guest.fence()
    claim = Claim(run_id="run", attempt=1, attempt_id="run-1", since="2026-01-01T00:00:00Z", host="here")
    RemoteFolder(store).claim(claim)
    with pytest.raises(ConflictError, match="attempt 1 of run"):
        guest.fence()
    RemoteFolder.as_guest(store).fence()


def test_a_difference_names_settings_files_and_tensors(tmp_path: Path) -> None:
    """Tensors by header at once, by content when asked."""
    output = OutputFolder(tmp_path / "out")
    output.prepare()
    same = {"a": ("F32", (2, 2), b"\0" * 16), "gone": ("F32", (1,), b"1234")}
    later = {"a": ("F32", (2, 2), b"\1" * 16), "new": ("I64", (1,), b"12345678")}
    commit(output, 10, {0: {"model.safetensors": tensor_file(same), "old.txt": b"x", "same.txt": b"y"}})
    commit(output, 20, {0: {"model.safetensors": tensor_file(later), "same.txt": b"y"}})
    inventory, _ = open_inventory(str(output.root))
    pair = [(inventory, inventory.item(f"checkpoint-{step}")) for step in (10, 20)]
    shallow = compare(pair[0], pair[1])
    assert {change.name for change in shallow.settings} >= {"step", "epoch", "samples_seen"}
    assert [change.name for change in shallow.files] == ["model.safetensors", "old.txt"]
    assert [(change.name, change.before, change.after) for change in shallow.tensors] == [
        ("model.safetensors: gone", "F32 [1]", ""),
        ("model.safetensors: new", "", "I64 [1]"),
    ]
    deep = compare(pair[0], pair[1], deep=True)
    assert [change.name for change in deep.tensors][-1] == "model.safetensors: a"
    assert compare(pair[0], pair[0], deep=True).tensors == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"{]",
        (2).to_bytes(8, "little") + b"[]",
        tensor_file({"a": ("F32", (1,), b"1234")})[:-1],
    ],
)
def test_what_is_no_tensor_file_is_said_to_be_none(data: bytes, tmp_path: Path) -> None:
    """Whatever its header claims, nothing outside the file is read."""
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: {"model.safetensors": data}})
    commit(output, 20, {0: {"model.safetensors": tensor_file({"a": ("F32", (1,), b"1234")})}})
    inventory, _ = open_inventory(str(output.root))
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        compare((inventory, inventory.item("checkpoint-10")), (inventory, inventory.item("checkpoint-20")))


class Locked(LocalStore):
    """A store that refuses to be read."""

    def read(self, key: str, **_: Any) -> memoryview:
        raise AccessDeniedError(f"{key} may not be read")


def test_a_file_that_cannot_be_read_is_not_said_to_be_invalid(tmp_path: Path) -> None:
    output = prepared(tmp_path / "out")
    for step in (10, 20):
        commit(output, step, {0: {"model.safetensors": tensor_file({"a": ("F32", (1,), bytes([step] * 4))})}})
    inventory, _ = open_inventory(str(output.root))
    pair = [(inventory, inventory.item(f"checkpoint-{step}")) for step in (10, 20)]
    inventory.store = Locked(Location.of_folder(output.root))
    with pytest.raises(AccessDeniedError, match=r"checkpoint-10/model\.safetensors may not be read"):
        compare(*pair)


@pytest.mark.parametrize(
    ("claimed", "why"),
    [(60, "its header has 60 bytes, and the format allows 50"), (93, "its header is longer than the file")],
)
def test_a_header_is_refused_for_the_right_reason(
    claimed: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "MAX_HEADER_BYTES", 50)
    output = prepared(tmp_path / "out")
    for step in (10, 20):
        commit(output, step, {0: {"model.safetensors": claimed.to_bytes(8, "little") + bytes([step]) * 92}})
    inventory, _ = open_inventory(str(output.root))
    with pytest.raises(CheckpointError, match=why):
        compare((inventory, inventory.item("checkpoint-10")), (inventory, inventory.item("checkpoint-20")))


def test_places_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output folder or one checkpoint in it, absolute or not."""
    commit(prepared(tmp_path / "out"), 10)
    inventory, name = open_inventory(str(tmp_path / "out"))
    assert (inventory.folder, name) == (tmp_path / "out", None)
    inventory, name = open_inventory(f"{tmp_path}/out/checkpoint-10/")
    assert (inventory.folder, name) == (tmp_path / "out", "checkpoint-10")
    monkeypatch.chdir(tmp_path / "out")
    inventory, name = open_inventory("checkpoint-10")
    assert inventory.item(name).is_complete
    with pytest.raises(StorageError, match="there is no folder"):
        open_inventory(str(tmp_path / "nowhere"))[0].items()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingValidError):
        open_inventory(str(tmp_path / "empty"))[0].item()
