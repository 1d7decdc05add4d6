"""A stranger creates many objects in a bucket, with the names of checkpoints and contents that are no manifests.

A start of a run, and each upload, must not take longer and longer, or fail, because of them.
"""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.remote.publish import NodeUploaders
from safepoint.checkpoint.remote.remote_folder import PARTS, Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan
from safepoint.training.context.uploads import Uploader
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

_HIGH = 10**17


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    """A bucket with three checkpoints of a run, and junk below and above them."""
    root = tmp_path / "bucket"
    for step in (100, 200, 300):
        commit(prepared(root), step)
    for step in (*range(10, 20), _HIGH):
        (root / f"checkpoint-{step}").mkdir()
        (root / f"checkpoint-{step}" / MANIFEST_NAME).write_bytes(b"junk")
    return FaultyStore(root)


@pytest.mark.timeout(60)
def test_the_uploader_starts(tmp_path: Path) -> None:
    """It gets the steps above the one from which the run resumes. An argument may have at most 128 KiB."""
    output, bucket = prepared(tmp_path / "out"), tmp_path / "bucket"
    commit(output, 10)
    remote = RemoteFolder(FaultyStore(bucket))
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="here"))
    steps = tuple(range(_HIGH, _HIGH + 20_000))
    plan = UploaderPlan(folder=str(output.root), location=str(bucket), attempt_id="run-1", passed_over=steps)
    assert Uploader(plan).finish(newest_only=False, deadline_s=None)
    assert remote.steps() == [10]


def test_each_manifest_is_read_once(store: FaultyStore) -> None:
    """Each upload is followed by a prune, which needs all manifests."""
    remote, policies = RemoteFolder(store), parse_policies("newest=2")
    remote.note_commit(300)
    assert remote.superseded(policies) == [100]
    store.calls.clear()
    assert remote.superseded(policies) == [100]
    assert [name for name, _ in store.calls if name in {"read", "stat"}] == []


@pytest.mark.parametrize("step", [200, 400])
def test_a_node_waits_for_the_others(step: int, store: FaultyStore) -> None:
    """It begins the next checkpoint when its last one is complete, or a newer one of the run is."""
    nodes = NodeUploaders(RemoteFolder(store), count=2, run_id="run")
    name = f"checkpoint-{step}"
    nodes.awaited[name] = read_manifest(store.location.folder / "checkpoint-100")
    for begun in (name, "checkpoint-250"):
        store.write(f"{PARTS}/{begun}/{'a' * 32}/begun-1", b"now")
    assert nodes.may_begin(None) == (step == 200)
    assert nodes.begun(None) == ({name} if step == 400 else set())
    others = NodeUploaders(RemoteFolder(store), count=2, run_id="another run")
    assert others.begun(None) == {name, "checkpoint-250"}
