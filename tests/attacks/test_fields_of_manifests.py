"""A manifest, a claim or a mark with its digest in order has fields of any type and size."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.manifest import MAX_ATTEMPT, Manifest
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.publish import complete_marks
from safepoint.checkpoint.remote.remote_folder import ATTEMPT_KEY, RemoteFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import ManifestError
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from tests.support.checkpoints import commit, prepared, sealed

_VALUES: list[Any] = [
    *(None, True, -1, 2**63, 10**400, -0.0, 1e308, "", "\0", "../..", "\ud800", "A" * 100_000),
    *([], {}, [[]], {"a": {}}, [None], {"": ""}, [1] * 1000),
]


@pytest.mark.parametrize(
    "name", ["format", "version", "run_id", "attempt", "step", "trigger", "files", "libraries", "x"]
)
def test_values_of_any_type(name: str, tmp_path: Path) -> None:
    """Each is accepted or a fault of this one checkpoint; the others are listed, verified and repaired as before."""
    output = prepared(tmp_path)
    commit(output, 10)
    path = commit(output, 20) / "safepoint-manifest.json"
    record = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "manifest_digest"}
    inventory = Inventory(open_store(Location.of_folder(tmp_path)))
    for value in _VALUES:
        path.write_bytes(sealed({**record, name: value}))
        found = {item.name: item for item in inventory.items()}
        assert found["checkpoint-10"].is_complete
        assert all(len(str(fault)) < 1000 for fault in found["checkpoint-20"].faults)
        repair(inventory, deep=True, drop_damaged=False, dry_run=True, idle_s=0)


@pytest.mark.parametrize("run_id", ["/tmp/x", "../../x", "a/b", "a\0b", "..", "", "\x1b[2J", "x" * 200])
def test_a_run_that_is_no_name(run_id: str, tmp_path: Path) -> None:
    """The working folder of the next attempt is named after the run: it would be outside, or impossible."""
    path = commit(prepared(tmp_path), 10) / "safepoint-manifest.json"
    record = json.loads(path.read_bytes())
    with pytest.raises(ManifestError, match="run_id"):
        Manifest.from_bytes(sealed({**record, "run_id": run_id}))


@pytest.mark.parametrize(
    "name", ["attempt", "step", "world_size", "global_batch", "gradient_accumulation", "samples_seen"]
)
@pytest.mark.parametrize("number", [1 << 63, 10**300])
def test_numbers_that_no_run_reaches(name: str, number: int, tmp_path: Path) -> None:
    """They would become names that are too long, or sums that fail in the next save."""
    path = commit(prepared(tmp_path), 10) / "safepoint-manifest.json"
    record = json.loads(path.read_bytes())
    with pytest.raises(ManifestError, match=name):
        Manifest.from_bytes(sealed({**record, name: number}))


def test_the_greatest_attempt(tmp_path: Path) -> None:
    """A run can continue from it, and save."""
    output = prepared(tmp_path)
    path = commit(output, 10) / "safepoint-manifest.json"
    record = json.loads(path.read_bytes())
    path.write_bytes(sealed({**record, "attempt": MAX_ATTEMPT}))
    after = read_manifest(path.parent).attempt
    assert OutputFolder(tmp_path).next_attempt("run", after=after) == MAX_ATTEMPT
    assert OutputFolder(tmp_path).next_attempt("run", after=after) == MAX_ATTEMPT


@pytest.mark.parametrize(("run_id", "attempt"), [("../x", 1), ("run", 10**300), ("run", -1)])
def test_a_claim_of_a_stranger(run_id: str, attempt: int, tmp_path: Path) -> None:
    """It counts as none."""
    claim = {"run_id": run_id, "attempt": attempt, "attempt_id": "a", "since": "", "host": ""}
    store = open_store(Location.of_folder(tmp_path))
    store.write(ATTEMPT_KEY, json.dumps(claim).encode())
    assert RemoteFolder(store).claimed_by() is None


def test_marks_of_ten_million_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small object does not make a set of all the nodes that it states."""
    store = open_store(Location.of_folder(tmp_path))
    store.write(f".safepoint/parts/checkpoint-5/{'0' * 32}/0-of-9999999", b"x")

    def refuse(*args: int) -> range:
        raise AssertionError(f"range{args}")

    monkeypatch.setattr("safepoint.checkpoint.remote.publish.range", refuse, raising=False)
    assert list(complete_marks(store, None)) == []
