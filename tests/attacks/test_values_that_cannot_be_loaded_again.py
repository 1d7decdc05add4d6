"""Values that a training keeps from a checkpoint, and with which its own next checkpoints cannot be loaded.

The training would go on as if nothing had happened, and all its steps would be lost when it is interrupted.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.errors import CheckpointError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import load_data
from tests.attacks.test_calls_of_pickles import storage, write
from tests.support.checkpoints import reseal
from tests.support.jobs import TINY, no_orphans, safepoint
from tests.support.pickles import call, name, number, several, text

_HOOKS = call(name("collections", "OrderedDict"))
_SHAPE = several(number(16)), several(number(1))
_TENSOR = call(
    name("torch._utils", "_rebuild_tensor_v2"),
    *(storage("FloatStorage", "0", 16), number(0), *_SHAPE, pickle.NEWFALSE, _HOOKS),
)
_DTYPE = call(name("numpy", "dtype"), text("f8"), pickle.NEWFALSE, pickle.NEWTRUE)
_FUNCTION = name("numpy._core.multiarray", "_reconstruct")


def _with_attribute(attribute: str, value: bytes) -> bytes:
    state = pickle.EMPTY_DICT + text(attribute) + value + pickle.SETITEM
    return call(name("torch._utils", "_rebuild_parameter_with_state"), _TENSOR, pickle.NEWTRUE, _HOOKS, state)


_LIST = pickle.EMPTY_LIST + several(number(1), name("torch._utils", "_rebuild_nested_tensor")) + pickle.APPEND
_REFUSED = {
    "a function of numpy": _FUNCTION,
    "in a list": pickle.EMPTY_LIST + _FUNCTION + pickle.APPEND,
    "in a tuple in a list": pickle.EMPTY_LIST + _FUNCTION + pickle.TUPLE1 + pickle.APPEND,
    "the class of an array": name("numpy", "ndarray"),
    "a type of storages": name("torch", "FloatStorage"),
    "an array without a state": call(_FUNCTION, number(1), several(number(0)), text("b")),
    "a key": pickle.EMPTY_DICT + _DTYPE + number(1) + pickle.SETITEM,
    "a function as a key": pickle.EMPTY_DICT + _FUNCTION + number(1) + pickle.SETITEM,
    "a part of a key": pickle.EMPTY_DICT + _DTYPE + pickle.TUPLE1 + number(1) + pickle.SETITEM,
    "an element of a set": call(name("builtins", "set"), pickle.EMPTY_LIST + _FUNCTION + pickle.APPEND),
    "an attribute of a tensor": _with_attribute("tag", _FUNCTION),
    "in an attribute of a tensor": _with_attribute("tag", pickle.EMPTY_LIST + _FUNCTION + pickle.APPEND),
    "an attribute of a dictionary": _HOOKS
    + (pickle.EMPTY_DICT + text("tag") + _FUNCTION + pickle.SETITEM)
    + pickle.BUILD,
    "a method of a tensor": _with_attribute("__reduce_ex__", name("collections", "OrderedDict")),
    "another method": _with_attribute("untyped_storage", name("torch.storage", "UntypedStorage")),
    "functions for gradients": call(
        name("torch._utils", "_rebuild_tensor_v2"),
        *(storage("FloatStorage", "0", 16), number(0), *_SHAPE, pickle.NEWTRUE),
        call(name("collections", "OrderedDict"), _LIST),
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_values(what: str, tmp_path: Path) -> None:
    content = pickle.EMPTY_DICT + text("value") + _REFUSED[what] + pickle.SETITEM
    with pytest.raises(CheckpointError, match=r"a\.pt was not loaded"):
        load_data(write(tmp_path / "a.pt", content))


@pytest.mark.parametrize("place", ["value", "list", "attribute of a tensor", "attribute of a dictionary"])
def test_types_of_numpy(place: str, tmp_path: Path) -> None:
    """They may be anywhere in the state of a script, and a stand-in must not stay in their place."""
    content = {
        "value": _DTYPE,
        "list": pickle.EMPTY_LIST + _DTYPE + pickle.APPEND,
        "attribute of a tensor": _with_attribute("tag", _DTYPE),
        "attribute of a dictionary": _HOOKS
        + (pickle.EMPTY_DICT + text("tag") + _DTYPE + pickle.SETITEM)
        + pickle.BUILD,
    }[place]
    loaded = load_data(write(tmp_path / "a.pt", content))
    found: Any = loaded[0] if isinstance(loaded, list) else getattr(loaded, "tag", loaded)
    assert found == np.dtype("f8")
    torch.save(loaded, tmp_path / "b.pt")
    load_data(tmp_path / "b.pt")


def test_what_scripts_save_is_loaded_as_before(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    tensor.tag = {"a": np.arange(3), "b": torch.zeros(1)}  # pyright: ignore[reportAttributeAccessIssue]
    saved = {
        "tensor": tensor, "parameter": torch.nn.Parameter(torch.ones(2)), "set": {1, "a"}, "bytes": bytearray(b"a"),
        "types": [np.dtype("float32"), torch.float16, torch.device("cpu"), torch.Size([1])],
        (1, ("a",)): complex(1, 2),
        "array": np.arange(6.0).reshape(2, 3), "scalar": np.float64(2.5), "storage": torch.ones(2).untyped_storage(),
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt")
    found = load_data(tmp_path / "a.pt")
    torch.save(found, tmp_path / "b.pt")
    for one in (found, load_data(tmp_path / "b.pt")):
        assert one["types"] == saved["types"]
        assert (one["set"], one["bytes"], one[1, ("a",)]) == (saved["set"], saved["bytes"], saved[1, ("a",)])
        assert np.array_equal(one["tensor"].tag["a"], np.arange(3))
        assert one["storage"].nbytes() == 8


def test_a_scheduler(tmp_path: Path) -> None:
    """torch keeps a name that it does not know, and saves it again."""

    def make() -> Any:
        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]), 3)

    scheduler, place = make(), Place.from_environment({})
    torch.save({**make().state_dict(), "junk": np.dtype("f8")}, tmp_path / "scheduler.pt")
    NamedParts({"scheduler": scheduler}, place).load(tmp_path)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    NamedParts({"scheduler": make()}, place).load(tmp_path)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("both_ways")
def test_a_run(tmp_path: Path) -> None:
    """It resumes from what it has saved after a resume from such a checkpoint."""
    output = tmp_path / "run"
    for steps in (2, 4, 6):
        words = [str(TINY), "--out", str(output), "--samples", "64", "--max-steps", str(steps)]
        job = safepoint(output, "--max-restarts", "0", "--save-strategy", "steps", "--save-steps", "2", program=words)
        with no_orphans(job):
            assert job.wait() == ExitCode.OK, job.text
        if steps == 2:
            path = output / "checkpoint-2" / "scheduler.pt"
            torch.save({**torch.load(path, weights_only=False), "junk": np.dtype("f8")}, path)
            reseal(path.parent)
