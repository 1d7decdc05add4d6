"""Pickles that call allowed functions with arguments that torch never writes, or whose keys take years to hash.

A tensor that is made with a size shows freed memory of the process, and the next checkpoint would contain it.
"""

import collections
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data, only_data
from tests.support.pickles import call, name, number, several, text

_DATA = {"0": b"\1" * 64, "1": struct.pack("<q", 1000)}


def storage(kind: str, key: str, count: int) -> bytes:
    return several(text("storage"), name("torch", kind), text(key), text("cpu"), number(count)) + pickle.BINPERSID


def tensor(kind: str, key: str, count: int, size: int, stride: int) -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    shape = several(number(size)), several(number(stride))
    content = storage(kind, key, count), number(0), *shape, pickle.NEWFALSE, hooks
    return call(name("torch._utils", "_rebuild_tensor_v2"), *content)


def nested(levels: int) -> bytes:
    """A tuple of two equal tuples, and so on: hashing it takes 2 ** levels steps."""
    value = number(1) + pickle.TUPLE1
    for level in range(levels):
        place = bytes([level])
        value += pickle.BINPUT + place + pickle.BINGET + place + pickle.TUPLE2
    return value


_LISTED = pickle.EMPTY_LIST + nested(60) + pickle.APPEND
_PAIRS = pickle.EMPTY_LIST + nested(60) + number(1) + pickle.TUPLE2 + pickle.APPEND
_MANY = (
    pickle.MARK
    + pickle.NONE * 90_000
    + (pickle.TUPLE + pickle.BINPUT + b"\1" + pickle.EMPTY_LIST + pickle.MARK)
    + (pickle.EMPTY_DICT + pickle.BINGET + b"\1" + pickle.NONE + pickle.SETITEM) * 90_000
    + pickle.APPENDS
)
_LARGE = number(20_000)
_COO = call(name("torch.serialization", "_get_layout"), text("torch.sparse_coo"))
_FLOATS = tensor("FloatStorage", "0", 16, 16, 1)
_FILES = {
    "a key": pickle.EMPTY_DICT + nested(60) + number(1) + pickle.SETITEM,
    "keys": pickle.EMPTY_DICT + pickle.MARK + nested(60) + number(1) + pickle.SETITEMS,
    "a long key of many dictionaries": _MANY,
    "an element of a set": call(name("builtins", "set"), _LISTED),
    "an element of a counter": call(name("collections", "Counter"), _LISTED),
    "a key of an ordered dictionary": call(name("collections", "OrderedDict"), _PAIRS),
    "a set of a tensor": call(name("builtins", "set"), tensor("FloatStorage", "0", 16, 1 << 40, 0)),
    "FloatTensor": call(name("torch", "FloatTensor"), _LARGE),
    "Tensor": call(name("torch", "Tensor"), _LARGE),
    "new Tensor": name("torch", "Tensor") + several(_LARGE) + pickle.NEWOBJ,
    "a sparse tensor": call(name("torch.sparse", "FloatTensor"), _LARGE),
    "UntypedStorage": call(name("torch.storage", "UntypedStorage"), _LARGE),
    "TypedStorage": call(name("torch.storage", "TypedStorage"), _LARGE),
    "a parameter of a number": call(name("torch.nn.parameter", "Parameter"), _LARGE),
    "a tensor that a rebuilding function makes": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        *(name("torch", "FloatTensor"), name("torch", "Tensor"), several(_LARGE), pickle.NONE),
    ),
    "the state of a tensor": _FLOATS
    + several(storage("UntypedStorage", "0", 64), number(0), several(_LARGE), several(number(1)))
    + pickle.BUILD,
    "bytes of a number": call(name("builtins", "bytes"), number(3 << 30)),
    "a bytearray of a number": call(name("builtins", "bytearray"), number(3 << 30)),
    "an encoding that takes long": call(name("_codecs", "encode"), text("a"), text("punycode")),
    "an index outside of a sparse tensor": call(
        name("torch._utils", "_rebuild_sparse_tensor"),
        _COO,
        several(
            call(
                name("torch._utils", "_rebuild_tensor_v2"),
                *(storage("LongStorage", "1", 1), number(0), several(number(1), number(1))),
                *(several(number(1), number(1)), pickle.NEWFALSE, call(name("collections", "OrderedDict"))),
            ),
            tensor("FloatStorage", "0", 16, 1, 1),
            several(number(4)),
            pickle.NEWFALSE,
        ),
    ),
    "a tensor larger than the file": tensor("FloatStorage", "0", 16, 1 << 30, 0),
    "an unknown instruction": b"\x8b" + struct.pack("<i", 1 << 30),
}


def write(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.PROTO + b"\2" + content + pickle.STOP)
        archive.writestr("archive/byteorder", "little")
        for key, data in _DATA.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    return path


_LOAD = """
import sys
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data
for path in sys.argv[1:]:
    try:
        load_data(path)
        print("loaded", flush=True)
    except CheckpointError:
        print("refused", flush=True)
"""


def test_files_of_torch_save(tmp_path: Path) -> None:
    """In a process of its own: some would take years, or gigabytes."""
    paths = [str(write(tmp_path / f"{place}.pt", content)) for place, content in enumerate(_FILES.values())]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *paths], capture_output=True, text=True, check=True, timeout=300
    )
    assert dict(zip(_FILES, done.stdout.split(), strict=True)) == dict.fromkeys(_FILES, "refused")


def test_the_older_format(tmp_path: Path) -> None:
    """Its tensors state sizes of their own, and the file need not contain their bytes."""
    path = tmp_path / "old.pt"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError):
        load_data(path)
    with pytest.raises(CheckpointError):
        load_data(io.BytesIO(path.read_bytes()))


def everything() -> dict[str, Any]:
    tied = torch.arange(6.0)
    attributed = torch.ones(2)
    attributed.tag = "x"  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "set": {1, "a", (2, 3)},
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict([(("a", 1), 2), ("b", 3)]),
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "bytearray": bytearray(b"ab"),
        "complex": 1 + 2j,
        "large": 1 << 200,
        "float": 0.5,
        "none": None,
        "types": [torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "small": torch.ones(3, dtype=torch.float8_e4m3fn),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "tied": [tied, tied[2:], tied.view(2, 3).T],
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "attributed": attributed,
        "expanded": torch.zeros(1).expand(1000),
        "meta": torch.empty(1 << 40, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "array": np.arange(3),
        "nested": [(1, (2, [3])), {}, [], (), True],
        "many": {(one, "a"): one for one in range(20_000)},
        "hashes": {(1 << 64) - 1: 1, 1 << 127: 2},
        "tokens": {tuple(range(5000)): 1},
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_torch_saves_is_loaded(tmp_path: Path) -> None:
    """All kinds of values that a state may have."""
    torch.save(everything(), tmp_path / "all.pt")
    found = load_data(tmp_path / "all.pt")
    for key, value in everything().items():
        same = found[key]
        if isinstance(value, torch.Tensor) and not value.is_meta:
            assert torch.equal(same.to_dense().dequantize(), value.to_dense().dequantize()), key
        elif isinstance(value, torch.Tensor):
            assert same.shape == value.shape
        elif key == "tied":
            assert same[1].data_ptr() == same[0].data_ptr() + 8
        elif key == "array":
            assert (same == value).all()
        else:
            assert same == value, key
    assert found["attributed"].tag == "x"


def test_a_large_mask_beside_a_model(tmp_path: Path) -> None:
    """An expanded tensor is refused for its size only if the file stores little."""
    mask = torch.zeros(1, 1 << 20).expand(40, 1 << 20)
    torch.save({"model": torch.zeros(5 << 20), "mask": mask}, tmp_path / "a.pt")
    assert load_data(tmp_path / "a.pt")["mask"].stride() == (0, 1)
    torch.save({"mask": mask}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError):
        load_data(tmp_path / "b.pt")


def _metadata(content: bytes) -> bytes:
    return pickle.PROTO + b"\2" + content + pickle.STOP


_DCP = "torch.distributed.checkpoint.metadata"
_INDEX = (
    name(_DCP, "MetadataIndex")
    + pickle.EMPTY_TUPLE
    + pickle.NEWOBJ
    + (pickle.EMPTY_DICT + pickle.MARK + text("fqn") + text("a") + text("offset") + nested(60) + text("index"))
    + (pickle.NONE + pickle.SETITEMS + pickle.BUILD)
)
_ATTRIBUTE = pickle.EMPTY_DICT + text("__getstate__") + number(1) + pickle.SETITEM
_METADATA = {
    "an index of the memo": number(1) + pickle.LONG_BINPUT + struct.pack("<I", 1 << 31),
    "a key": pickle.EMPTY_DICT + nested(60) + number(1) + pickle.SETITEM,
    "the offset of a key": pickle.EMPTY_DICT + _INDEX + number(1) + pickle.SETITEM,
    "an attribute of a class": name(_DCP, "Metadata") + several(pickle.NONE, _ATTRIBUTE) + pickle.BUILD,
    "an attribute of a function": name("torch.serialization", "_get_layout") + _ATTRIBUTE + pickle.BUILD,
    "an attribute of an instance": name(_DCP, "Metadata")
    + pickle.EMPTY_TUPLE
    + pickle.NEWOBJ
    + _ATTRIBUTE
    + pickle.BUILD,
    "a bytearray": b"\x96" + struct.pack("<Q", 1 << 40),
}
_READ = """
import sys
from torch.distributed.checkpoint import FileSystemReader
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import only_data
for path in sys.argv[1:]:
    try:
        with only_data(path):
            FileSystemReader(path).read_metadata()
        print("loaded", flush=True)
    except CheckpointError:
        print("refused", flush=True)
    except Exception:
        print("failed", flush=True)
"""


def test_metadata_of_dcp(tmp_path: Path) -> None:
    """The same for `.metadata`: and no pickle changes torch's own classes and functions."""
    paths: list[str] = []
    for place, content in enumerate(_METADATA.values()):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / ".metadata").write_bytes(_metadata(content))
        paths.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", _READ, *paths], capture_output=True, text=True, check=True, timeout=300
    )
    said = dict(zip(_METADATA, done.stdout.split(), strict=True))
    assert said.pop("an index of the memo") in {"refused", "failed"}  # a number is no metadata: DCP fails
    assert said == dict.fromkeys(said, "refused")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_saves_is_loaded(tmp_path: Path) -> None:
    """Tensors of several types, plain values and nested containers."""
    state = {"a": {"b": torch.arange(6.0), "c": [torch.ones(2, dtype=torch.bfloat16), 5]}, "n": 3}
    save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found: dict[str, Any] = {"a": {"b": torch.zeros(6), "c": [torch.zeros(2, dtype=torch.bfloat16), 0]}, "n": 0}
    with only_data(tmp_path / "c"):
        load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(found["a"]["b"], state["a"]["b"])
    assert (found["a"]["c"][1], found["n"]) == (5, 3)
