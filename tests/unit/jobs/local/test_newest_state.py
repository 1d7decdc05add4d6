"""The choice between an image and a checkpoint."""

from pathlib import Path

import pytest

from safepoint.errors import UnsupportedError
from safepoint.jobs.local import newest_state
from safepoint.jobs.local.newest_state import Checkpoint, choose
from safepoint.transparent.criu import program
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.protection.keys import own_key
from tests.support.criu_images import add_image, random_pages

OLD = Checkpoint(step=3, created_s=1e9)
NEW = Checkpoint(step=9, created_s=3e10)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image of this user, on a machine with CRIU."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(program, "find_criu", lambda: Criu(path="criu", version="4.2.1"))
    location = ImageLocation(tmp_path / "images", own_key())
    return location.folder / add_image(location, tmp_path / "dump", {7: random_pages(1, 70)}).name


def test_what_is_newer_is_chosen(image: Path) -> None:
    """The image without a checkpoint, too. The sentence names both."""
    found = choose(str(image), OLD)
    assert found.image == str(image)
    assert f"from {image}" in found.why
    assert "the newest checkpoint (step 3) is older" in found.why
    assert choose(str(image), None).image == str(image)
    found = choose(str(image), NEW)
    assert found.image is None
    assert "from the checkpoint of step 9, which is newer than" in found.why


def test_an_image_that_cannot_be_used_is_not_chosen(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is missing, the machine has another processor or no CRIU, another user has made it, or it is gone."""
    file = next(image.rglob("pages-*.regions"))
    data = file.read_bytes()
    file.unlink()
    found = choose(str(image), OLD)
    assert found.image is None
    assert "from the checkpoint of step 3, because the process image cannot be used: " in found.why
    file.write_bytes(data)
    assert choose(str(image), OLD).image == str(image)
    with monkeypatch.context() as patched:
        patched.setattr(newest_state.platform, "machine", lambda: "sparc64")
        assert "x86_64" in choose(str(image), None).why
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(image.parent / "other"))
        assert "another key" in choose(str(image), OLD).why or "no protection" in choose(str(image), OLD).why

    def missing() -> Criu:
        raise UnsupportedError("CRIU is not installed; nothing was done", hint="install it")

    with monkeypatch.context() as patched:
        patched.setattr(program, "find_criu", missing)
        assert "CRIU is not installed" in choose(str(image), OLD).why
    (image / "image.json").unlink()
    assert choose(str(image), OLD).image is None
