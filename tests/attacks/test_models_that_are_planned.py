"""`safepoint plan storage` reads files that a person has downloaded: none makes it hang, or fills its memory."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.planning.inputs import read_arguments
from safepoint.planning.model import of_config, read_model
from safepoint.planning.pictures import Bar, bars

pytestmark = pytest.mark.timeout(60)


def _safetensors(header: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        _safetensors(b"{}", length=1 << 62),
        _safetensors(b"[]"),
        _safetensors(b"not JSON"),
        _safetensors(b'{"a":' + b"[" * 100_000),
        _safetensors(b'{"a": 1}'),
        _safetensors(json.dumps({"a": {**_ENTRY, "shape": [-1]}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "shape": [2.5]}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "shape": [True]}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "shape": [1 << 70]}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "shape": [1] * 1000}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "dtype": 7}}).encode()),
        _safetensors(json.dumps({"\ud800.weight": _ENTRY}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "data_offsets": [0]}}).encode()),
        _safetensors(json.dumps({"a": {**_ENTRY, "data_offsets": "no"}}).encode()),
        _safetensors(b'{"a": {"dtype": "F32", "shape": [2]}, "a": {"dtype": "F32", "shape": [2]}}'),
    ],
)
def test_a_damaged_header_is_a_message(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="is not a safetensors file, or is damaged"):
        read_model(tmp_path)


@pytest.mark.parametrize("number", ["00002", "999999999"])
def test_a_name_of_a_file_cannot_fill_the_memory(number: str, tmp_path: Path) -> None:
    """A name states how many files there are."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"model-00001-of-{number}.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="is missing"):
        read_model(tmp_path)


def _place_pipe(path: Path) -> None:
    os.mkfifo(path)


def _place_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent.parent / "pipe")
    path.symlink_to(path.parent.parent / "pipe")


def _place_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _place_loop(path: Path) -> None:
    path.symlink_to(path)


def _place_folder(path: Path) -> None:
    path.mkdir()


_PLACED = (_place_pipe, _place_link_to_pipe, _place_link_to_device, _place_loop, _place_folder)


@pytest.mark.parametrize("place", _PLACED)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_refused(name: str, place: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe does not hang the command, and a device does not fill its memory."""
    folder = tmp_path / "model"
    folder.mkdir()
    place(folder / name)
    for path in (folder, folder / "config.json"):
        with pytest.raises(UsageError):
            read_model(path)


@pytest.mark.parametrize("place", _PLACED)
def test_what_is_no_file_is_refused_as_arguments(place: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    place(folder / "arguments.json")
    with pytest.raises(UsageError, match="--for"):
        read_arguments(folder / "arguments.json")


def test_a_huge_configuration_is_not_parsed(tmp_path: Path) -> None:
    """Neither one that is long, nor one that has millions of values."""
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "llama", "x": "' + b"x" * (5 << 20) + b'"}')
    with pytest.raises(UsageError, match="is larger than"):
        read_model(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(UsageError, match="is larger than"):
        read_model(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10_001},
        {"num_local_experts": 1 << 40},
        {"num_hidden_layers": 10_000, "num_local_experts": 60_000},
        {"vocab_size": 1 << 40, "hidden_size": 1 << 40},
    ],
)
def test_a_configuration_cannot_fill_the_memory(fields: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values = {
        "model_type": "mixtral",
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), 8),
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        **fields,
    }
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=r"must be|would have too many|has num"):
        read_model(path)


def test_a_header_cannot_overflow_the_formats(tmp_path: Path) -> None:
    """Sizes that fit into a header, and not into a file of torch."""
    (tmp_path / "config.json").write_text("{}")
    entry = {"dtype": "F32", "shape": [1 << 59] * 60, "data_offsets": [0, 8]}
    (tmp_path / "model.safetensors").write_bytes(_safetensors(json.dumps({"a": entry}).encode()))
    with pytest.raises(UsageError, match="too many parameters"):
        read_model(tmp_path)


def test_a_name_adds_nothing_to_a_picture() -> None:
    name = "</text><script>alert(1)</script>\x1b[31m'\""
    text = bars(name, name, [Bar(name, [(name, 1.0)], name)])
    assert "<script" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


def test_a_list_that_is_checked_for_each_layer() -> None:
    """A list of a configuration is read once, so that the time of a plan is no product of lengths."""
    values = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_experts": 1, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "head_dim": 16, "model_type": "qwen3_moe",
    }  # fmt: skip
    began = time.process_time()
    of_config({**values, "num_hidden_layers": 3000, "mlp_only_layers": [10**6] * 100_000}, name="n", where="w")
    assert time.process_time() - began < 10
