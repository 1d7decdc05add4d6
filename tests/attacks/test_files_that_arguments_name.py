"""TrainingArguments of another person, which name a file of the user: `plan --for` printed a value of this file."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.estimates.sizes import Strategy
from safepoint.planning.inputs.records import read_arguments, strategy_in

_SECRET = "the-secret"
_CONTENT = {
    "zero_optimization": {"stage": _SECRET},
    "optimizer": {"type": _SECRET},
    "state_dict_type": _SECRET,
}
_FIELDS: dict[str, dict[str, Any]] = {"deepspeed": {}, "fsdp_config": {"fsdp": "full_shard"}}


def _arguments(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", **fields}))
    return path


@pytest.mark.parametrize("way", ["absolute", "relative", "through a link"])
@pytest.mark.parametrize("field", _FIELDS)
def test_a_file_in_another_folder(field: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read, also if its name is relative to the working folder."""
    secret = tmp_path / "home" / "secret.json"
    secret.parent.mkdir()
    secret.write_text(
        json.dumps({**_CONTENT, "zero_optimization": {"stage": 2}, "state_dict_type": "FULL_STATE_DICT"})
    )
    monkeypatch.chdir(tmp_path)
    named = {"absolute": str(secret), "relative": "../home/secret.json", "through a link": "link.json"}[way]
    path = _arguments(tmp_path / "theirs", **_FIELDS[field], **{field: named})
    (path.parent / "link.json").symlink_to(secret)
    with pytest.raises(UsageError, match="is outside the folder of the arguments file and was not read"):
        read_arguments(path)
    (tmp_path / "own.json").write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(UsageError, match="does not exist in the folder of the arguments file"):
        read_arguments(_arguments(tmp_path / "theirs", deepspeed="own.json"))


@pytest.mark.parametrize("field", _FIELDS)
def test_values_of_a_file_beside_the_arguments(field: str, tmp_path: Path) -> None:
    """The message says what is wrong, and shows no value."""
    path = _arguments(tmp_path / "theirs", **_FIELDS[field], **{field: "beside.json"})
    (path.parent / "beside.json").write_text(json.dumps(_CONTENT))
    with pytest.raises(UsageError) as raised:
        read_arguments(path)
    assert ("zero_optimization.stage" if field == "deepspeed" else "state_dict_type") in str(raised.value)
    assert _SECRET not in f"{raised.value} {raised.value.hint}"


def test_notes_on_a_file_beside_the_arguments(tmp_path: Path) -> None:
    path = _arguments(tmp_path / "theirs", deepspeed="beside.json")
    (path.parent / "beside.json").write_text(json.dumps({**_CONTENT, "zero_optimization": {"stage": 2}}))
    notes = " ".join(read_arguments(path).notes)
    assert "has an optimizer which is not planned" in notes
    assert _SECRET not in notes


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "\x1b[2J"])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"deepspeed|DeepSpeed"):
        read_arguments(_arguments(tmp_path / "theirs", deepspeed=name))


def test_the_arguments_of_the_own_job(tmp_path: Path) -> None:
    """They may name a file in any folder."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    found = strategy_in({"deepspeed": str(tmp_path / "zero.json")}, tmp_path / "code" / "arguments.json", is_own=True)
    assert found is Strategy.ZERO3
