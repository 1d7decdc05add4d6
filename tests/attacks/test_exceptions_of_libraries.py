"""A file of a checkpoint makes a library raise an exception that it does not document.

It is a fault of this one checkpoint: the others are examined, adopted and resumed from.
"""

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from safepoint.checkpoint.foreign import examine as examination
from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.tools.adopt import adopt
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.weights.torch_file import read_torch_file
from safepoint.errors import CheckpointError, StorageError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.collective.peers import Peers
from safepoint.training.start import foreign
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import prepared
from tests.support.foreign import write_foreign

_FLAGS = {"encrypted": 1, "patched": 0x20, "strongly encrypted": 0x40}


def with_flag(path: Path, flag: int) -> Path:
    """Set a flag of every record of an archive that `torch.save` writes."""
    torch.save({"a": torch.zeros(3)}, path)
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        found = data.find(signature)
        while found >= 0:
            data[found + offset : found + offset + 2] = struct.pack("<H", flag)
            found = data.find(signature, found + 4)
    path.write_bytes(data)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Two checkpoints of a plain Trainer, of steps 4 and 8."""
    for step in (4, 8):
        torch.save({}, write_foreign(tmp_path / "out", step) / "training_args.bin")
    return prepared(tmp_path / "out").root


def start(output: Path) -> tuple[int, list[Event]]:
    folder, events = prepared(output), list[Event]()
    peers, settings = Peers(Place(), timeout_s=1), RunSettings()
    first = FirstStart(peers, folder, None, settings)
    point = CheckpointChooser(
        peers, folder, Folders(), None, settings, first, events.append, reads_foreign=True
    ).choose()
    assert point is not None
    return point.manifest.step, [event for event in events if isinstance(event, CheckpointRejected)]


def adopted(output: Path) -> dict[str, bool]:
    """The name of each checkpoint → whether it was adopted."""
    inventory = Inventory(open_store(Location.of_folder(output)))
    found = adopt(inventory, inventory.items(), accumulation=1, dry_run=False, progress=lambda *_: None)
    return {one.item.name: not one.faults for one in found}


@pytest.mark.parametrize("flag", _FLAGS)
@pytest.mark.parametrize("file", ["training_args.bin", "optimizer.pt"])
def test_flags_of_an_archive(file: str, flag: str, output: Path) -> None:
    """An encrypted record makes zipfile ask for a password with a RuntimeError."""
    with pytest.raises(CheckpointError):
        read_torch_file(with_flag(output / "checkpoint-8" / file, _FLAGS[flag]))
    examine(open_store(Location.of_folder(output)), "checkpoint-8")
    is_usable = file == "training_args.bin"  # no Trainer loads this file
    step, rejected = start(output)
    assert (step, len(rejected)) == ((8, 0) if is_usable else (4, 1))
    assert adopted(output) == {"checkpoint-4": True, "checkpoint-8": is_usable}


_RAISED = [RuntimeError("x"), AssertionError("x"), RecursionError("x"), struct.error("x"), AttributeError("x")]


@pytest.mark.parametrize("error", _RAISED, ids=lambda error: type(error).__name__)
def test_whatever_zipfile_raises(error: Exception, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of reading stay what they are: the file may be good."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    path = output / "checkpoint-8" / "optimizer.pt"
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        read_torch_file(path)
    for kept in (OSError(5, "I/O error"), MemoryError(), StorageError("x")):
        error = kept
        with pytest.raises(type(kept)):
            read_torch_file(path)


def _hits(name: str, error: Exception) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Raise `error` in a function when it is called for the checkpoint `name`."""

    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if any(name == one or name == getattr(one, "name", None) for one in arguments):
                raise error
            return original(*arguments, **options)

        return call

    return wrap


@pytest.mark.parametrize("error", [*_RAISED, MemoryError()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("function", ["examine", "describe"])
def test_what_nothing_has_foreseen(
    function: str, error: Exception, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers treat any exception as a fault, and say which it was."""
    from safepoint.checkpoint.tools import adopt as adoption

    wrap = _hits("checkpoint-8", error)
    for module in (foreign, adoption):
        monkeypatch.setattr(module, function, wrap(getattr(module, function)))
    step, rejected = start(output)
    assert step == 4
    assert type(error).__name__ in rejected[0].line  # type: ignore[attr-defined]
    assert adopted(output) == {"checkpoint-4": True, "checkpoint-8": False}


@pytest.mark.parametrize("method", ["_check_names", "_read_arguments", "_check_strategy", "_facts", "_check_file"])
def test_an_exception_anywhere_in_an_examination(method: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` reports a fault too."""

    def broken(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(examination._Examiner, method, broken)
    inventory = Inventory(open_store(Location.of_folder(output)))
    for item in inventory.items():
        assert any("unforeseen" in fault.reason for fault in inventory.verify(item))
