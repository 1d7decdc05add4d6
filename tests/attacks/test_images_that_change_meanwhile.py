"""A file of a process image is exchanged between its check and its use."""

from pathlib import Path

import pytest

from safepoint.errors import ImageError
from safepoint.transparent.images import materialise as materialise_module
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise
from tests.support.criu_images import add_image


@pytest.mark.parametrize("name", ["core-100.img", "pagemap-100.img"])
@pytest.mark.parametrize("text", [b"another program", b"another program " * 1000, b""])
def test_criu_gets_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes) -> None:
    """The file of CRIU changes when all checks have passed, and just before the copy is made."""
    location = ImageLocation(tmp_path / "images")
    add_image(location, tmp_path / "dump", {100: b"x" * 8192})
    make_folder = materialise_module.no_links.make_folder

    def exchange(path: Path, mode: int) -> None:
        (location.path("image-1") / "part-0" / name).write_bytes(text)
        make_folder(path, mode)

    monkeypatch.setattr(materialise_module.no_links, "make_folder", exchange)
    target = tmp_path / "restored"
    target.mkdir()
    with pytest.raises(ImageError, match="altered"):
        materialise(location, "image-1", target)
    copied = target / "part-0" / name
    assert not copied.exists() or copied.stat().st_size <= 1000
