"""JSON in a checkpoint with more values than bytes would suggest: they are counted before they are made.

An empty list takes three bytes of a text, and 64 of memory. So 90 MB of them, as many as the header of a safetensors
file may have, took 2.7 GB.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.foreign import contents
from safepoint.checkpoint.format.sealed_record import parse_json_object
from safepoint.checkpoint.tools.difference import compare
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import CheckpointError, ManifestError
from safepoint.foundation import bounded_json
from safepoint.foundation.bounded_json import has_more_values, parse_object, read_object
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from tests.support.checkpoints import commit, prepared

_BYTES = 1 << 27
_MANY = {
    "lists": b'{"a":[' + b"[]," * 2_500_000 + b"0]}",
    "objects": b'{"a":[' + b"{}," * 2_500_000 + b"0]}",
    "numbers": b'{"a":[' + b"0," * 5_000_000 + b"0]}",
    "lists after a long string": b'{"s":"' + b'\\",' * 5_000_000 + b'","a":[' + b"[]," * 2_500_000 + b"0]}",
    "a string without its end": b'{"a":[' + b"[]," * 2_500_000 + b'"',
}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the large texts that were parsed, in the order of parsing. Their values are not made."""
    found: list[int] = []
    loads = json.loads

    def note(text: Any, **options: Any) -> Any:
        if len(text) < 1 << 20:
            return loads(text, **options)
        found.append(len(text))
        return {}

    monkeypatch.setattr(bounded_json.json, "loads", note)
    return found


@pytest.fixture(params=_MANY)
def many(request: pytest.FixtureRequest) -> bytes:
    return _MANY[request.param]


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_any_object(many: bytes, tmp_path: Path, parsed: list[int]) -> None:
    """Bytes, text and a file, as the files of a checkpoint are read at a resume."""
    (tmp_path / "trainer_state.json").write_bytes(many)
    for parse in (
        lambda: parse_object(many, max_bytes=_BYTES),
        lambda: parse_object(many.decode(), max_bytes=_BYTES),
        lambda: read_object(tmp_path / "trainer_state.json", max_bytes=_BYTES, constant=float),
    ):
        with pytest.raises(ValueError, match="more than 4194304 values"):
            parse()
    assert parsed == []


def test_configurations_and_headers(many: bytes, tmp_path: Path, parsed: list[int]) -> None:
    """Of a checkpoint that another program wrote."""
    (tmp_path / "config.json").write_bytes(many)
    with pytest.raises(ValueError, match="values"):
        contents.read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="values"):
        contents.shards_named_by(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(_safetensors(many))
    with pytest.raises(ValueError, match="values"):
        contents.tensors_of(tmp_path / "model.safetensors")
    assert parsed == []


def test_headers_that_are_compared(tmp_path: Path, parsed: list[int]) -> None:
    """By `safepoint checkpoints diff`."""
    output = prepared(tmp_path)
    for step in (10, 20):
        commit(output, step, {0: {"model.safetensors": _safetensors(_MANY["lists"]) + bytes(step)}})
    inventory = Inventory(open_store(Location.of_folder(tmp_path)))
    before, after = inventory.item("checkpoint-10"), inventory.item("checkpoint-20")
    with pytest.raises(CheckpointError, match="more than 4194304 values"):
        compare((inventory, before), (inventory, after))
    assert parsed == []


def test_manifests(many: bytes, parsed: list[int]) -> None:
    """Their limit is lower: Safepoint has written them, and knows how many values they have."""
    with pytest.raises(ManifestError, match="values"):
        parse_json_object(many)
    with pytest.raises(ManifestError, match="values"):
        parse_json_object(b'{"a":[' + b"[]," * 400_000 + b"0]}")
    assert parsed == []


def test_a_large_header() -> None:
    """100,000 tensors, whose names have commas and brackets."""
    header = {
        f"layers[{number}],{{weight}}": {
            "dtype": "BF16",
            "shape": [64, 64, 3, 3],
            "data_offsets": [number, number + 1],
        }
        for number in range(100_000)
    }
    text = json.dumps(header)
    assert parse_object(text, max_bytes=_BYTES) == header
    assert not has_more_values(text, 1_100_000)
    assert has_more_values(text, 900_000)


def test_a_large_state() -> None:
    """The log of 100,000 steps."""
    record = {"epoch": 1.5, "grad_norm": 0.5, "learning_rate": 1e-5, "loss": 2.25, "step": 100_000}
    text = json.dumps({"global_step": 5, "log_history": [record] * 100_000}, indent=2)
    assert len(parse_object(text, max_bytes=_BYTES)["log_history"]) == 100_000
