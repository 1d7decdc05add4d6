"""Commands about process images: without CRIU, on images of dumps that the tests write."""

import os
from pathlib import Path

import pytest

from safepoint.transparent.images.location import ImageLocation
from tests.support.commands import safepoint
from tests.support.criu_images import add_image


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
    assert "no process images" in safepoint("images", "list", images.parent / "other").stdout


def test_an_image_is_shown(images: Path) -> None:
    """A folder stands for its newest image."""
    shown = safepoint("images", "show", images).stdout
    assert "pages: 3, of which 1 zero, 1 in older images, 1 here" in shown
    assert "needs: image-1" in shown
    assert "needs: no other image" in safepoint("images", "show", images / "image-1").stdout
    assert safepoint("images", "show", images.parent / "other").code == 2


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
    assert safepoint("images", "verify", images.parent / "other").code == 14


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
