"""Images of `torch.save` archives: what they become loads as what `torch.save` writes, now and after any change."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.torch_archive import PICKLE_BEGIN, PICKLE_END, StorageRecords, lay_out
from safepoint.snapshot.images.torch_image import TorchImages
from tests.support.snapshots import render, same, saved_and_loaded

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]


def check(images: TorchImages, state: Any, folder: Path, *, weights_only: bool = True) -> Image:
    """Compose, render and load in every way; all of it equals what torch makes of the same state."""
    image = images.compose(state)
    content = render(image)
    assert len(content) == image.size_bytes
    path = folder / "ours.pt"
    path.write_bytes(content)
    theirs = saved_and_loaded(state, folder, weights_only=weights_only)
    assert same(torch.load(path, weights_only=weights_only), theirs)
    assert same(torch.load(path, weights_only=weights_only, mmap=True), theirs)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return image


def adam(model: torch.nn.Module, *, steps: int = 2) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return optimizer


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def test_states_of_modules_and_optimizers(tmp_path: Path) -> None:
    """With the versions that modules leave in `_metadata`, over several steps, and with another learning rate."""
    model = small_model()
    optimizer = adam(model)
    of_model, of_optimizer = TorchImages("model.pt"), TorchImages("sub/optimizer.pt")
    for step in range(3):
        check(of_model, model.state_dict(), tmp_path)
        check(of_optimizer, optimizer.state_dict(), tmp_path)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    loaded = torch.load(io.BytesIO(render(of_model.compose(model.state_dict()))), weights_only=True)
    assert loaded._metadata == model.state_dict()._metadata


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole, sliced, transposed, without dimensions and empty, tensors and parameters."""
    whole = (torch.arange(24) % 2 if dtype is torch.bool else torch.arange(24)).to(dtype).reshape(4, 6)
    state = {
        "whole": whole,
        "rows": whole[1:3],
        "columns": whole[:, 2:5],
        "turned": whole.t(),
        "one": whole[2, 3],
        "zero_dimensional": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "fixed": torch.nn.Parameter(whole.clone(), requires_grad=False),
    }
    if dtype.is_floating_point or dtype.is_complex:
        state["parameter"] = torch.nn.Parameter(whole.clone())
    image = check(TorchImages("state.pt"), state, tmp_path)
    assert len(image.pieces) == len(state) - 5, "five of them share one storage, and one has none"


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """Within one value, and over several."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    images = TorchImages("state.pt")
    for state in (model.state_dict(), {"one": model.state_dict(), "other": {"weight": model[0].weight.detach()}}):
        for _ in range(2):
            image = check(images, state, tmp_path)
            assert [piece.num_bytes for piece in image.pieces] == [64 * 64 * 4]


class Thing:
    """An object that only a full pickle can hold."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Thing({self.tensor!r})"


def test_nested_containers_and_objects(tmp_path: Path) -> None:
    """Whatever torch pickles, on any level; objects are pickled again each time."""
    nested = {"deep": [1, (2.5, None, [torch.ones(3)]), OrderedDict(a=b"bytes", b={True: "yes", 3: complex(1, 2)})]}
    check(TorchImages("nested.pt"), nested, tmp_path)
    for value in (torch.ones(3), [torch.ones(2), "text"], {}, {1: 2}, {"": 1, "ü": -0.0}, 7, None, float("nan")):
        images = TorchImages("value.pt")
        check(images, value, tmp_path)
        check(images, value, tmp_path)
    images = TorchImages("things.pt")
    thing = Thing(torch.ones(3))
    for _ in range(2):
        check(images, {"thing": thing, "kind": torch.float16, "size": torch.Size([2])}, tmp_path, weights_only=False)
        thing.tensor = thing.tensor + 1


def test_content_is_not_read_while_composing(tmp_path: Path) -> None:
    """The image refers to memory: what is written there after composing is in the file."""
    tensor = torch.zeros(1000)
    image = TorchImages("state.pt").compose({"tensor": tensor})
    tensor.fill_(3.0)
    path = tmp_path / "state.pt"
    path.write_bytes(render(image))
    assert torch.equal(torch.load(path)["tensor"], tensor)


def replaced(state: dict[str, Any]) -> None:
    state["inner"]["weight"] = state["inner"]["weight"].clone()


def resized(state: dict[str, Any]) -> None:
    state["inner"]["weight"].resize_(2, 2)


def turned(state: dict[str, Any]) -> None:
    state["inner"]["weight"].t_()


def frozen(state: dict[str, Any]) -> None:
    state["inner"]["weight"].requires_grad_(False)


def narrowed(state: dict[str, Any]) -> None:
    state["inner"]["weight"].data = state["inner"]["weight"].data[:2]


def elsewhere(state: dict[str, Any]) -> None:
    state["inner"]["weight"].data = torch.full((3, 5), 2.0)


def retyped(state: dict[str, Any]) -> None:
    state["inner"]["weight"] = state["inner"]["weight"].detach().to(torch.float16)


def as_parameter(state: dict[str, Any]) -> None:
    state["inner"]["weight"] = torch.nn.Parameter(state["inner"]["weight"].detach())


def a_view_of_it(state: dict[str, Any]) -> None:
    state["inner"]["weight"] = state["inner"]["weight"].detach()[:2]


def added(state: dict[str, Any]) -> None:
    state["inner"]["new"] = torch.ones(7)
    state["also"] = 1


def removed(state: dict[str, Any]) -> None:
    del state["inner"]["bias"]


def reordered(state: dict[str, Any]) -> None:
    state["inner"]["weight"] = state["inner"].pop("weight")
    state["first"] = state.pop("first")


def other_scalars(state: dict[str, Any]) -> None:
    state["inner"]["lr"] = 0.25
    state["first"] = "another text"


def other_types(state: dict[str, Any]) -> None:
    state["inner"]["flag"] = 1
    state["inner"]["number"] = 1.0


def minus_zero(state: dict[str, Any]) -> None:
    state["inner"]["zero"] = -0.0


def other_keys(state: dict[str, Any]) -> None:
    state["inner"]["by_number"] = {True: "one"}


def other_metadata(state: dict[str, Any]) -> None:
    state["model"]._metadata["0"]["version"] = 9


def tied(state: dict[str, Any]) -> None:
    state["inner"]["bias"] = state["inner"]["weight"]


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    *(replaced, resized, turned, frozen, narrowed, elsewhere, retyped, as_parameter, a_view_of_it, added, removed),
    *(reordered, other_scalars, other_types, minus_zero, other_keys, other_metadata, tied),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_pickled_anew(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The second image is that of the state as it is now, whatever has changed in place or otherwise."""
    weight = torch.arange(15.0).reshape(3, 5)
    if change is frozen:
        weight.requires_grad_()
    inner = {"weight": weight, "bias": torch.ones(3), "lr": 0.5, "flag": True, "number": 1, "zero": 0.0}
    state = {
        "first": "text",
        "inner": {**inner, "by_number": {1: "one"}},
        "model": small_model().state_dict(),
        "last": torch.zeros(4),
    }
    images = TorchImages("state.pt")
    check(images, state, tmp_path)
    check(images, state, tmp_path)
    change(state)
    check(images, state, tmp_path)
    check(images, state, tmp_path)


class Key:
    """A key that is equal to itself, whatever it holds."""

    def __init__(self) -> None:
        self.text = "before"

    def __repr__(self) -> str:
        return f"Key({self.text})"


def test_objects_as_keys_are_pickled_anew(tmp_path: Path) -> None:
    """Their content may change while they stay the same, and equal keys may differ in type."""
    images, key = TorchImages("state.pt"), Key()
    state = {"value": {key: 1}}
    check(images, state, tmp_path, weights_only=False)
    key.text = "after"
    check(images, state, tmp_path, weights_only=False)
    for other in ((1, 0.0), (True, -0.0)):
        check(images, {"value": {other: 1}}, tmp_path, weights_only=False)


def test_a_storage_that_grows_behind_an_empty_view(tmp_path: Path) -> None:
    """An empty tensor has no address that could tell; its storage is looked at each time."""
    images = TorchImages("state.pt")
    whole = torch.ones(1000)
    state = {"view": whole[:0], "whole": whole}
    check(images, state, tmp_path)
    whole.resize_(100_000).fill_(2.0)
    check(images, state, tmp_path)


def test_a_failed_pickle_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither storages of what could not be pickled, nor a value that was never composed."""
    images = TorchImages("state.pt")
    tensor = torch.ones(5)
    good = {"value": [tensor, torch.zeros(5)]}
    check(images, good, tmp_path)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        images.compose({"value": [tensor.clone(), lambda: None]})
    check(images, good, tmp_path)


# ---- any state, changed in any way --------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.integers(-3, 3), st.booleans(), st.floats(width=16), st.text(max_size=3), st.none(), st.binary(max_size=3)
)
POOL = [torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16), torch.tensor(3), torch.empty(0)]
TENSORS = st.integers(0, len(POOL) - 1).map(lambda index: POOL[index])
VIEWS = st.sampled_from([POOL[0][1:], POOL[0].t(), POOL[0][:, 1], POOL[1][2:4], POOL[0].view(-1)])
LEAVES = SCALARS | TENSORS | VIEWS | st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3))
STATES = st.dictionaries(
    st.text(max_size=2),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.integers(-1, 2) | st.text(max_size=1) | st.booleans(), inner, max_size=3)
            | st.builds(tuple, st.lists(inner, max_size=2))
        ),
        max_leaves=6,
    ),
    max_size=4,
)


def mutate(data: st.DataObject, value: Any) -> Any:
    """`value` with something in it changed, in place where that is possible."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(list(value)))
        value[key] = mutate(data, value[key])
        if data.draw(st.booleans()):
            value[key] = value.pop(key)
        return value
    if isinstance(value, list) and value:
        index = data.draw(st.integers(0, len(value) - 1))
        value[index] = mutate(data, value[index])
        return value
    if isinstance(value, torch.Tensor) and value.is_floating_point() and data.draw(st.booleans()):
        return value.detach().requires_grad_() if not value.requires_grad else value.clone().detach()
    return data.draw(LEAVES)


@settings(max_examples=60, deadline=None)
@given(state=STATES, data=st.data())
def test_never_stale(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], data: st.DataObject) -> None:
    """Whatever changes between two saves, each file is what `torch.save` would have written then."""
    folder = tmp_path_factory.getbasetemp()
    images = TorchImages("state.pt")
    for _ in range(3):
        content = render(images.compose(state))
        ours = torch.load(io.BytesIO(content), weights_only=False)
        assert same(ours, saved_and_loaded(state, folder, weights_only=False))
        state = mutate(data, state)


# ---- 4 GiB and more -----------------------------------------------------------------------------------------------

GIB = 1 << 30


def laid_out(sizes: list[int], path: Path) -> list[int]:
    """Lay out an archive with storages of these sizes, in a sparse file without their content; where each begins."""
    storages = StorageRecords("state", sizes)
    layout = lay_out(storages, PICKLE_BEGIN + b"N" + PICKLE_END)
    end = 0
    with path.open("wb") as file:
        for offset, content in sorted((*storages.literals, *layout.literals)):
            if offset != end:  # a seek flushes what is buffered
                file.seek(offset)
            file.write(content)
            end = offset + len(content)
    assert path.stat().st_size == layout.size_bytes
    return storages.places


def test_records_beyond_four_gib(tmp_path: Path) -> None:
    """Sizes and places that need 64 bits are read by others: Python's zipfile and torch."""
    sizes = [5 * GIB, 100, 0xFFFFFFFF, 0xFFFFFFFE, 8]
    path = tmp_path / "huge.pt"
    places = laid_out(sizes, path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        infos = archive.infolist()
        assert [info.file_size for info in infos[:5]] == sizes
        for number, (info, place, size) in enumerate(zip(infos, places, sizes, strict=False)):
            assert info.filename == f"state/data/{number}"
            file.seek(info.header_offset)
            fields = struct.unpack("<IHHHHHIIIHH", file.read(30))
            assert fields[0] == 0x04034B50
            assert info.header_offset + 30 + fields[9] + fields[10] == place
            assert place % 64 == 0
            file.seek(place + size)
            assert file.read(4) == b"PK\x07\x08"
    reader = torch._C.PyTorchFileReader(str(path))
    for number, (size, place) in enumerate(zip(sizes, places, strict=True)):
        assert reader.get_record_offset(f"data/{number}") == place
        if hasattr(reader, "get_record_size"):  # below 2.11 torch has no such method
            assert reader.get_record_size(f"data/{number}") == size


def test_more_records_than_sixteen_bits_count(tmp_path: Path) -> None:
    """The directory's wide end is written from 65535 records on."""
    path = tmp_path / "many.pt"
    laid_out([0] * 0xFFFF, path)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 0xFFFF + 5
    assert torch._C.PyTorchFileReader(str(path)).has_record("data/65534")


def test_an_image_is_kept_unless_its_pickle_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one would take memory between saves."""
    images, value = TorchImages("state.pt"), {"weight": torch.ones(3), "text": "x" * 100}
    assert images.compose(value) is images.compose(value)
    monkeypatch.setattr("safepoint.snapshot.images.torch_image._KEPT_BYTES", 99)
    value["text"] = "y" * 100
    first = images.compose(value)
    assert images.compose(value) is not first
    assert images.compose(value) == first
    assert images._image is None
    assert images._pickled == b""
