"""The GPUs that an image names."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.sealed_record import seal
from safepoint.errors import ImageError
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest
from tests.support.criu_images import MACHINE, add_image

_UUIDS = ("GPU-01234567-89ab-cdef-0123-456789abcdef", "GPU-11234567-89ab-cdef-0123-456789abcdef")


@pytest.fixture
def manifest(tmp_path: Path) -> ImageManifest:
    return add_image(ImageLocation(tmp_path / "images"), tmp_path / "dump", {7: bytes(4096)})


def changed(manifest: ImageManifest, gpus: Any) -> bytes:
    """The manifest as another program would write it."""
    record = json.loads(manifest.to_bytes())
    record["machine"]["gpus"] = gpus
    return seal({name: value for name, value in record.items() if name != "manifest_digest"})


def test_gpus_are_kept(manifest: ImageManifest) -> None:
    """In their order. Without any, the field is absent, as in images of earlier commits."""
    with_gpus = dataclasses.replace(manifest, machine=dataclasses.replace(MACHINE, gpus=_UUIDS))
    assert ImageManifest.from_bytes(with_gpus.to_bytes()) == with_gpus
    assert b"gpus" not in manifest.to_bytes()
    assert ImageManifest.from_bytes(manifest.to_bytes()) == manifest
    assert ImageManifest.from_bytes(changed(manifest, list(_UUIDS))) == with_gpus


@pytest.mark.parametrize(
    "gpus",
    [
        *("GPU", 7, None, {}, {"a": 1}, [7], [None], [[]], ["../GPU"]),
        *([_UUIDS[0], _UUIDS[0]], [_UUIDS[0] + "\n"], [_UUIDS[0][:-3] + f"{number:03}" for number in range(300)]),
    ],
)
def test_hostile_gpus_are_refused(manifest: ImageManifest, gpus: Any) -> None:
    """Before anything reads a file of the image."""
    with pytest.raises(ImageError, match="gpus"):
        ImageManifest.from_bytes(changed(manifest, gpus))
