"""Files of a stranger name more than the memory holds: `export` and `diff` refuse them at once.

Each attack runs in a process of its own, with little memory and time.
"""

import io
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from safepoint.checkpoint.tools.difference import compare
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import CheckpointError
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from tests.support.checkpoints import commit, prepared

_LIMIT_S = 60
_ADDRESS_SPACE = 3 << 30


def _refused(code: str, path: Path) -> str:
    """The error with which `code` ends."""
    program = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({_ADDRESS_SPACE}, {_ADDRESS_SPACE}))\n"
    program += textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


_READ = """
    import sys
    from pathlib import Path
    from safepoint.checkpoint.weights.torch_file import read_torch_file
    read_torch_file(Path(sys.argv[1]))
"""


def _archive(path: Path, pickled: bytes) -> Path:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"1234")
    path.write_bytes(content.getvalue())
    return path


def test_a_list_that_becomes_many_shapes(tmp_path: Path) -> None:
    """A million elements in one megabyte, and 2000 copies in eight kilobytes."""
    many = b"]q\x01(" + b"N" * 1_000_000 + b"e0"
    pickled = b"\x80\x02ctorch\nSize\nq\x00" + many + b"h\x00h\x01\x85R" * 2000 + b"N."
    assert "CheckpointError: a shape or an offset has invalid numbers, or too many of them" in _refused(
        _READ, _archive(tmp_path / "x.pt", pickled)
    )


def test_empty_sets(tmp_path: Path) -> None:
    """Each takes one byte of the file and 216 of memory."""
    pickled = b"\x80\x04" + pickle.EMPTY_SET * 20_000_000 + b"N."
    assert "CheckpointError: a pickle has more than" in _refused(_READ, _archive(tmp_path / "x.pt", pickled))


def test_a_sparse_archive(tmp_path: Path) -> None:
    """A file without content, of two terabytes, whose directory has four gigabytes."""
    path = tmp_path / "x.pt"
    size_bytes, directory_bytes = 2 << 40, 4 << 30
    end = size_bytes - 98
    with path.open("wb") as file:
        file.truncate(size_bytes)
        file.seek(end)
        begin = end - directory_bytes
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, directory_bytes, begin))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    try:
        assert "it has a record of more than" in _refused(_READ, path)
    finally:
        os.unlink(path)


def test_one_part_listed_again_and_again(tmp_path: Path) -> None:
    """A part of a million rows, which is in the metadata sixty times."""
    rows, count = 1 << 20, 60
    torch.save(torch.zeros(rows, 2)[:, :1], tmp_path / "0.distcp")
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 1]))
    index = MetadataIndex("model.w", torch.Size([0, 0]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([rows, 1]), [chunk] * count)
    place = _StorageInfo("0.distcp", 0, (tmp_path / "0.distcp").stat().st_size)
    metadata = Metadata(state_dict_metadata={"model.w": tensor}, storage_data={index: place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    code = """
        import sys
        from pathlib import Path
        from safepoint.checkpoint.weights.dcp_weights import dcp_weights
        dcp_weights(Path(sys.argv[1]))
    """
    assert "CheckpointError: the parts of model.w do not make the whole tensor" in _refused(code, tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        '{"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": [1], "data_offsets": [0.5, 3.5]}',
        '{"dtype": "F32", "shape": [1], "data_offsets": [true, 4]}',
        '{"dtype": {}, "shape": [1], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        '"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}, '
        '"c": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}',
    ],
)
def test_headers_of_safetensors(tensor: str, tmp_path: Path) -> None:
    """Values of other types, and tensors that lie one over the other, so that little is read for ever."""
    output = prepared(tmp_path)
    for step, text in ((10, tensor), (20, '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}')):
        header = f'{{"a": {text}}}'.encode()
        content = len(header).to_bytes(8, "little") + header + bytes([step]) * 1000
        commit(output, step, {0: {"model.safetensors": content}})
    inventory = Inventory(open_store(Location.of_folder(tmp_path)))
    before, after = inventory.item("checkpoint-10"), inventory.item("checkpoint-20")
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        compare((inventory, before), (inventory, after), deep=True)
