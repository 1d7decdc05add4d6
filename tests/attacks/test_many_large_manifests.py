"""A folder has many names of one large manifest: each costs nothing on the disk, and much when it is parsed."""

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import Candidate, parse_policies
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.tools.inventory import Inventory, open_inventory
from tests.support.checkpoints import describe
from tests.support.stores import FaultyStore

_NUM_FILES = 5000
_NUM_LINKS = 8


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """Checkpoints whose manifests are hard links of one file, and all of whose files are missing."""
    entries = (FileEntry(path=f"f{i:05}", size_bytes=0, digest=digest_bytes(b"")) for i in range(_NUM_FILES))
    record = tmp_path / "record"
    record.write_bytes(describe(40)(tuple(entries)).to_bytes())
    for step in range(40, 40 + _NUM_LINKS):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        os.link(record, tmp_path / "out" / f"checkpoint-{step}" / MANIFEST_NAME)
    return OutputFolder(tmp_path / "out")


def living(kind: type[Any]) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def test_a_list_keeps_no_manifest(output: OutputFolder) -> None:
    """An item has a few facts, and the first of its faults with the number of the others."""
    before = living(Manifest), living(FileEntry)
    inventory, _ = open_inventory(str(output.root))
    items = inventory.items()
    assert len(items) == _NUM_LINKS
    assert (living(Manifest), living(FileEntry)) == before
    assert max(len(item.faults) for item in items) <= 1001
    assert "more faults" in items[-1].faults[-1].reason
    assert len(inventory.verify(items[-1])) <= 1001


def test_retention_holds_one_at_a_time(output: OutputFolder) -> None:
    """Each prune, which is after each save, looks at all of them."""
    before = most = living(Manifest)  # other tests of this process may have kept some
    for _ in output.manifests():
        most = max(most, living(Manifest))
    assert most - before <= 2
    assert output.superseded(parse_policies("newest=1")) == []


def test_retention_in_a_store(tmp_path: Path) -> None:
    """The uploader remembers something of each manifest as long as it runs, and only what its policies use."""
    metrics = {f"m{index}": 1.0 for index in range(5000)} | {"eval_loss": 0.5}
    for step in (10, 20, 30):
        entry = FileEntry(path="f", size_bytes=0, digest=digest_bytes(b""))
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        manifest = dataclasses.replace(describe(step)((entry,)), metrics=metrics)
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    remote = RemoteFolder(FaultyStore(tmp_path))
    for _ in range(2):
        remote.superseded(parse_policies("newest=1,best=1:eval_loss"))
    known = vars(remote)["_candidates"]
    assert sorted(known) == [10, 20, 30]
    assert all(one.metrics == {"eval_loss": 0.5} for one in known.values())


def test_metrics_without_end(tmp_path: Path) -> None:
    """Retention keeps only the metrics that its policies use; a list keeps no huge names."""
    metrics = {f"m{index}" + "x" * 100: 1.0 for index in range(5000)} | {"eval_loss": 0.5}
    entry = FileEntry(path="f", size_bytes=0, digest=digest_bytes(b""))
    manifest = dataclasses.replace(describe(10)((entry,)), metrics=metrics)
    assert Candidate.of(manifest, parse_policies("best=1:eval_loss")).metrics == {"eval_loss": 0.5}
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    inventory: Inventory = open_inventory(str(tmp_path))[0]
    [item] = inventory.items()
    assert item.stated is not None
    assert item.stated.metrics == {}
