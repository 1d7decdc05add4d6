"""A working folder, or a checkpoint, is exchanged for a link or another folder while a command works in it.

Nothing outside is written, and nothing of the other folder is deleted.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.tools import adopt as adopting
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools.adopt import adopt
from safepoint.checkpoint.tools.atomic_export import export_to_folder
from safepoint.checkpoint.tools.inventory import Inventory, Kind
from safepoint.errors import SafepointError, StorageError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign

_NAMES = ("config.json", "model.safetensors")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another model of the user, beside the place of the export."""
    folder = tmp_path / "shared" / "other-model"
    folder.mkdir(parents=True)
    for name in _NAMES:
        (folder / name).write_bytes(b"other")
    return folder


def _exchange(path: Path, other: Path, kind: str) -> Path:
    """Give the name `path` to `other`, or to a link to it; returns where `other` is now."""
    path.rename(path.with_name("away"))
    if kind == "link":
        path.symlink_to(other)
        return other
    other.rename(path)
    return path


def _export(tmp_path: Path, exchange: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a checkpoint; a stranger interferes when the files are created, and before they are fetched."""
    source = prepared(tmp_path / "out")
    commit(source, 4, {0: dict.fromkeys(_NAMES, b"new")})
    inventory = Inventory(LocalStore(Location.of_folder(source.root)))
    real = copying.create_files

    def create(*arguments: object) -> None:
        exchange()
        real(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(copying, "create_files", create)
    copying.export(inventory, inventory.items()[0], Location.of_folder(tmp_path / "shared" / "model"))


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_the_working_folder_of_an_export(
    kind: str, tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export ends with an error. Of the other model nothing is overwritten or deleted."""
    places: list[Path] = []

    def exchange() -> None:
        working = next(path for path in other.parent.iterdir() if path.name.startswith(".model."))
        places.append(_exchange(working, other, kind))

    with pytest.raises(SafepointError, match="another process has replaced it"):
        _export(tmp_path, exchange, monkeypatch)
    assert {path.name: path.read_bytes() for path in places[0].iterdir()} == dict.fromkeys(_NAMES, b"other")
    assert not (other.parent / "model").exists()
    assert not list((other.parent / "away").iterdir()), "what was written is deleted"


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_failed_export(kind: str, tmp_path: Path, other: Path) -> None:
    """Only what the export has written is deleted."""
    places: list[Path] = []

    def write(working: Path) -> None:
        (working / "model.safetensors").write_bytes(b"new")
        named = next(path for path in other.parent.iterdir() if path.name.startswith(".model."))
        places.append(_exchange(named, other, kind))
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        export_to_folder(Location.of_folder(tmp_path / "shared" / "model"), write)
    assert sorted(path.name for path in places[0].iterdir()) == sorted(_NAMES)


def test_only_the_user_may_enter_until_the_commit(tmp_path: Path, other: Path) -> None:
    """Then the folder has the mode that a new folder has."""
    (tmp_path / "new").mkdir()
    modes: list[int] = []

    def write(working: Path) -> None:
        modes.append(stat.S_IMODE(working.stat().st_mode))
        (working / "model.safetensors").write_bytes(b"new")

    export_to_folder(Location.of_folder(tmp_path / "shared" / "model"), write)
    modes.append(stat.S_IMODE((tmp_path / "shared" / "model").stat().st_mode))
    assert modes == [0o700, stat.S_IMODE((tmp_path / "new").stat().st_mode)]


def test_errors_name_the_target(tmp_path: Path) -> None:
    """The path to the open folder means nothing to a reader."""

    def write(working: Path) -> None:
        (working / "sub" / "model.safetensors").write_bytes(b"new")

    with pytest.raises(OSError, match="No such file") as caught:
        export_to_folder(Location.of_folder(tmp_path / "model"), write)
    assert caught.value.filename == str(tmp_path / "model" / "sub" / "model.safetensors")


@pytest.mark.parametrize("kind", ["link", "folder"])
@pytest.mark.parametrize("moment", ["described", "listed"])
def test_a_checkpoint_that_is_adopted(
    kind: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the examination, the name of the checkpoint leads to another folder. It gets no manifest."""
    folder = write_foreign(tmp_path / "out", 4)
    other = tmp_path / "out" / "other"
    shutil.copytree(folder, other)
    places: list[Path] = []

    def exchanging(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            found = real(*arguments, **options)
            if not places:
                places.append(_exchange(folder, other, kind))
            return found

        return call

    name = {"described": "describe", "listed": "list_files"}[moment]
    monkeypatch.setattr(adopting, name, exchanging(getattr(adopting, name)))
    inventory = Inventory(LocalStore(Location.of_folder(tmp_path / "out")))
    items = [item for item in inventory.items() if item.kind is Kind.FOREIGN]
    adoptions = adopt(inventory, items, accumulation=1, dry_run=False, progress=lambda *_: None)
    assert places
    assert adoptions[0].faults
    assert not os.path.exists(places[0] / MANIFEST_NAME)


@pytest.mark.parametrize("call", ["write", "delete", "upload"])
def test_a_folder_of_objects(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as a store: a stranger puts a link in the place of a folder after its path was examined."""
    root, own = tmp_path / "shared", tmp_path / "home"
    for folder in (root / "checkpoint-1", own):
        folder.mkdir(parents=True)
        (folder / "model.pt").write_bytes(b"old")
    source = tmp_path / "source"
    source.write_bytes(b"new")
    store, key = LocalStore(Location.of_folder(root)), "checkpoint-1/model.pt"
    examine = store._path

    def exchange(name: str) -> Path:
        path = examine(name)
        _exchange(root / "checkpoint-1", own, "link")
        return path

    monkeypatch.setattr(store, "_path", exchange)
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: store.write(key, b"new"),
        "upload": lambda: store.upload(key, source),
        "delete": lambda: store.delete(key),
    }
    with contextlib.suppress(StorageError):
        calls[call]()
    assert {path.name: path.read_bytes() for path in own.iterdir()} == {"model.pt": b"old"}
