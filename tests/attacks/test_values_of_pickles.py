"""Pickles that call only what is allowed, with values that are not: nothing crashes, and nothing runs without end."""

import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data, only_data
from safepoint.training.state.rng import capture_rng, restore_rng
from tests.support.pickles import call, name, number, several, text


def _bytes(data: bytes) -> bytes:
    return call(name("_codecs", "encode"), text(data.decode("latin-1")), text("latin1"))


_TYPE = name("numpy", "dtype")


def _type(kind: str) -> bytes:
    return call(_TYPE, text(kind), pickle.NEWFALSE, pickle.NEWTRUE)


def _array(kind: bytes, data: bytes, shape: bytes) -> bytes:
    made = call(
        name("numpy._core.multiarray", "_reconstruct"), name("numpy", "ndarray"), several(number(0)), _bytes(b"b")
    )
    return made + several(number(1), shape, kind, pickle.NEWFALSE, data) + pickle.BUILD


def _state(*, inner: bytes = pickle.NONE, fields: bytes = pickle.NONE, size: int = -1, flags: int = 0) -> bytes:
    """The state of a type."""
    none = pickle.NONE if fields == pickle.NONE else several(text("a"))
    numbers = (number(size), number(-1), number(flags))
    return several(number(3), text("<"), inner, none, fields, *numbers) + pickle.BUILD


def _one_u4(state: bytes) -> bytes:
    return _array(_type("u4") + state, _bytes(b"\0" * 4), several(number(1)))


_FILES = {
    "a type of a billion numbers": _one_u4(_state(inner=several(_type("u4"), several(number(1 << 30))))),
    "a type of a billion bytes": _one_u4(_state(size=1 << 30)),
    "a type of a reference": _one_u4(_state(size=8, flags=63)),
    "references in bytes": _array(_type("O"), _bytes(b"A" * 32), several(number(4))),
    "references in a buffer": name("numpy", "ndarray")
    + several(several(number(4)), _type("O"), _bytes(b"A" * 32))
    + pickle.NEWOBJ,
    "an array without its bytes": _array(_type("u4"), _bytes(b"\0" * 4), several(number(1 << 40))),
    "a terabyte": name("numpy", "ndarray") + several(several(number(1 << 40)), _type("u1")) + pickle.NEWOBJ,
    "a type of fields": _type("u4,O"),
    "a list in itself": pickle.EMPTY_LIST + pickle.BINPUT + b"\1" + pickle.BINGET + b"\1" + pickle.APPEND,
}


def _write(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.PROTO + b"\2" + content + pickle.STOP)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


_USE = """
import sys
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data
for path in sys.argv[1:]:
    try:
        value = load_data(path)
        print(value, value.sum(), flush=True)
    except CheckpointError as error:
        print("refused", flush=True)
"""


def test_arrays_and_types_of_numpy(tmp_path: Path) -> None:
    """In a process of its own, which must not crash. The state of a type of numbers says nothing but their order."""
    paths: list[str] = []
    for place, content in enumerate(_FILES.values()):
        paths.append(str(tmp_path / f"{place}.pt"))
        _write(Path(paths[-1]), content)
    done = subprocess.run([sys.executable, "-c", _USE, *paths], capture_output=True, text=True, check=False)
    said = dict(zip(_FILES, done.stdout.splitlines(), strict=False))
    assert said == {name: "[0] 0" if name.startswith("a type of a") else "refused" for name in _FILES}, done
    assert done.returncode == 0, done


def _shared(levels: int) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": (value,)}])
def test_few_lists_that_stand_for_many_values(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    """An optimizer copies each of them when it loads its state."""
    torch.save(wrap(_shared(60)), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="was not loaded"):
        load_data(tmp_path / "a.pt")
    torch.save(wrap(_shared(10)), tmp_path / "a.pt")
    assert load_data(tmp_path / "a.pt") == wrap(_shared(10))


def test_the_state_of_lightning(tmp_path: Path) -> None:
    """It is read without numpy's arrays, but as deep."""
    pytest.importorskip("lightning")
    from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO

    torch.save({"callbacks": _shared(60)}, tmp_path / "lightning.ckpt")
    with pytest.raises(CheckpointError, match="was not loaded"):
        DirectCheckpointIO().load_checkpoint(tmp_path / "lightning.ckpt")


@pytest.mark.parametrize("position", [1 << 40, 625, -1, 0.5, None])
def test_a_position_outside_of_the_random_numbers(position: Any, tmp_path: Path) -> None:
    """Of Safepoint's own states, and of those that a framework restores."""
    good = capture_rng()
    name, keys, _, *rest = good["numpy"]
    state = {**good, "numpy": (name, keys, position, *rest)}
    with pytest.raises(CheckpointError, match="random number"):
        restore_rng(state)
    with pytest.raises(CheckpointError, match="random number"), only_data(tmp_path):
        np.random.set_state(state["numpy"])
    restore_rng(good)


def test_what_frameworks_save_is_loaded_as_before(tmp_path: Path) -> None:
    """Also where the script, or the Trainer, has allowed numpy's own classes."""
    arrays = [
        np.arange(12).astype(kind).reshape(3, 4) for kind in ("u4", ">u4", "i8", "f4", "f8", "u1", "c8", "bool")
    ]
    arrays += [np.asfortranarray(arrays[0]), np.array(5.0)]
    shared = arrays[0]
    saved = {"numpy": np.random.get_state(), "arrays": arrays, "again": [shared, (shared, 1)], "number": 5}
    torch.save(saved, tmp_path / "a.pt")
    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), type(np.dtype(np.float64))]
    for one in ([], allowed):
        with torch.serialization.safe_globals(one):
            before = set(torch.serialization.get_safe_globals())
            loaded = load_data(tmp_path / "a.pt")
            assert set(torch.serialization.get_safe_globals()) == before
        for old, new in zip(arrays, loaded["arrays"], strict=True):
            assert type(new) is np.ndarray
            assert (new.dtype, new.flags.f_contiguous) == (old.dtype, old.flags.f_contiguous)
            assert np.array_equal(old, new)
            assert new.flags.writeable
        assert loaded["again"][0] is loaded["again"][1][0]
        np.random.set_state(loaded["numpy"])
