"""A folder as a store: what its neighbours do between two of its system calls."""

from pathlib import Path

import pytest

from safepoint.foundation.shared_folders import no_links
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import parse_location


def test_an_object_that_is_deleted_as_it_lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder goes with its last object, while the writer still has to make the object's name durable."""
    store = LocalStore(parse_location(str(tmp_path / "store")))
    rename = no_links.rename
    num_renamed = 0

    def rename_and_lose(working: Path, target: Path, *, below: Path) -> None:
        nonlocal num_renamed
        rename(working, target, below=below)
        store.delete("folder/only")
        num_renamed += 1

    monkeypatch.setattr(no_links, "rename", rename_and_lose)
    store.write("folder/only", b"alone in its folder")
    assert num_renamed == 1
    assert list(store.list()) == []


def test_names_of_new_folders_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that is made for an object is named in its parent, which has to survive too."""
    synced: list[Path] = []
    monkeypatch.setattr("safepoint.foundation.files.fsync_folder", synced.append)
    store = LocalStore(parse_location(str(tmp_path / "store")))
    store.write("a/b/key", b"")
    assert set(synced) == {tmp_path, tmp_path / "store", tmp_path / "store" / "a"}
    synced.clear()
    store.write("a/b/other", b"")
    assert synced == []


def test_a_folder_that_is_deleted_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that makes the folder finds it, then another process deletes it, because it is empty."""
    (tmp_path / "folder").mkdir()
    make, deleted = no_links.make_folder, list[Path]()

    def deleting(path: Path, mode: int = 0o777, *, below: Path | None = None) -> None:
        try:
            make(path, mode, below=below)
        except FileExistsError:
            if not deleted:
                path.rmdir()
                deleted.append(path)
            raise

    monkeypatch.setattr(no_links, "make_folder", deleting)
    store = LocalStore(parse_location(str(tmp_path)))
    store.write("folder/key", b"content")
    assert deleted
    assert store.read("folder/key") == b"content"
