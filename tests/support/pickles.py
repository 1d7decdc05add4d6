"""Pickles written by hand, and calls that are added to the pickles of a checkpoint.

Everything that loads such a checkpoint without a restriction makes the call.
"""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


def name(module: str, qualified: str) -> bytes:
    """A function or a class."""
    return pickle.GLOBAL + f"{module}\n{qualified}\n".encode()


def text(value: str) -> bytes:
    """A string."""
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    """An integer."""
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def several(*items: bytes) -> bytes:
    """A tuple."""
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def call(function: bytes, *arguments: bytes) -> bytes:
    """The result of a call."""
    return function + several(*arguments) + pickle.REDUCE


class Call:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


def add_call(file: Path, folder: Path) -> None:
    """Let loading `file` make `folder`.

    Args:
        file: of `torch.save`, or DCP's `.metadata`; one that does not exist is made.
        folder: which does not exist.
    """
    if not file.exists():
        torch.save({"called": Call(folder)}, file)
        return
    call = pickle.GLOBAL + b"os\nmkdir\n" + pickle.BINUNICODE
    call += len(str(folder)).to_bytes(4, "little") + str(folder).encode() + pickle.TUPLE1 + pickle.REDUCE
    if file.name == ".metadata":
        content = file.read_bytes()
        # After the frame's length, which may be that of one frame only: the rest is read without it.
        body = content[11:] if content[2:3] == pickle.FRAME else content[2:]
        file.write_bytes(content[:2] + call + body)
        return
    written = io.BytesIO()
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as after:
        for info in before.infolist():
            content = before.read(info)
            is_pickle = info.filename.endswith("/data.pkl")
            after.writestr(info.filename, content[:2] + call + content[2:] if is_pickle else content)
    file.write_bytes(written.getvalue())


def add_call_to_values(dcp_folder: Path, folder: Path) -> None:
    """Let loading a value of DCP that is no tensor make `folder`."""
    metadata = pickle.loads((dcp_folder / ".metadata").read_bytes())
    values = {name for name, one in metadata.state_dict_metadata.items() if isinstance(one, BytesStorageMetadata)}
    for index, place in metadata.storage_data.items():
        if index.fqn in values:
            content = io.BytesIO()
            torch.save(Call(folder), content)
            file = dcp_folder / place.relative_path
            begin, length = file.stat().st_size, len(content.getvalue())
            file.write_bytes(file.read_bytes() + content.getvalue())
            metadata.storage_data[index] = _StorageInfo(place.relative_path, begin, length)
    (dcp_folder / ".metadata").write_bytes(pickle.dumps(metadata))


__all__ = ["Call", "add_call", "add_call_to_values", "call", "name", "number", "several", "text"]
