"""Images in folders and in stores: written, read, copied with their chains, and deleted without breaking a chain."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from safepoint.checkpoint.local.retention import parse_policies
from safepoint.errors import ConflictError, ImageError, StorageError
from safepoint.foundation.shared_folders.leases import reading
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.store import Store
from safepoint.transparent.images.bucket import CLAIMS, Claim, ImageBucket, claims
from safepoint.transparent.images.copying import check_free, copy, needed_by
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import MANIFEST_NAME, MOST_CHAIN
from safepoint.transparent.images.materialise import materialise, verify
from safepoint.transparent.images.names import image_name
from safepoint.transparent.images.pruning import prune
from safepoint.transparent.protection.keys import ImageKey
from tests.support.criu_images import add_image, random_pages, same_files

_KEY = ImageKey(b"k" * 32)
Open = Callable[[], ImageLocation]


def state(number: int) -> dict[int, bytes]:
    return {100: random_pages(number, 2) + random_pages(0, 70), 200: bytes(4096) + random_pages(0, 3)}


def opener(kind: str, root: Path) -> Open:
    """Opens the same images each time; those of a store with an empty folder of this machine."""

    def open_images() -> ImageLocation:
        if kind == "folder":
            return ImageLocation(root / "images", _KEY)
        (root / f"private-{len(list(root.glob('private-*')))}").mkdir(parents=True)
        newest = root / f"private-{len(list(root.glob('private-*'))) - 1}"
        return ImageBucket(store_of(root), newest, _KEY)

    return open_images


def store_of(root: Path) -> Store:
    return LocalStore(Location.of_folder(root / "store"))


def stored(root: Path) -> Path:
    """The folder with the files of the images, also if that is the store's."""
    return next(path for path in (root / "images", root / "store") if path.exists())


@pytest.fixture(params=["folder", "store"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(cast("str", request.param), tmp_path)


def add(location: ImageLocation, tmp_path: Path, number: int) -> None:
    add_image(location, tmp_path / f"dump-{number}", state(number))


def check(location: ImageLocation, tmp_path: Path, number: int) -> None:
    """The image is valid, and its processes have the memory that was dumped."""
    target = tmp_path / f"out-{number}-{len(list(tmp_path.glob('out-*')))}"
    target.mkdir()
    verify(location, image_name(number), deep=True)
    materialise(location, image_name(number), target)
    same_files(tmp_path / f"dump-{number}", target / "part-0")


def test_a_chain(opened: Open, tmp_path: Path) -> None:
    """Each image is written and read by another process; the chain continues, and ends at its bound."""
    for number in range(1, MOST_CHAIN + 2):
        add(opened(), tmp_path, number)
    assert opened().names() == [image_name(number) for number in range(MOST_CHAIN + 1, 0, -1)]
    sources = [len(opened().read(image_name(number)).sources) for number in range(1, MOST_CHAIN + 2)]
    assert sources == [*range(MOST_CHAIN), 0]
    for number in (1, 2, MOST_CHAIN, MOST_CHAIN + 1):
        check(opened(), tmp_path, number)


def test_only_what_is_needed_is_fetched(tmp_path: Path) -> None:
    """For a freeze, the tables of the newest image; for a check that is not deep, no pages."""
    opened = opener("store", tmp_path)
    add(opened(), tmp_path, 1)
    location = opened()
    add(location, tmp_path, 2)
    assert {path.suffix for path in location.path("image-1").rglob("*.*")} == {".table"}
    location = opened()
    verify(location, "image-2", deep=False)
    assert not list(location.folder.rglob("*.regions"))
    location = opened()
    verify(location, "image-2", deep=True)
    assert {path.name for path in location.path("image-1").rglob("*.*")} == {
        *("pages-1.table", "pages-1.regions", "pages-2.table", "pages-2.regions")
    }


def test_nothing_is_left_of_an_image_that_fails(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        fail_to_write(opened())
    assert opened().names() == []
    assert claims(store_of(tmp_path)) == {}
    assert not list((tmp_path / "store").rglob("image-*"))


def fail_to_write(location: ImageLocation) -> None:
    with location.writing() as image:
        (image.folder / "part-0").mkdir()
        raise RuntimeError("failed")


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its files are in the store already: they are deleted, and the number is free again."""
    opened = opener("store", tmp_path)
    upload, sent = LocalStore.upload, list[str]()

    def failing(self: LocalStore, key: str, *arguments: object, **options: object) -> None:
        if len(sent) == 3:
            raise StorageError("the store is full")
        upload(self, key, *arguments, **options)  # pyright: ignore[reportArgumentType]
        sent.append(key)

    monkeypatch.setattr(LocalStore, "upload", failing)
    with pytest.raises(StorageError, match="is full"):
        add(opened(), tmp_path, 1)
    monkeypatch.undo()
    assert len(sent) == 3
    assert list(store_of(tmp_path).list()) == []
    add(opened(), tmp_path, 2)
    assert opened().names() == ["image-1"]


def test_two_writers_of_a_store(tmp_path: Path) -> None:
    """They get two numbers. The chain of the second one does not need the image of the first one."""
    opened = opener("store", tmp_path)
    with opened().writing() as first:
        add(opened(), tmp_path, 2)
        assert first.number == 1
    assert opened().names() == ["image-2"]
    check(opened(), tmp_path, 2)


def test_a_number_that_was_committed_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer has listed the images; then another one commits the next number, and releases its claim."""
    opened = opener("store", tmp_path)
    add(opened(), tmp_path, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    next_number, calls = ImageBucket._next_number, list[int]()

    def stale(self: ImageBucket) -> int:
        calls.append(next_number(self))
        return 1 if len(calls) == 1 else calls[-1]

    monkeypatch.setattr(ImageBucket, "_next_number", stale)
    add(opened(), tmp_path, 2)
    assert opened().names() == ["image-2", "image-1"]
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ConflictError, match="same images"), opened().writing(1):
        pass
    assert claims(store_of(tmp_path)) == {}


def test_a_writer_that_was_declared_dead_commits_nothing(tmp_path: Path) -> None:
    """Its claim was more than a day old, and `prune` has deleted its files."""
    opened = opener("store", tmp_path)
    add(opened(), tmp_path, 1)
    with pytest.raises(ConflictError, match="was not complete after a day"):
        try_to_commit_after_a_day(opened, tmp_path)
    assert opened().names() == ["image-1"]
    assert claims(store_of(tmp_path)) == {}
    assert not list((tmp_path / "store" / "image-2").glob("**/*.img"))


def try_to_commit_after_a_day(opened: Open, tmp_path: Path) -> None:
    from safepoint.transparent.images.store_dump import Dump, store_dumps
    from tests.support.criu_images import MACHINE, dump

    location = opened()
    with location.writing() as image:
        folder = dump(tmp_path / "dump-2", state(2))
        manifest = store_dumps(image, [Dump(folder=folder, root_pid=100, program="python")], MACHINE)
        with pytest.raises(ConflictError, match="another process"):
            prune(opened(), parse_policies("newest=1"))
        make_old(tmp_path / "store" / CLAIMS / "image-2")
        prune(opened(), parse_policies("newest=1"))
        image.commit(manifest)


def make_old(path: Path) -> None:
    """As if it had been written two days ago; its version stays that of the store's clock."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 2 * 86_400 * 10**9))


def test_what_a_dead_writer_has_left_is_deleted(tmp_path: Path) -> None:
    opened = opener("store", tmp_path)
    add(opened(), tmp_path, 1)
    store = store_of(tmp_path)
    Claim.take(store, 2).renew({"part-0/core-1.img": 4})
    store.write("image-2/part-0/core-1.img", b"left")
    make_old(tmp_path / "store" / CLAIMS / "image-2")
    prune(opened(), parse_policies("newest=1"))
    assert not [item.key for item in store.list() if item.key.startswith(("image-2", CLAIMS))]
    # One that had committed its image, and was killed then, loses only its claim.
    Claim.take(store, 1)
    make_old(tmp_path / "store" / CLAIMS / "image-1")
    prune(opened(), parse_policies("newest=1"))
    check(opened(), tmp_path, 1)
    assert claims(store) == {}


def test_an_object_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Before anything of it is used, also in an image of the chain; so is one that is missing or has another size."""
    opened = opener("store", tmp_path)
    for number in (1, 2):
        add(opened(), tmp_path, number)
    for name in ("image-1/part-0/pages-1.regions", "image-2/part-0/core-100.img", "image-2/part-0/pages-1.table"):
        path = tmp_path / "store" / name
        whole = path.read_bytes()
        for data in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], None):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(ImageError):
                verify(opened(), "image-2", deep=True)
            path.write_bytes(whole)
    verify(opened(), "image-2", deep=True)


# ---- copying -------------------------------------------------------------------------------------------------------


def copy_all(source: ImageLocation, names: list[str], target: ImageLocation) -> list[str]:
    missing = check_free(needed_by(source, names), target)
    for one in missing:
        copy(source, one, target)
    return [one.name for one in missing]


@pytest.mark.parametrize("target", ["folder", "store"])
def test_a_copy_has_its_chain(opened: Open, target: str, tmp_path: Path) -> None:
    """Under the same names, oldest first. A second copy copies nothing; a later image only what is missing."""
    for number in range(1, 5):
        add(opened(), tmp_path, number)
    to = opener(target, tmp_path / "elsewhere")
    assert copy_all(opened(), ["image-3"], to()) == ["image-1", "image-2", "image-3"]
    check(to(), tmp_path, 3)
    assert copy_all(opened(), ["image-3"], to()) == []
    assert copy_all(opened(), ["image-4"], to()) == ["image-4"]
    check(to(), tmp_path, 4)


@pytest.mark.parametrize("target", ["folder", "store"])
def test_a_copy_replaces_nothing(opened: Open, target: str, tmp_path: Path) -> None:
    """Another image of the name, a damaged copy, and a damaged source: nothing is copied."""
    add(opened(), tmp_path, 1)
    to = opener(target, tmp_path / "elsewhere")
    add(to(), tmp_path, 2)
    with pytest.raises(ConflictError, match="another image-1"):
        copy_all(opened(), ["image-1"], to())
    other = opener(target, tmp_path / "other")
    copy_all(opened(), ["image-1"], other())
    (stored(tmp_path / "other") / "image-1" / "part-0" / "core-100.img").unlink()
    with pytest.raises(ConflictError, match="damaged copy"):
        copy_all(opened(), ["image-1"], other())
    core = stored(tmp_path) / "image-1" / "part-0" / "core-100.img"
    core.write_bytes(b"x" * core.stat().st_size)
    third = opener(target, tmp_path / "third")
    with pytest.raises(ImageError):
        copy_all(opened(), ["image-1"], third())
    assert third().names() == []


# ---- pruning -------------------------------------------------------------------------------------------------------


def names_after(location: ImageLocation, keep: str) -> list[int]:
    prune(location, parse_policies(keep))
    return sorted(int(name.removeprefix("image-")) for name in location.names())


def test_what_kept_images_need_stays(opened: Open, tmp_path: Path) -> None:
    """A chain of eight, then a new one: the older chain is deleted only when no image of it is kept."""
    for number in range(1, MOST_CHAIN + 3):
        add(opened(), tmp_path, number)
    found = prune(opened(), parse_policies("newest=3"), is_dry_run=True)
    assert not found.deleted
    assert found.needed == tuple(image_name(number) for number in range(MOST_CHAIN - 1, 0, -1))
    assert names_after(opened(), "newest=3") == [*range(1, MOST_CHAIN + 3)]
    assert names_after(opened(), "newest=2,every=2") == [*range(1, MOST_CHAIN + 3)]
    found = prune(opened(), parse_policies("newest=2"))
    assert [one.name for one in found.deleted] == [image_name(number) for number in range(MOST_CHAIN, 0, -1)]
    assert opened().names() == [image_name(MOST_CHAIN + 2), image_name(MOST_CHAIN + 1)]
    for number in (MOST_CHAIN + 1, MOST_CHAIN + 2):
        check(opened(), tmp_path, number)
    assert prune(opened(), parse_policies("newest=1")).needed == (image_name(MOST_CHAIN + 1),)


def add_complete(opened: Open, tmp_path: Path, numbers: range) -> None:
    """Images that need no other."""
    for number in numbers:
        location = opened()
        location.parent = list  # no chain
        add(location, tmp_path, number)


def test_the_newest_valid_image_stays(opened: Open, tmp_path: Path) -> None:
    """Newer ones are damaged: they stay, too, and so does everything that one that cannot be read may need."""
    add_complete(opened, tmp_path, range(1, 6))
    folder = stored(tmp_path)
    core = folder / "image-5" / "part-0" / "core-100.img"
    core.write_bytes(core.read_bytes()[:-1])
    assert names_after(opened(), "newest=1") == [4, 5]
    (folder / "image-5" / MANIFEST_NAME).write_bytes(b"{}")
    add_complete(opened, tmp_path, range(6, 8))
    assert names_after(opened(), "newest=1") == [4, 5, 7]
    found = prune(opened(), parse_policies("newest=1"))
    assert (found.needed, found.unreadable) == (("image-4",), ("image-5",))


def test_an_image_that_is_read_stays(tmp_path: Path) -> None:
    opened = opener("folder", tmp_path)
    add_complete(opened, tmp_path, range(1, 4))
    with reading(tmp_path / "images" / "image-1" / MANIFEST_NAME):
        assert names_after(opened(), "newest=1") == [1, 3]
    assert names_after(opened(), "newest=1") == [3]


def test_no_image_is_deleted_while_one_is_written(opened: Open, tmp_path: Path) -> None:
    add_complete(opened, tmp_path, range(1, 4))
    with opened().writing(), pytest.raises(ConflictError, match="another process"):
        prune(opened(), parse_policies("newest=1"))
    assert len(opened().names()) == 3


def test_an_image_that_cannot_be_deleted(tmp_path: Path) -> None:
    """It stays, and with it the older ones, which it may need."""
    opened = opener("folder", tmp_path)
    add_complete(opened, tmp_path, range(1, 5))
    if subprocess.run(["chattr", "+i", tmp_path / "images" / "image-2"], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no immutable folders, or this user is not root")
    try:
        found = prune(opened(), parse_policies("newest=1"))
        assert [one.name for one in found.deleted] == ["image-3"]
        assert [name for name, _ in found.failed] == ["image-2"]
        assert opened().names() == ["image-4", "image-2", "image-1"]
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "images" / "image-2"], check=True)


def test_the_image_of_a_killed_deletion_is_gone_or_whole(tmp_path: Path) -> None:
    """What is left of it is deleted by the next writer."""
    opened = opener("folder", tmp_path)
    add_complete(opened, tmp_path, range(1, 3))
    left = tmp_path / "images" / ".safepoint" / "images" / "work-killed"
    left.mkdir()
    shutil.move(tmp_path / "images" / "image-1", left)
    assert opened().names() == ["image-2"]
    add_complete(opened, tmp_path, range(3, 4))
    assert not left.exists()
