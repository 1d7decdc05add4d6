"""Mutations of images, manifests and chains: each is refused with a message, or what is restored is what was dumped.

An accident changes files. A forger also makes all digests fit: without a key, what is restored may then be what the
forger has written, and with a key it never is. `make test-long` makes 3,000 mutations, and `make test` 480. A turn
depends on its number only, so each can be repeated by itself.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.sealed_record import seal
from safepoint.errors import ImageError
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import MANIFEST_NAME
from safepoint.transparent.images.materialise import materialise
from safepoint.transparent.protection.keys import ImageKey
from tests.support.criu_images import add_image, random_pages, same_files

_KEY = ImageKey(b"k" * 32)
_NEWEST = "image-3"
_SMALL = (0, 1, 2, 3, 64, 80, 127, 255, 4095, 4096, 4097, 65_535, 65_536)
_LARGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
_counts = pytest.mark.parametrize("count", [80, pytest.param(500, marks=pytest.mark.long)])


@pytest.fixture(scope="module", params=["unprotected", "authenticated", "encrypted"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageLocation:
    """A chain of three images of two processes: zero, stored and equal pages, and pages at other places."""
    root = tmp_path_factory.mktemp("made")
    kind = str(request.param)
    key = None if kind == "unprotected" else _KEY
    location = ImageLocation(
        root / "images", key, is_encrypting=kind == "encrypted", only_authentic=kind != "unprotected"
    )
    one, two = random_pages(1, 80), bytes(b"abcd" * 1024 * 20)
    states = [
        {100: one, 200: two},
        {100: random_pages(3, 5) + one, 200: bytes(4096) + two},
        {100: two + one[: 40 * 4096] + random_pages(4, 3), 200: random_pages(3, 5) + bytes(3 * 4096)},
    ]
    for number, state in enumerate(states, start=1):
        add_image(location, root / f"dump-{number}", state)
    return location


class Copied:
    """A copy of the images, one change of which is undone after each turn."""

    def __init__(self, made: ImageLocation, folder: Path) -> None:
        shutil.copytree(made.folder, folder / "copied", symlinks=True)
        self.made = made
        self.location = ImageLocation(folder / "copied", made.key, only_authentic=made.key is not None)
        self.paths = sorted(path for path in self.location.folder.glob("image-*/**/*") if path.is_file())
        self._originals = {path: path.read_bytes() for path in self.paths}

    def restore(self, target: Path, *, is_equal: bool) -> bool:
        """Whether the image was refused. If it was not, and `is_equal`, its files are those that were dumped."""
        target.mkdir()
        try:
            materialise(self.location, _NEWEST, target)
        except ImageError:
            return True
        finally:
            self.undo()
        if is_equal:
            same_files(self.made.folder.parent / "dump-3", target / "part-0")
        return False

    def undo(self) -> None:
        for path, data in self._originals.items():
            if not path.is_file() or path.read_bytes() != data:
                if path.is_dir():
                    path.rmdir()
                path.unlink(missing_ok=True)
                path.write_bytes(data)


def changed(data: bytes, chance: random.Random) -> bytes:
    """Other bytes: single ones, a number at any place, a piece that is exchanged, missing or there twice."""
    found = bytearray(data or b"\0")
    begin, end = sorted(chance.randrange(len(found) + 1) for _ in range(2))
    match chance.randrange(6):
        case 0:
            for _ in range(chance.randint(1, 3)):
                found[chance.randrange(len(found))] = chance.randrange(256)
        case 1:
            size = chance.choice((4, 8))
            number = chance.choice(_SMALL + _LARGE) % 256**size
            found[begin : begin + size] = number.to_bytes(size, "little")
        case 2:
            del found[begin:end]
        case 3:
            found[begin:begin] = found[begin:end]
        case 4:
            found[begin:end] = bytes(end - begin)
        case _:
            del found[chance.randrange(len(found)) :]
    return bytes(found)


def cause_accident(copied: Copied, chance: random.Random) -> None:
    """Change a file, or put another one in its place, or exchange two."""
    path, other = chance.choice(copied.paths), chance.choice(copied.paths)
    match chance.randrange(6):
        case 0:
            shutil.copyfile(other, path) if other != path else path.unlink()
        case 1:
            data = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case 2:
            path.unlink()
            chance.choice((os.mkfifo, os.mkdir))(path)
        case _:
            path.write_bytes(changed(path.read_bytes(), chance))


def forge(copied: Copied, chance: random.Random) -> None:
    """Change a file, and make the digests fit, in the file, in its image, and in the images that need it."""
    if chance.randrange(3) == 0:
        forge_manifest(copied, chance)
        return
    path = chance.choice([path for path in copied.paths if path.name != MANIFEST_NAME])
    path.write_bytes(fitting(path, changed(path.read_bytes(), chance)))
    reseal(copied, path)


def fitting(path: Path, data: bytes) -> bytes:
    """A table with its own digest."""
    return data[:-16] + xxhash.xxh3_128_digest(data[:-16]) if path.suffix == ".table" else data


def reseal(copied: Copied, path: Path) -> None:
    image = path.parents[1]
    record = json.loads((image / MANIFEST_NAME).read_bytes())
    data = path.read_bytes()
    for entry in record["files"]:
        if entry["path"] == f"part-0/{path.name}":
            entry.update(size_bytes=len(data), digest=digest_bytes(data))
    write_manifest(copied, image.name, record)


def write_manifest(copied: Copied, name: str, record: dict[str, Any]) -> None:
    """Write a manifest with its own digest, and name it by its new digest in newer images."""
    record.pop("manifest_digest", None)
    path = copied.location.path(name) / MANIFEST_NAME
    path.write_bytes(seal(record))
    digest = digest_bytes(path.read_bytes())
    for newer in ("image-2", "image-3"):
        other = json.loads((copied.location.path(newer) / MANIFEST_NAME).read_bytes())
        sources = other.get("sources")
        listed = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
        named = [source for source in listed if source.get("name") == name and source.get("digest") != digest]
        for source in named:
            source["digest"] = digest
        if named:
            write_manifest(copied, newer, other)


def forge_manifest(copied: Copied, chance: random.Random) -> None:
    """Change one value of a manifest, at any depth, also to one of another type."""
    name = chance.choice(("image-1", "image-2", "image-3"))
    record = json.loads((copied.location.path(name) / MANIFEST_NAME).read_bytes())
    values: list[Any] = [None, True, -1, 1.5, "", "x", "../x", "part-0/core-1.img", "image-1", [], {}, [{}]]
    values += [chance.choice(_SMALL), chance.choice(_LARGE)]
    place: Any = record
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not place[key] or not isinstance(place[key], dict | list) or chance.randrange(4) == 0:
            break
        place = place[key]
    match chance.randrange(3):
        case 0:
            place[key] = chance.choice(values)
        case 1 if isinstance(place, list):
            place.insert(chance.randrange(len(place)), place[key])
        case _:
            del place[key]
    write_manifest(copied, name, record)


def turns(
    made: ImageLocation, tmp_path: Path, count: int, change: Callable[[Copied, random.Random], None]
) -> tuple[int, int]:
    """How many of `count` changes were refused, and how many were not."""
    copied = Copied(made, tmp_path)
    refused = 0
    for turn in range(count):
        print(f"{change.__name__}, turn {turn}")  # shown if this turn fails
        change(copied, random.Random(f"{change.__name__} {turn}"))
        target = tmp_path / "restored"
        refused += copied.restore(target, is_equal=change is cause_accident or made.key is not None)
        shutil.rmtree(target)
    return refused, count - refused


@_counts
def test_accidents(made: ImageLocation, tmp_path: Path, count: int) -> None:
    """Refused or equal. Some files of older images are not needed, so not all are refused."""
    refused, equal = turns(made, tmp_path, count, cause_accident)
    assert refused > count / 2
    assert equal > 0


@_counts
def test_forgeries(made: ImageLocation, tmp_path: Path, count: int) -> None:
    """With a key: refused or equal. Without one: refused, or restored as the forger has written it; never a crash."""
    refused, _ = turns(made, tmp_path, count, forge)
    assert refused > count / 3
