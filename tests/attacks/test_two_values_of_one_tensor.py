"""Files from which torch loads other values than those that lie in their bytes: an export would write the others."""

import pickle
from pathlib import Path

import pytest
import torch

from safepoint.checkpoint.weights.state_dict_weights import state_dict_weights
from safepoint.checkpoint.weights.torch_file import StoredTensor, read_torch_file
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data
from tests.attacks.test_calls_of_pickles import storage, tensor, write
from tests.support.pickles import call, name, number, several, text

_HOOKS = call(name("collections", "OrderedDict"))
_SHAPE = number(0), several(number(16)), several(number(1)), pickle.NEWFALSE, _HOOKS
_UNTYPED = (
    several(text("storage"), name("torch.storage", "UntypedStorage"), text("0"), text("cpu"), number(64))
    + pickle.BINPERSID
)
_NEGATED = pickle.EMPTY_DICT + text("neg") + pickle.NEWTRUE + pickle.SETITEM
_OTHER = tensor("FloatStorage", "0", 16, 8, 1)
_DATA = pickle.EMPTY_DICT + text("data") + _OTHER + pickle.SETITEM
_FILES = {
    "negated": call(name("torch._utils", "_rebuild_tensor_v2"), storage("FloatStorage", "0", 16), *_SHAPE, _NEGATED),
    "negated, of another type": call(
        name("torch._utils", "_rebuild_tensor_v3"),
        *(_UNTYPED, *_SHAPE, name("torch", "float32"), _NEGATED),
    ),
    "replaced": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        *(name("torch._utils", "_rebuild_tensor_v2"), name("torch", "Tensor")),
        several(storage("FloatStorage", "0", 16), *_SHAPE),
        _DATA,
    ),
}


@pytest.mark.parametrize("what", _FILES)
def test_an_export(what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.pt", pickle.EMPTY_DICT + text("w") + _FILES[what] + pickle.SETITEM)
    load_data(path)
    for read in (state_dict_weights, read_torch_file):
        with pytest.raises(CheckpointError, match="tensor"):
            read(path)


def test_what_torch_saves(tmp_path: Path) -> None:
    weight = torch.ones(2)
    weight.tag = "x"  # pyright: ignore[reportAttributeAccessIssue]
    torch.save({"a": weight, "b": torch.ones(2), "c": torch.ones(2, dtype=torch.uint16)}, tmp_path / "model.pt")
    assert all(isinstance(one, StoredTensor) for one in read_torch_file(tmp_path / "model.pt").values())
