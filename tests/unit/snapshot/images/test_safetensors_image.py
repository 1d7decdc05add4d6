"""Images of safetensors files: byte for byte what the library writes, or none where the library has to decide."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from safepoint.checkpoint.format.safetensors_layout import KINDS
from safepoint.snapshot.images.safetensors_image import compose_safetensors
from tests.support.snapshots import bytes_of, render

DTYPES = [getattr(torch, name) for name in KINDS]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(["b.w", "a.w", "ä", '"\\\n'])


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.arange(count).reshape(shape).to(dtype)
    return (torch.arange(count) % 2).reshape(shape).to(dtype)


def check(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, folder: Path) -> None:
    image = compose_safetensors("model.safetensors", tensors, metadata)
    assert image is not None
    save_file(tensors, folder / "theirs.safetensors", metadata=metadata)
    assert render(image) == (folder / "theirs.safetensors").read_bytes()


@settings(max_examples=150, deadline=None)
@given(
    data=st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, min_size=1, max_size=1),
)
def test_the_bytes_are_the_library_s(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    """Any types in any order, any shape, any name; one pair of metadata, as the library shuffles several."""
    tensors = {name: made(dtype, shape) for name, (dtype, shape) in data.items() if name != "__metadata__"}
    check(tensors, metadata, tmp_path_factory.getbasetemp())


def test_every_type_at_once(tmp_path: Path) -> None:
    """The library sorts by its own list of types, then by name."""
    check({f"{place}.{dtype}": made(dtype, (3,)) for place in "ba" for dtype in DTYPES}, {"format": "pt"}, tmp_path)


def test_several_pairs_of_metadata_are_all_there(tmp_path: Path) -> None:
    """In whatever order."""
    metadata = {f"key {number}": str(number) for number in range(20)}
    image = compose_safetensors("model.safetensors", {"one": torch.ones(3)}, metadata)
    assert image is not None
    path = tmp_path / "ours.safetensors"
    path.write_bytes(render(image))
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("one"), torch.ones(3))


def test_parts_of_one_storage_that_do_not_overlap(tmp_path: Path) -> None:
    """Contiguous slices and parameters are written as they are, from their place in the storage."""
    whole = torch.arange(12.0)
    tensors = {"low": whole[:5], "high": whole[5:], "parameter": torch.nn.Parameter(torch.ones(2, 2))}
    check(tensors, None, tmp_path)
    loaded = load_file(tmp_path / "theirs.safetensors")
    assert bytes_of(loaded["high"]) == bytes_of(whole[5:])


WHOLE = torch.arange(12.0)
REFUSED = {
    "not contiguous": {"turned": torch.ones(2, 3).t()},
    "the same twice": {"one": WHOLE, "other": WHOLE},
    "two views of it": {"one": WHOLE, "other": WHOLE.reshape(3, 4)},
    "overlapping": {"low": WHOLE[:8], "high": WHOLE[4:]},
    "one within another": {"whole": WHOLE, "part": WHOLE[2:4]},
    "sparse": {"sparse": torch.eye(3).to_sparse()},
    "on no device": {"meta": torch.ones(3, device="meta")},
    "no tensor": {"text": "text"},
    "not text": {"\ud800": torch.ones(3)},
}


@pytest.mark.parametrize("tensors", REFUSED.values(), ids=REFUSED)
def test_what_the_library_refuses_is_left_to_it(tensors: dict[str, Any], tmp_path: Path) -> None:
    """No image, so that the library says what is wrong in its own words."""
    with pytest.raises(Exception, match=r"."):
        save_file(tensors, tmp_path / "refused.safetensors")
    assert compose_safetensors("model.safetensors", tensors, None) is None


def test_types_that_are_not_known_are_left_to_the_library() -> None:
    """It may know them."""
    for dtype in (torch.complex128, torch.float8_e4m3fnuz):
        assert compose_safetensors("m", {"one": torch.ones(2).to(dtype)}, None) is None
    assert compose_safetensors("m", {"one": torch.ones(2)}, {"number": 1}) is None  # type: ignore[dict-item]
    assert compose_safetensors("m", {"__metadata__": torch.ones(2)}, None) is None
    assert compose_safetensors("m", {"conj": torch.ones(2, dtype=torch.complex64).conj()}, None) is None
