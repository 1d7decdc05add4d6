"""How places and keys are named."""

from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.transparent.images.opening import key_of, open_images, parse_images
from safepoint.transparent.protection.keys import own_key_path


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("/a/images", "/a/images", None),
        ("/a/images/image-3", "/a/images", "image-3"),
        ("/a/image-0", "/a/image-0", None),
        ("s3://bucket", "s3://bucket", None),
        ("s3://bucket/image-12", "s3://bucket", "image-12"),
        ("s3://bucket/images/image-12/", "s3://bucket/images", "image-12"),
    ],
)
def test_a_place_may_name_an_image(text: str, place: str, name: str | None) -> None:
    location, found = parse_images(text)
    assert (str(location), found) == (place, name)


def test_a_folder_is_relative_to_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_images(parse_images("images/image-1")[0]) as images:
        assert images.folder == tmp_path / "images"
    with pytest.raises(UsageError, match="empty"):
        parse_images("")


def test_a_users_key_is_made_for_a_new_image_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that only read do not make one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert key_of(None, is_made=False) is None
    assert not own_key_path().exists()
    made = key_of(None, is_made=True)
    assert made is not None
    assert key_of(None, is_made=False) == made
    assert key_of(own_key_path(), is_made=False) == made
