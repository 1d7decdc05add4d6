"""A store answers two reads of the same bytes differently, and reports the same version of the object both times.

What is used is what was verified, or the command ends with an error.
"""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.foreign.describe import describe
from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.tools.export import export_pieces
from safepoint.errors import CheckpointError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign


class _Changing(LocalStore):
    """The store of a folder. From its read number `first` on, reads of the file `name` return what `change` makes."""

    def __init__(self, folder: Path, name: str, first: int, change: Callable[[bytes], bytes]) -> None:
        super().__init__(Location.of_folder(folder))
        self._name = name
        self._first = first
        self._change = change
        self.num_reads = 0

    def _answer(self, key: str, start: int, length: int) -> bytes:
        data = (self.location.folder / key).read_bytes()
        if key.endswith(self._name):
            self.num_reads += 1
            if self.num_reads > self._first:
                data = self._change(data)
        return data[start:][:length]

    def read(self, key, *, start=0, length=None, deadline_s=None):
        length = (self.location.folder / key).stat().st_size - start if length is None else length
        return memoryview(self._answer(key, start, length))

    def stream(self, key, sink, *, start, length, deadline_s=None):
        sink(memoryview(self._answer(key, start, length)))


def _saved(value: float) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.full((300, 30), value), "bias": torch.full((40,), value)}, buffer)
    return buffer.getvalue()


def test_an_export(tmp_path: Path) -> None:
    """Whichever of the reads is the first that differs. With digests that are right in between, too."""
    good, bad = _saved(1.0), _saved(2.0)
    assert len(good) == len(bad)
    folder = commit(prepared(tmp_path / "out"), 4, {0: {"model.pt": good}})
    assert read_manifest(folder).files[0].size_bytes == len(good)
    store = _Changing(folder.parent, "model.pt", 1 << 30, lambda data: data)
    export_pieces(store, folder.name, Location.of_folder(tmp_path / "good"))
    num_reads = store.num_reads
    assert num_reads > 2
    for first in range(num_reads):
        target = tmp_path / f"from-{first}"
        store = _Changing(folder.parent, "model.pt", first, lambda data: bad)
        with pytest.raises(CheckpointError, match="changed"):
            export_pieces(store, folder.name, Location.of_folder(target))
        assert not target.exists()
    assert torch.equal(load_file(tmp_path / "good" / "model.safetensors")["weight"], torch.ones(300, 30))


def test_an_export_whose_verification_gets_the_right_bytes(tmp_path: Path) -> None:
    """All reads but that of the verification, which reads the whole file, get others."""
    good, bad = _saved(1.0), _saved(2.0)
    folder = commit(prepared(tmp_path / "out"), 4, {0: {"model.pt": good}})

    class Store(_Changing):
        def stream(self, key, sink, *, start, length, deadline_s=None):
            is_whole = key.endswith("model.pt") and length == len(good)
            if is_whole:
                sink(memoryview(good))
            else:
                super().stream(key, sink, start=start, length=length)

    store = Store(folder.parent, "model.pt", 0, lambda data: bad)
    with pytest.raises(CheckpointError, match="changed"):
        export_pieces(store, folder.name, Location.of_folder(tmp_path / "model"))


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "model.safetensors"])
def test_an_adopted_checkpoint(name: str, tmp_path: Path) -> None:
    """Its manifest names digests of bytes that were examined."""
    write_foreign(tmp_path, 4)
    store = _Changing(tmp_path, name, 1 << 30, lambda data: data)
    describe(store, examine(store, "checkpoint-4", accumulation=1))
    num_reads = store.num_reads
    store = _Changing(tmp_path, name, num_reads - 1, lambda data: bytes(byte ^ 1 for byte in data))
    found = examine(store, "checkpoint-4", accumulation=1)
    assert not found.faults
    with pytest.raises(CheckpointError, match="changed while it was read"):
        describe(store, found)
