"""Commands about process images: without CRIU, on images of dumps that the tests write."""

import os
from pathlib import Path

import pytest

from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.protection.keys import ImageKey
from tests.support.commands import safepoint
from tests.support.criu_images import add_image
from tests.support.moto_server import MotoServer


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two images, the second of which needs the first."""
    location = ImageLocation(tmp_path / "images")
    add_image(location, tmp_path / "dump-1", {100: b"x" * 4096 + b"y" * 4096 + bytes(4096)})
    add_image(location, tmp_path / "dump-2", {100: b"x" * 4096 + b"z" * 4096 + bytes(4096)})
    return location.folder


def test_images_are_listed_newest_first(images: Path) -> None:
    lines = safepoint("images", "list", images).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["IMAGE", "image-2", "image-1"]
    documents = safepoint("images", "list", images, "--json").document
    assert [(one["name"], one["num_stored"], one["needs"]) for one in documents] == [
        ("image-2", 1, ["image-1"]),
        ("image-1", 2, []),
    ]
    (images.parent / "empty").mkdir()
    assert "no process images" in safepoint("images", "list", images.parent / "empty").stdout


def test_an_image_is_shown(images: Path) -> None:
    """A folder stands for its newest image."""
    shown = safepoint("images", "show", images).stdout
    assert "pages: 3, of which 1 zero, 1 in older images, 1 in this image" in shown
    assert "needs: image-1" in shown
    assert "needs: no other image" in safepoint("images", "show", images / "image-1").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        *(["images", "list"], ["images", "show"], ["images", "verify"], ["images", "copy"]),
        *(["images", "prune", "--keep", "newest=1"], ["checkpoints", "list"], ["checkpoints", "verify"]),
    ],
)
def test_a_folder_that_does_not_exist_is_not_an_empty_one(arguments: list[str], tmp_path: Path) -> None:
    """Exit code 10, as for other things that do not exist; also for the location of a single image."""
    folder = tmp_path / "nowhere"
    target = [tmp_path / "new"] if "copy" in arguments else []
    for place in (folder, folder / "image-1") if arguments[1] in {"show", "copy"} else (folder,):
        found = safepoint(*arguments, place, *target)
        assert (found.code, found.stderr) == (10, f"safepoint: error: there is no folder {folder} — check the path\n")
    assert not folder.exists()


@pytest.mark.parametrize("options", [[], ["--deep"]])
def test_valid_images_are_verified(images: Path, options: list[str]) -> None:
    assert safepoint("images", "verify", images, *options).code == 0
    assert safepoint("images", "verify", images / "image-2", *options).code == 0


def test_damage_is_reported(images: Path) -> None:
    """The newer image needs pages of the damaged one."""
    (images / "image-1" / "part-0" / "pages-1.regions").unlink()
    found = safepoint("images", "verify", images, "--json")
    assert found.code == 14
    assert ["pages-1.regions" in one["fault"] for one in found.document] == [True, True]
    assert "damaged" in safepoint("images", "list", images).stdout
    (images.parent / "empty").mkdir()
    assert safepoint("images", "verify", images.parent / "empty").code == 14


def test_without_criu_the_commands_say_so(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 16, and with what to install. The other commands work."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    for command in (["thaw", images], ["freeze", "--pid", os.getpid(), "--to", images]):
        found = safepoint(*command, "--json")
        assert found.code == 16
        assert "CRIU" in found.exit_error["message"]
        assert "4.2" in found.exit_error["hint"]
    assert [path.name for path in ImageLocation(images).folder.glob("image-*")] != []


def test_images_are_copied_with_those_that_they_need(images: Path, tmp_path: Path) -> None:
    """One image brings its chain; a second copy copies nothing; another image of the name is a conflict."""
    target = tmp_path / "copy"
    found = safepoint("images", "copy", images / "image-2", target, "--json").document
    assert [(one["name"], one["copied"]) for one in found] == [("image-1", True), ("image-2", True)]
    assert safepoint("images", "verify", target, "--deep").code == 0
    lines = safepoint("images", "copy", images, target).stdout
    assert lines.count("exists already") == 2
    other = ImageLocation(tmp_path / "other")
    add_image(other, tmp_path / "dump-3", {100: bytes(4096)})
    assert safepoint("images", "copy", other.folder, target).code == 11
    assert safepoint("images", "copy", images, target / "image-1").code == 2
    (tmp_path / "empty").mkdir()
    assert safepoint("images", "copy", tmp_path / "empty", target).code == 14


def test_images_are_pruned(images: Path, tmp_path: Path) -> None:
    """What a kept image needs stays, and the answer says so."""
    found = safepoint("images", "prune", images, "--keep", "newest=1", "--json").document
    assert (found["deleted"], found["needed"]) == ([], ["image-1"])
    assert "image-1 stays" in safepoint("images", "prune", images, "--keep", "newest=1").stdout
    (images / "image-2" / "image.json").unlink()
    assert "image-2 cannot be read" in safepoint("images", "prune", images, "--keep", "newest=1").stdout
    add_image(ImageLocation(images), tmp_path / "dump-3", {100: b"x" * 4096})
    (images / "image-2").rename(tmp_path / "image-2")
    dry = safepoint("images", "prune", images, "--keep", "newest=1", "--dry-run").stdout
    assert f"{images}/image-1: would be deleted" in dry
    assert [one["name"] for one in safepoint("images", "list", images, "--json").document] == ["image-3", "image-1"]
    found = safepoint("images", "prune", images, "--keep", "newest=1", "--json").document
    assert [one["name"] for one in found["deleted"]] == ["image-1"]
    assert [one["name"] for one in safepoint("images", "list", images, "--json").document] == ["image-3"]


@pytest.mark.parametrize(
    ("keep", "words"), [("best=1:loss", "no metrics"), ("younger=2h", "delete nothing"), ("newest", "--keep")]
)
def test_policies_that_are_refused(images: Path, keep: str, words: str) -> None:
    found = safepoint("images", "prune", images, "--keep", keep, "--json")
    assert found.code == 2
    assert words in found.exit_error["message"]


def test_images_say_whose_key_they_have(tmp_path: Path) -> None:
    """An encrypted image is checked with its key only."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    images = tmp_path / "images"
    add_image(ImageLocation(images, ImageKey(b"k" * 32), is_encrypting=True), tmp_path / "dump", {100: b"x" * 4096})
    assert "key: yours, encrypted" in safepoint("images", "show", images, "--key", key).stdout
    assert "key: another, encrypted" in safepoint("images", "show", images).stdout
    assert safepoint("images", "list", images, "--json").document[0]["is_encrypted"]
    assert safepoint("images", "verify", images, "--deep", "--key", key).code == 0
    found = safepoint("images", "verify", images, "--json")
    assert found.code == 14
    assert "encrypted with another key" in found.document[0]["fault"]
    assert safepoint("images", "verify", images, "--key", tmp_path / "none").code == 13


def test_images_in_a_bucket(images: Path, tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commands; what they fetch is deleted at their end."""
    for name, value in {**moto.variables, "TMPDIR": str(tmp_path / "temporary")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    place = str(moto.location("images-of-commands"))
    assert safepoint("images", "copy", images, place).code == 0
    assert [one["path"] for one in safepoint("images", "list", place, "--json").document] == [
        f"{place}/image-2",
        f"{place}/image-1",
    ]
    assert f"{place}/image-2: python" in safepoint("images", "show", place).stdout
    assert safepoint("images", "verify", f"{place}/image-2", "--deep").code == 0
    assert "image-1 stays" in safepoint("images", "prune", place, "--keep", "newest=1").stdout
    assert safepoint("images", "copy", f"{place}/image-2", tmp_path / "back").code == 0
    assert safepoint("images", "verify", tmp_path / "back", "--deep").code == 0
    assert safepoint("images", "verify", f"{place}/nowhere").code == 14
    assert list((tmp_path / "temporary").iterdir()) == []


def test_places_that_are_refused(images: Path) -> None:
    """A single image where a location is needed, and what is no location."""
    assert "single image" in safepoint("images", "list", images / "image-1").stderr
    assert safepoint("images", "list", "s3:/x").code == 2
    assert safepoint("images", "list", "ftp://x/y").code == 2
