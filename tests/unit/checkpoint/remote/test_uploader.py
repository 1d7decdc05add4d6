"""The uploader takes what the folder holds, newest first, and reports what it leaves out."""

import threading
from pathlib import Path

import pytest

from safepoint.checkpoint.commit import commit as finish
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.final_model import (
    FINAL,
    TrainingEnd,
    adopt_scripts_model,
    final_folder,
    note_end,
)
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_record
from safepoint.checkpoint.weights.stored_weight import content_of
from safepoint.errors import StorageError
from safepoint.foundation import files
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Uploaded, UploadFailed, UploadSuperseded
from tests.support.checkpoints import commit, describe, keep_final, name_added_files, prepared
from tests.support.stores import FaultyStore


class Scene:
    """A local folder, a store, and an uploader between them."""

    def __init__(self, root: Path, keep: str | None = None) -> None:
        self.output = prepared(root / "local")
        self.bucket = root / "bucket"
        self.store = FaultyStore(self.bucket)
        self.remote = RemoteFolder(self.store)
        self.remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="node"))
        self.events: list[Event] = []
        self.uploader = self.another_uploader(keep)

    def another_uploader(self, keep: str | None = None) -> Uploader:
        return Uploader(self.output, self.remote, policies=parse_policies(keep), report=self.events.append)

    def upload_all(self) -> None:
        while self.uploader.upload_next():
            pass

    def steps(self, kind: type[Event]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]  # type: ignore[attr-defined]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_checkpoint_that_waits_is_superseded_by_a_newer_one(scene: Scene) -> None:
    """Of three periodic ones that wait, the newest goes; the others are named as left out, once."""
    for step in (10, 20, 30):
        commit(scene.output, step)
    scene.upload_all()
    scene.upload_all()
    assert scene.remote.steps() == [30]
    assert scene.steps(Uploaded) == [30]
    assert sorted(scene.steps(UploadSuperseded)) == [10, 20]


def test_a_requested_checkpoint_is_never_left_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An on-demand checkpoint goes although a newer one exists, after it."""
    make = describe(10)
    monkeypatch.setattr("tests.support.checkpoints.describe", lambda step: _on_demand(make))
    commit(scene.output, 10)
    monkeypatch.undo()
    commit(scene.output, 20)
    scene.upload_all()
    assert scene.steps(Uploaded) == [20, 10]
    assert scene.steps(UploadSuperseded) == []


def _on_demand(make):
    def on_demand(entries):
        import dataclasses

        return dataclasses.replace(make(entries), trigger="on-demand")

    return on_demand


def test_what_retention_deleted_is_reported(scene: Scene) -> None:
    """Seen waiting, then pruned before its turn: superseded. Uploaded before: nothing is said."""
    first = commit(scene.output, 10)
    scene.upload_all()
    commit(scene.output, 20)
    assert scene.uploader.next() is not None
    assert scene.output.delete(first.name)
    assert scene.output.delete("checkpoint-20")
    scene.upload_all()
    assert scene.steps(UploadSuperseded) == [20]


def test_a_checkpoint_in_flight_is_not_pruned_locally(scene: Scene) -> None:
    """While it is read for the upload, retention leaves it alone."""
    folder = commit(scene.output, 10)
    pruned: list[bool] = []
    scene.store.before = lambda name, key: (
        pruned.append(scene.output.delete(folder.name)) if name == "upload" else None
    )
    scene.upload_all()
    assert pruned
    assert not any(pruned)
    assert scene.output.delete(folder.name)


def test_a_failure_is_reported_once_and_tried_again(scene: Scene) -> None:
    """The checkpoint arrives when the store is well again; the event stream has one warning for it."""
    commit(scene.output, 10)

    def fail(name: str, key: str) -> None:
        if name == "upload":
            raise StorageError("out of order")

    scene.store.before = fail
    for _ in range(3):
        with pytest.raises(StorageError):
            scene.uploader.upload_next()
    assert scene.steps(UploadFailed) == [10]
    assert b"out of order" in (scene.output.control / "upload.json").read_bytes()
    scene.store.before = lambda name, key: None
    scene.upload_all()
    assert scene.steps(Uploaded) == [10]
    assert b"idle" in (scene.output.control / "upload.json").read_bytes()


def test_another_process_sends_nothing_again(scene: Scene) -> None:
    """An uploader that starts over a store that has everything uploads nothing and claims no upload."""
    commit(scene.output, 10)
    scene.upload_all()
    scene.store.calls.clear()
    again = scene.another_uploader()
    while again.upload_next():
        pass
    assert {name for name, _ in scene.store.calls} <= {"read", "stat"}
    assert scene.steps(Uploaded) == [10]


def test_added_files_are_published_too(scene: Scene) -> None:
    """A checkpoint to which files were added after it was uploaded is uploaded as it is now."""
    folder = commit(scene.output, 10)
    scene.upload_all()
    (folder / "notes.txt").write_text("added")
    name_added_files(folder)
    scene.upload_all()
    assert (scene.bucket / "checkpoint-10" / "notes.txt").read_text() == "added"
    assert verify(scene.bucket / "checkpoint-10").is_valid


def test_the_store_keeps_the_newest(tmp_path: Path) -> None:
    """Retention in the store is its own: two there, whatever the folder holds."""
    scene = Scene(tmp_path, keep="newest=2")
    for step in (10, 20, 30, 40):
        commit(scene.output, step)
        scene.upload_all()
    assert scene.remote.steps() == [40, 30]
    assert not (scene.bucket / "checkpoint-10").exists()


def test_only_the_newest_gets_the_last_moments(scene: Scene) -> None:
    """With `newest_only` an older one that waits stays where it is."""
    commit(scene.output, 10)
    scene.upload_all()
    commit(scene.output, 20)
    commit(scene.output, 30)
    scene.uploader.newest_only = True
    scene.upload_all()
    assert scene.remote.steps() == [30, 10]


def test_an_older_upload_gives_way_when_time_is_short(scene: Scene) -> None:
    """In flight when the last moments begin: it stops between two files, and the newest one goes."""
    commit(scene.output, 10)

    once = threading.Lock()  # uploads of small files run side by side

    def newer_comes(name: str, key: str) -> None:
        if name == "upload" and key.startswith("checkpoint-10/") and once.acquire(blocking=False):
            commit(scene.output, 20)
            scene.uploader.newest_only = True

    scene.store.before = newer_comes
    scene.upload_all()
    assert scene.remote.steps() == [20]
    assert scene.steps(UploadSuperseded) == [10]


def test_the_final_model_goes_last_and_only_at_the_end(scene: Scene) -> None:
    """It is published as `final/`, after the checkpoints."""
    commit(scene.output, 9)
    keep_final(scene.output, config_json=b"{}", model_safetensors=b"weights")
    scene.upload_all()
    assert not (scene.bucket / "final").exists()
    scene.uploader.with_final = True
    scene.upload_all()
    assert verify(scene.bucket / "final").is_valid
    assert scene.steps(Uploaded) == [9, 9]


def ended(scene: Scene) -> TrainingEnd:
    return note_end(scene.output, describe(9))


@pytest.mark.parametrize("earlier", ["", "kept", "final"])
@pytest.mark.parametrize("place", ["final", "."])
def test_the_scripts_own_model_is_the_final_one(place: str, earlier: str, scene: Scene) -> None:
    """Saved into `final/` or into the output folder after the training: that one counts, and nothing else of it."""
    if earlier == "kept":
        keep_final(scene.output, config_json=b"{}", model_safetensors=b"kept")
    if earlier == "final":  # of an earlier run in the same folder
        (scene.output.root / FINAL).mkdir()
        (scene.output.root / FINAL / "config.json").write_bytes(b"{}")
    end = ended(scene)
    folder = scene.output.root / place
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(b'{"own": 1}')
    (folder / "model.safetensors").write_bytes(b"own")
    assert adopt_scripts_model(scene.output, end)
    final = final_folder(scene.output)
    assert verify(final).is_valid
    assert (final / "model.safetensors").read_bytes() == b"own"
    assert sorted(path for path, _ in files.walk_files(final)) == sorted(
        ["config.json", "model.safetensors", MANIFEST_NAME]
    )


def test_a_model_of_an_earlier_run_is_not_adopted(scene: Scene) -> None:
    """What lay in the folder before the training ended is not what the script made of it."""
    (scene.output.root / "config.json").write_bytes(b"{}")
    keep_final(scene.output, config_json=b"{}", model_safetensors=b"kept")
    assert not adopt_scripts_model(scene.output, ended(scene))
    assert (final_folder(scene.output) / "model.safetensors").read_bytes() == b"kept"


def test_a_model_that_the_store_has_is_not_sent_again(scene: Scene) -> None:
    """The script saves what was streamed at the end of its training: only what differs is uploaded."""
    final = StoreDestination(scene.remote, FINAL, sent=upload_record(scene.output, FINAL))
    final.begin()
    final.put(SourceFile("model.safetensors", content_of(b"weights")))
    final.put(SourceFile("config.json", content_of(b"{}")))
    finish(final, describe(9)(final.entries))
    assert verify(scene.bucket / FINAL).is_valid
    end = ended(scene)
    folder = scene.output.root / FINAL
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_bytes(b'{"own": 1}')
    assert adopt_scripts_model(scene.output, end)
    scene.uploader.with_final = True
    scene.store.calls.clear()
    scene.upload_all()
    assert [key for name, key in scene.store.calls if name == "upload"] == ["final/config.json"]
    assert verify(scene.bucket / FINAL).is_valid
    assert (scene.bucket / FINAL / "config.json").read_bytes() == b'{"own": 1}'
