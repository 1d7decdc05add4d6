"""Images with a key: whose they are, and that no other program can change or, if encrypted, read them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.errors import ImageError
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import MANIFEST_NAME, ImageManifest
from safepoint.transparent.images.materialise import materialise, verify
from safepoint.transparent.protection.keys import ImageKey
from tests.support.criu_images import add_image, random_pages, same_files

_OWN, _OTHER = ImageKey(b"o" * 32), ImageKey(b"x" * 32)
_SECRET = b"a password in the memory of a process"


def state(number: int) -> dict[int, bytes]:
    secret = _SECRET.ljust(4096, b".")
    return {100: secret + random_pages(number + 10, 5) + random_pages(1, 70), 200: bytes(8192) + random_pages(2, 3)}


def make(folder: Path, key: ImageKey | None, *, is_encrypting: bool = False) -> ImageLocation:
    """A chain of two images."""
    location = ImageLocation(folder / "images", key, is_encrypting=is_encrypting)
    for number in (1, 2):
        add_image(location, folder / f"dump-{number}", state(number))
    return location


@pytest.mark.parametrize("is_encrypting", [False, True])
def test_a_chain_comes_back(tmp_path: Path, *, is_encrypting: bool) -> None:
    """With the key, also if only authentic images are accepted; and an encrypted one hides the memory."""
    location = make(tmp_path, _OWN, is_encrypting=is_encrypting)
    assert location.read("image-2").num_stored == 5
    strict = ImageLocation(location.folder, _OWN, only_authentic=True)
    (tmp_path / "out").mkdir()
    verify(strict, "image-2", deep=True)
    materialise(strict, "image-2", tmp_path / "out")
    same_files(tmp_path / "dump-2", tmp_path / "out" / "part-0")
    files = [path.read_bytes() for path in location.folder.rglob("*") if path.is_file()]
    assert any(b"ids of 100" in data for data in files) == (not is_encrypting)
    assert any(_SECRET in data for data in files) == (not is_encrypting)


def test_whose_an_image_is(tmp_path: Path) -> None:
    """Without a protection, or with another key, it is used only if it need not be authentic."""
    made = {
        name: make(tmp_path / name, key)
        for name, key in (("none", None), ("other", _OTHER))
        if mkdir(tmp_path / name)
    }
    for name, location in made.items():
        strict = ImageLocation(location.folder, _OWN, only_authentic=True)
        with pytest.raises(ImageError, match="another user may have made it") as raised:
            verify(strict, "image-2", deep=False)
        assert "--trust" in (raised.value.hint or "")
        trusting = ImageLocation(location.folder, _OWN)
        verify(trusting, "image-2", deep=True)
        # The chain of another key is not continued.
        continued = add_image(trusting, tmp_path / f"dump-{name}", state(2))
        assert not continued.sources
        assert continued.is_signed_by(_OWN)


def mkdir(folder: Path) -> bool:
    folder.mkdir()
    return True


def test_an_encrypted_image_needs_its_key(tmp_path: Path) -> None:
    """Its manifest can be read, so it can be listed, copied and deleted without the key."""
    location = make(tmp_path, _OWN, is_encrypting=True)
    for key in (None, _OTHER):
        without = ImageLocation(location.folder, key)
        assert without.read("image-2").is_encrypted
        with pytest.raises(ImageError, match="encrypted with another key") as raised:
            verify(without, "image-2", deep=False)
        assert "--key" in (raised.value.hint or "")


def test_an_image_that_is_not_encrypted_is_not_continued(tmp_path: Path) -> None:
    """Otherwise pages of an encrypted image would be readable in the older one."""
    location = make(tmp_path, _OWN)
    encrypting = ImageLocation(location.folder, _OWN, is_encrypting=True)
    assert not add_image(encrypting, tmp_path / "dump-3", state(3)).sources
    assert add_image(encrypting, tmp_path / "dump-4", state(4)).sources
    assert not add_image(location, tmp_path / "dump-5", state(5)).sources


def forge(manifest: ImageManifest) -> dict[str, ImageManifest]:
    """What a person who may write to the folder, and has no key, can make of a manifest."""
    facts = manifest.protection
    assert facts is not None
    part = manifest.parts[0]
    return {
        "other program": replace(manifest, parts=(replace(part, program="bash"),)),
        "other time": replace(manifest, created="2020-01-01T00:00:00Z"),
        "fewer files": replace(manifest, files=manifest.files[1:]),
        "other salt": replace(manifest, protection=replace(facts, salt="0" * 64)),
        "not encrypted": replace(manifest, protection=replace(facts, is_encrypted=not facts.is_encrypted)),
        "own key": manifest.signed(None).signed(ImageLocation(Path(), _OTHER).new_protection()),
        "own key as that of the owner": replace(
            manifest, protection=replace(facts, mac="1" * 64), created="2020-01-01T00:00:00Z"
        ),
        "no protection": manifest.signed(None),
    }


@pytest.mark.parametrize("is_encrypting", [False, True])
@pytest.mark.parametrize("image", ["image-1", "image-2"])
def test_forged_manifests(tmp_path: Path, image: str, *, is_encrypting: bool) -> None:
    """Their own digests are right, as a forger would make them; each is refused, in the image and in its chain."""
    location = make(tmp_path, _OWN, is_encrypting=is_encrypting)
    strict = ImageLocation(location.folder, _OWN, only_authentic=True)
    for what, forged in forge(location.read(image)).items():
        path = location.path(image) / MANIFEST_NAME
        whole = path.read_bytes()
        path.write_bytes(forged.to_bytes())
        with pytest.raises(ImageError):
            accept(strict, what)
        path.write_bytes(whole)
    verify(strict, "image-2", deep=True)


def accept(location: ImageLocation, what: str) -> None:
    verify(location, "image-2", deep=False)
    pytest.fail(what)


def test_files_of_another_own_image(tmp_path: Path) -> None:
    """A file of another image of this user, with a manifest that fits, is refused: its key is another one."""
    location = make(tmp_path, _OWN)
    other = ImageLocation(tmp_path / "other", _OWN)
    add_image(other, tmp_path / "dump-other", state(1))
    core = Path("part-0") / "core-100.img"
    shutil.copy(other.path("image-1") / core, location.path("image-1") / core)
    with pytest.raises(ImageError):
        verify(ImageLocation(location.folder, _OWN), "image-1", deep=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(ImageError):
        materialise(ImageLocation(location.folder, _OWN), "image-1", tmp_path / "out")


def test_the_manifest_says_how_it_is_protected(tmp_path: Path) -> None:
    location = make(tmp_path, _OWN, is_encrypting=True)
    record = json.loads((location.path("image-1") / MANIFEST_NAME).read_bytes())["protection"]
    assert (record["key_id"], record["is_encrypted"]) == (_OWN.id, True)
    assert "protection" not in json.loads(make_unprotected(tmp_path).to_bytes())
    for change in ({"key_id": "x"}, {"salt": "00"}, {"mac": None}, {"is_encrypted": 1}):
        with pytest.raises(ValueError, match="must be"):
            replace(location.read("image-1").protection, **change)  # pyright: ignore[reportArgumentType]


def make_unprotected(folder: Path) -> ImageManifest:
    return add_image(ImageLocation(folder / "plain"), folder / "dump-plain", state(1))
