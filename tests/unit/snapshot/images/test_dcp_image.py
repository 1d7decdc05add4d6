"""Files of torch.distributed.checkpoint, captured: what is read from them is what was saved."""

import io
import itertools
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

from safepoint.snapshot.images.capture import Capture
from safepoint.snapshot.images.image import Image
from tests.support.snapshots import render, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    large = torch.arange(30000, dtype=torch.float32)
    return {
        "weights": {"a": torch.nn.Parameter(torch.randn(31, 7)), "half": torch.randn(9).bfloat16()},
        "view": large[100:200],
        "column": large.view(300, 100)[:, 3],
        "transposed": torch.randn(5, 8).t(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "eight": torch.randn(8).to(torch.float8_e4m3fn),
        "settings": {"lr": 0.1, "names": ["a", "b"]},
    }


def captured(capture: Capture, root: Path, content: dict[str, Any], **options: Any) -> dict[str, Image]:
    (root / "sub").mkdir(parents=True)
    with capture.below(root) as found:
        dcp.save(content, storage_writer=dcp.FileSystemWriter(root / "sub", **options))
    return {image.path: image for image in capture.collect(found)}


def loaded(images: dict[str, Image], folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    for image in images.values():
        (folder / image.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / image.path).write_bytes(render(image))
    result = _emptied(like)
    dcp.load(result, checkpoint_id=folder / "sub")
    return result


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _emptied(one) for name, one in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, torch.Tensor):
        plain = [one.detach().reshape(-1).contiguous().view(torch.uint8) for one in (ours, theirs)]
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(*plain)
    return ours == theirs


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    """Views, types, empty tensors and other objects; nothing of it was written by the routine itself."""
    content = state()
    images = captured(Capture(), tmp_path / "scratch", content)
    assert sorted(images) == ["sub/.metadata", "sub/__0_0.distcp"]
    assert all(path.stat().st_size < 100 for path in (tmp_path / "scratch").rglob("*.distcp"))
    assert len(images["sub/__0_0.distcp"].pieces) == 7  # one is empty, one is of a type that torch has to pickle
    assert equal(loaded(images, tmp_path / "out", content), content)


def test_a_later_save_has_what_is_new(tmp_path: Path) -> None:
    """The layout is kept while tensors stay where they are; their content and all else is that of the day."""
    content, capture = state(), Capture()
    first = captured(capture, tmp_path / "1", content)["sub/__0_0.distcp"]
    with torch.no_grad():
        content["weights"]["a"].fill_(7)
    content["settings"] = {"lr": 0.05, "names": ["a", "b", "a name that is longer than all of those before it"]}
    images = captured(capture, tmp_path / "2", content)
    assert [piece.offset for piece in images["sub/__0_0.distcp"].pieces] == [piece.offset for piece in first.pieces]
    assert equal(loaded(images, tmp_path / "out", content), content)
    content["weights"]["a"] = torch.randn(40, 7)
    images = captured(capture, tmp_path / "3", content)
    assert equal(loaded(images, tmp_path / "other", content), content)


def test_archives_are_whole(tmp_path: Path) -> None:
    """Each tensor is an archive with right checksums, where the metadata say."""
    images = captured(Capture(), tmp_path / "scratch", state())
    content = render(images["sub/__0_0.distcp"])
    metadata = pickle.loads(render(images["sub/.metadata"]))
    places = sorted((place.offset, place.length) for place in metadata.storage_data.values())
    assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(places))
    tensors = 0
    for begin, length in places:
        item = io.BytesIO(content[begin : begin + length])
        with zipfile.ZipFile(item) as archive:
            assert archive.testzip() is None
            tensors += archive.namelist()[0] == "archive/data/0"
        item.seek(0)
        torch.load(item, weights_only=True)
    assert tensors >= 7


@pytest.mark.parametrize(
    "options",
    [{"single_file_per_rank": False}, {"serialization_format": SerializationFormat.SAFETENSORS}],
    ids=["file per item", "safetensors"],
)
def test_other_ways_of_writing_are_the_librarys_own(tmp_path: Path, options: dict[str, Any]) -> None:
    """They are written at once, and collected as they are."""
    content = {"weight": torch.randn(5), "other": torch.randn(3)}
    images = captured(Capture(), tmp_path / "scratch", content, **options)
    assert all(not image.pieces for image in images.values())
    written = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert len(written) == len(images) > 1


def test_a_save_elsewhere_passes(tmp_path: Path) -> None:
    """While a capture is open, too."""
    content = {"weight": torch.randn(5)}
    (tmp_path / "scratch").mkdir()
    with Capture().below(tmp_path / "scratch") as found:
        dcp.save(content, checkpoint_id=tmp_path / "elsewhere")
    assert not found.images
    result = {"weight": torch.zeros(5)}
    dcp.load(result, checkpoint_id=tmp_path / "elsewhere")
    assert same(result, content)
