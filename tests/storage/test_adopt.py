"""`safepoint checkpoints adopt` in a bucket."""

import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from tests.support.commands import safepoint
from tests.support.foreign import write_foreign
from tests.support.s3_server import S3Server


def test_in_a_bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files stay as they are, and the manifest appears last; one with a fault gets none."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    prefix = f"adopt-{uuid.uuid4().hex}"
    store, location = server.store(prefix), str(server.location(prefix))
    for step in (4, 8):
        folder = write_foreign(tmp_path, step)
        for path in folder.iterdir():
            store.upload(f"{folder.name}/{path.name}", path)
    store.write("checkpoint-8/checkpoint-is-incomplete.txt.node-0-rank-0", b"Upload queued for checkpoint-8")
    before = {item.key: item.version for item in store.list()}
    assert safepoint("checkpoints", "adopt", location).code == 14  # nothing states the micro-batches of a step
    assert {item.key: item.version for item in store.list()} == before
    done = safepoint("checkpoints", "adopt", location, "--gradient-accumulation", "2")
    assert done.code == 3, done
    assert "the program that wrote the checkpoint did not finish it" in done.stdout
    after = {item.key: item.version for item in store.list()}
    assert {key: after.get(key) for key in before} == before
    assert RemoteFolder(store).steps() == [4]
    assert RemoteFolder(store).manifest(4).global_batch == 4
    assert safepoint("checkpoints", "verify", f"{location}/checkpoint-4", "--deep").code == 0
