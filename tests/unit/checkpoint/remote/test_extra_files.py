"""What a program leaves in the output folder beside its checkpoints is uploaded at the end."""

import os
from pathlib import Path

import pytest

from safepoint.checkpoint.remote.extra_files import ExtraFiles
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.errors import ConflictError, StorageError
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import ExtraFilesLeftOut, ExtraFilesUploaded
from tests.support.checkpoints import commit, keep_final, prepared
from tests.support.stores import FaultyStore


class Scene:
    def __init__(self, root: Path) -> None:
        self.output = prepared(root / "local")
        self.root = self.output.root
        self.store = FaultyStore(root / "bucket")
        self.remote = RemoteFolder(self.store)
        self.remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="node"))
        self.events: list[Event] = []

    def write(self, path: str, text: str = "x") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def extra(self, limit_bytes: int = 1000, *, is_first_node: bool = True) -> ExtraFiles:
        return ExtraFiles(
            self.output,
            self.remote,
            limit_bytes=limit_bytes,
            is_first_node=is_first_node,
            report=self.events.append,
        )

    def upload(self, limit_bytes: int = 1000, *, is_first_node: bool = True) -> list[str]:
        extra = self.extra(limit_bytes, is_first_node=is_first_node)
        extra.upload(progress=lambda count: None, deadline_s=None)
        return self.keys()

    def keys(self) -> list[str]:
        return sorted(item.key for item in self.store.list() if not item.key.startswith(".safepoint/"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_everything_but_checkpoints_staging_and_caches(scene: Scene) -> None:
    """Under the same names, at any depth."""
    commit(scene.output, 4)
    kept = ("metrics.json", "plots/loss.png", "my-model/model.safetensors", "runs/a/events.out", "checkpoint-notes/a")
    for path in kept:
        scene.write(path)
    for path in (
        ".cache/a",
        "plots/__pycache__/a.pyc",
        "set-aside-1/checkpoint-2/a",
        "trial-1/checkpoint-5/model.safetensors",
        "tmp-checkpoint-8/a",
        "final/model.safetensors",
    ):
        scene.write(path)
    assert scene.upload() == sorted(kept)
    (event,) = scene.events
    assert isinstance(event, ExtraFilesUploaded)
    assert (event.num_files, event.size_bytes) == (5, 5)
    assert "uploaded 5 other files of the output folder to" in event.line


def test_nothing_is_no_event(scene: Scene) -> None:
    """And a limit of 0 uploads nothing."""
    commit(scene.output, 4)
    assert scene.upload() == []
    scene.write("a")
    assert scene.upload(0) == []
    assert scene.events == []


def test_the_limit(scene: Scene) -> None:
    """Small files first; what is left out is reported, with an example and the limit."""
    scene.write("large.bin", "x" * 900)
    scene.write("b", "x" * 60)
    scene.write("a", "x" * 60)
    assert scene.upload(200) == ["a", "b"]
    left_out = scene.events[-1]
    assert isinstance(left_out, ExtraFilesLeftOut)
    assert (left_out.num_files, left_out.example) == (1, "large.bin")
    assert left_out.is_warning
    assert "the limit of 200 B" in left_out.line


def test_links_stay_in_the_folder(scene: Scene, tmp_path: Path) -> None:
    """A link to a file of the folder is that file's content; one that leads out is not followed."""
    (tmp_path / "secret").write_text("s")
    scene.write("plot-3.png", "three")
    (scene.root / "latest.png").symlink_to("plot-3.png")
    (scene.root / "out").symlink_to(tmp_path / "secret")
    (scene.root / "away").symlink_to(tmp_path)
    os.mkfifo(scene.root / "pipe")
    assert scene.upload() == ["latest.png", "plot-3.png"]
    assert bytes(scene.store.read("latest.png")) == b"three"


def test_weights_of_the_final_model_are_not_sent_twice(scene: Scene) -> None:
    """A script that saves its model into the output folder itself; what else it saved there is sent."""
    scene.write("model.safetensors", "abc")
    scene.write("config.json", "{}")
    keep_final(scene.output, **{"model.safetensors": b"abc", "config.json": b"{}"})
    assert scene.upload() == ["config.json"]


def test_a_later_attempt_replaces_them(scene: Scene) -> None:
    """The content is that of the last upload; other nodes do not replace what is there."""
    scene.write("metrics.json", "1")
    scene.upload()
    scene.write("metrics.json", "22")
    scene.upload()
    assert bytes(scene.store.read("metrics.json")) == b"22"
    scene.write("metrics.json", "333")
    scene.write("rank-1.txt")
    assert scene.upload(is_first_node=False) == ["metrics.json", "rank-1.txt"]
    assert bytes(scene.store.read("metrics.json")) == b"22"


def test_a_writer_that_was_replaced_writes_nothing(scene: Scene) -> None:
    """Another attempt has claimed the location."""
    scene.write("a")
    other = RemoteFolder(scene.store)
    other.claimed_by()
    other.claim(Claim(run_id="run", attempt=2, attempt_id="run-2", since="now", host="other"))
    with pytest.raises(ConflictError):
        scene.upload()
    assert scene.keys() == []


def test_an_upload_goes_on_where_it_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are in the store are not sent again."""
    scene.write("a")
    scene.write("b")
    extra = scene.extra()
    upload, sent = scene.store.upload, list[str]()

    def fails_for_b(key: str, *arguments: object, **named: object) -> object:
        sent.append(key)
        if key == "b" and sent.count("b") == 1:
            raise StorageError("no")
        return upload(key, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(scene.store, "upload", fails_for_b)
    with pytest.raises(StorageError):
        extra.upload(progress=lambda count: None, deadline_s=None)
    extra.report_left_out("the store is gone")
    extra.upload(progress=lambda count: None, deadline_s=None)
    assert (sent.count("a"), sent.count("b")) == (1, 2)
    assert [type(event) for event in scene.events] == [ExtraFilesLeftOut, ExtraFilesUploaded]
