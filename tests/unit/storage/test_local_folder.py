"""A folder as a store: what its neighbours do between two of its system calls."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation import files
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


def test_a_sweep_below_a_key_looks_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in object stores: other users may have begun any number of uploads elsewhere."""
    store = LocalStore(parse_location(str(tmp_path / "store")))
    unfinished = [f"{folder}.key.{'0' * 32}.part" for folder in ("", "a/", "a/b/", "ab/", "c/")]
    for path in unfinished:
        (tmp_path / "store" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / path).touch()
    (tmp_path / "store" / "link").symlink_to("c")
    walked: list[Path] = []
    walk = files.walk_files

    def noting(folder: Path, **options: bool) -> Iterator[tuple[str, os.stat_result]]:
        walked.append(folder)
        return walk(folder, **options)

    monkeypatch.setattr(files, "walk_files", noting)
    keys: list[str] = []
    assert store.sweep(below="a", only=lambda key: not keys.append(key)) == 2
    assert sorted(keys) == ["a/b/key", "a/key"]
    assert walked == [tmp_path / "store" / "a"]
    assert store.sweep(below="none") == store.sweep(below="link") == store.sweep(below="a/b/other") == 0
    assert [path for path in unfinished if (tmp_path / "store" / path).exists()] == [
        unfinished[0],
        *unfinished[3:],
    ]
    assert store.sweep() == 3
