"""Pickles with which torch computes for long, or fills the memory, before the loaded value can be checked.

A tensor of some bytes may state any number of elements. A function that copies or compares them never ends.
"""

import pickle
import re
import struct
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data
from tests.attacks.test_calls_of_pickles import storage, tensor, write
from tests.support.pickles import call, name, number, several, text

_MANY = 1 << 26
_LAYOUT = name("torch.serialization", "_get_layout")
_FLOATS = tensor("FloatStorage", "0", 16, _MANY, 0)
_NO_HOOKS = call(name("collections", "OrderedDict"))


def _indices(count: int, stride: int) -> bytes:
    shape = several(number(1), number(count)), several(number(1), number(stride))
    content = storage("LongStorage", "0", 8), number(0), *shape, pickle.NEWFALSE, _NO_HOOKS
    return call(name("torch._utils", "_rebuild_tensor_v2"), *content)


def _sparse(layout: str, *data: bytes) -> bytes:
    of_layout = call(_LAYOUT, text(layout))
    return call(name("torch._utils", "_rebuild_sparse_tensor"), of_layout, several(*data, pickle.NEWFALSE))


_SIZE = several(number(0x0101010101010102))
_LIST = pickle.EMPTY_LIST + number(0) + pickle.APPEND
_FILES = {
    "expanded indices": _sparse("torch.sparse_coo", _indices(_MANY, 0), _FLOATS, _SIZE),
    "indices in a list": _sparse("torch.sparse_coo", pickle.EMPTY_LIST + _LIST + pickle.APPEND, _LIST, _SIZE),
    "indices in tuples": _sparse("torch.sparse_coo", several(several(number(0))), _LIST, _SIZE),
    "a copy of another type": call(
        name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        *(_FLOATS, name("torch", "float64"), text("cpu"), pickle.NEWFALSE),
    ),
    "an encoding that takes long": call(name("builtins", "bytearray"), text("a"), text("punycode")),
    "a shape of a tensor": call(name("torch", "Size"), tensor("LongStorage", "0", 8, 2, 1)),
}


@pytest.mark.parametrize("content", _FILES.values(), ids=_FILES)
def test_it_is_refused(content: bytes, tmp_path: Path) -> None:
    """The attacks have small numbers here. With larger numbers they would take days, or all memory."""
    with pytest.raises(CheckpointError):
        load_data(write(tmp_path / "state.pt", content))


def test_many_tensors_of_one_storage(tmp_path: Path) -> None:
    """Each is small, and all together are much larger than the file."""
    part = tensor("FloatStorage", "0", 16, 1 << 21, 0)
    one = call(
        name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        *(part, name("torch", "float16"), text("cpu"), pickle.NEWFALSE),
    )
    write(tmp_path / "one.pt", one)
    assert load_data(tmp_path / "one.pt").numel() == 1 << 21
    with pytest.raises(CheckpointError):
        load_data(write(tmp_path / "many.pt", several(*[one] * 10)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of sparse, nested and quantized tensors
def test_what_torch_saves(tmp_path: Path) -> None:
    """Sparse, nested and quantized tensors of usual sizes, and bytes."""
    dense = torch.eye(2000)
    saved = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "nested": torch.nested.nested_tensor([torch.ones(3), torch.zeros(5)]),
        "quantized": torch.quantize_per_channel(torch.ones(4, 3), torch.ones(4), torch.zeros(4), 0, torch.qint8),
        "bytes": bytearray(b"a\xff"),
        "none": bytearray(),
        "size": torch.Size([2, 3]),
    }
    torch.save(saved, tmp_path / "state.pt")
    found = load_data(tmp_path / "state.pt")
    for layout in ("coo", "csr", "csc", "bsr"):
        assert torch.equal(found[layout].to_dense(), dense)
    assert found["quantized"].dequantize().sum() == 12
    assert [one.tolist() for one in found["nested"].unbind()] == [[1.0] * 3, [0.0] * 5]
    assert [found[name] for name in ("bytes", "none", "size")] == [saved[name] for name in ("bytes", "none", "size")]


_OUTSIDE = {
    "a storage larger than its record": storage("FloatStorage", "0", 17),
    "a storage of bytes larger than its record": several(
        *(text("storage"), name("torch.storage", "UntypedStorage"), text("0"), text("cpu"), number(65))
    )
    + pickle.BINPERSID,
    "an item of a tensor": tensor("FloatStorage", "0", 16, 16, 1) + number(3) + number(7) + pickle.SETITEM,
    "items of a tensor": tensor("FloatStorage", "0", 16, 16, 1)
    + (pickle.MARK + number(3) + number(7) + pickle.SETITEMS),
    "an item of a storage": storage("FloatStorage", "0", 16) + number(3) + number(7) + pickle.SETITEM,
}


@pytest.mark.parametrize("content", _OUTSIDE.values(), ids=_OUTSIDE)
def test_memory_behind_a_storage(content: bytes, tmp_path: Path) -> None:
    """torch before 2.10 reads and writes it. Later releases refuse the file, but not before the storage is made."""
    with pytest.raises(CheckpointError) as caught:
        load_data(write(tmp_path / "state.pt", content))
    assert re.search("a storage is larger than its record|the pickle sets an item", str(caught.value.__cause__))


def test_a_quantized_tensor_without_a_scale(tmp_path: Path) -> None:
    """torch loads it, and cannot save it again."""
    content = call(
        name("torch._utils", "_rebuild_tensor_v3"),
        *(storage("FloatStorage", "0", 16), number(0), several(number(16)), several(number(1))),
        *(pickle.NEWFALSE, _NO_HOOKS, name("torch", "qint8")),
    )
    with pytest.raises(CheckpointError):
        load_data(write(tmp_path / "state.pt", content))


_WITHOUT_CONTENT = [name("builtins", "set"), name("collections", "Counter")]


@pytest.mark.parametrize("method", ["keys", "items"])
@pytest.mark.parametrize("value", _WITHOUT_CONTENT)
@pytest.mark.parametrize("kind", ["OrderedDict", "Counter"])
def test_a_dictionary_that_hides_its_content(kind: str, value: bytes, method: str, tmp_path: Path) -> None:
    """If an attribute of it hides a method, no check sees the content, but `state[name]` does."""
    hidden = tensor("FloatStorage", "0", 16, 1 << 40, 0)
    attribute = pickle.EMPTY_DICT + text(method) + value + pickle.SETITEM
    state = call(name("collections", kind)) + text("a") + hidden + pickle.SETITEM + attribute + pickle.BUILD
    with pytest.raises(CheckpointError):
        load_data(write(tmp_path / "state.pt", state))


def test_a_state_of_a_generator_as_a_nested_tensor(tmp_path: Path) -> None:
    """torch accepts it as a state, and would read numbers behind the state."""
    state = bytearray(torch.get_rng_state().numpy().tobytes())
    state[8:24] = struct.pack("<iiQ", 600, 1, 600)
    buffer = torch.frombuffer(state, dtype=torch.uint8)
    one = torch.tensor([[1]])
    view: Any = cast("Any", torch)._nested_view_from_buffer
    nested = view(buffer, torch.tensor([[len(state)]]), one, torch.tensor([0]))
    torch.save(nested, tmp_path / "state.pt")
    with pytest.raises(CheckpointError):
        load_data(tmp_path / "state.pt")
