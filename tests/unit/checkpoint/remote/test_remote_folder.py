"""A checkpoint is in the store exactly while its manifest is, and a writer that was replaced publishes nothing."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.local.retention import KeepNewest
from safepoint.checkpoint.remote.publish import Published
from safepoint.checkpoint.remote.publish import publish as publish_record
from safepoint.checkpoint.remote.remote_folder import ATTEMPT_KEY, Claim, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.errors import CheckpointError, ConflictError, ManifestError, StorageError, TransientError
from tests.support.checkpoints import commit, name_added_files, prepared
from tests.support.stores import FaultyStore


def claim(number: int) -> Claim:
    return Claim(run_id="run", attempt=number, attempt_id=f"run-{number}", since="now", host="node")


def publish(remote: RemoteFolder, folder: Path) -> Published:
    sent = UploadRecord(folder.parent / f"{folder.name}.sent")
    return publish_record(remote, folder, read_manifest(folder), name=folder.name, sent=sent)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return commit(prepared(tmp_path / "local"), 20)


def test_what_was_published_is_valid_and_published_once(local: Path, tmp_path: Path) -> None:
    """The bucket's layout is the folder's, every byte of it; a second publish sends nothing."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    assert publish(remote, local) is Published.NOW
    assert remote.steps() == [20]
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid
    store.calls.clear()
    assert publish(remote, local) is Published.BEFORE
    assert {name for name, _ in store.calls} == {"stat", "read"}
    assert {item.key.partition("/")[0] for item in store.list()} == {".safepoint", "checkpoint-20"}
    assert list(store.list(".safepoint/unfinished")) == []


def test_the_manifest_is_written_last(local: Path, tmp_path: Path) -> None:
    """Whatever request fails, a later publish completes it, sends no file twice, and before that nothing is there."""
    total = FaultyStore(tmp_path / "count")
    counting = RemoteFolder(total)
    counting.claim(claim(1))
    total.calls.clear()
    publish(counting, local)
    num_calls = total.calls.index(("write", f"checkpoint-20/{MANIFEST_NAME}")) + 1
    assert total.calls[num_calls:] == [("delete", ".safepoint/unfinished/checkpoint-20")]
    for failing in range(num_calls):
        bucket = tmp_path / f"bucket-{failing}"
        store = FaultyStore(bucket)
        remote = RemoteFolder(store)
        remote.claim(claim(1))
        store.calls.clear()

        def fail(name: str, key: str, store: FaultyStore = store, failing: int = failing) -> None:
            if len(store.calls) == failing + 1:
                raise TransientError("cut off")

        store.before = fail
        with pytest.raises(TransientError, match="cut off"):
            publish(remote, local)
        assert remote.steps() == []
        store.before = lambda name, key: None
        uploaded = {key for name, key in store.calls if name == "upload"}
        store.calls.clear()
        assert publish(remote, local) is Published.NOW
        assert verify(bucket / "checkpoint-20").is_valid
        again = [key for name, key in store.calls if name == "upload"]
        assert len(set(again) & uploaded) <= 4, "at most those that were in flight are sent again"


@pytest.mark.parametrize("other", ["another step's content", "damaged"])
def test_another_checkpoint_of_the_same_step_is_taken_down_first(other: str, local: Path, tmp_path: Path) -> None:
    """There is no moment at which the old manifest stands over new data, and no file of the old one is left."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    older = commit(
        prepared(tmp_path / "older"), 20, {0: {"model.safetensors": b"old", "only-here": b"x"}, 1: {"rng": b"1"}}
    )
    publish(remote, older)
    if other == "damaged":
        (tmp_path / "bucket" / "checkpoint-20" / "model.safetensors").write_bytes(b"?")
    store.calls.clear()
    publish(remote, local)
    writes = [(name, key) for name, key in store.calls if name in {"upload", "write", "delete"}]
    assert writes[:2] == [
        ("write", ".safepoint/unfinished/checkpoint-20"),
        ("delete", f"checkpoint-20/{MANIFEST_NAME}"),
    ]
    assert writes[-2:] == [
        ("write", f"checkpoint-20/{MANIFEST_NAME}"),
        ("delete", ".safepoint/unfinished/checkpoint-20"),
    ]
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid


def test_a_replaced_writer_publishes_nothing(local: Path, tmp_path: Path) -> None:
    """From whichever request on another attempt has claimed the location, the older one ends without a commit."""
    counting = FaultyStore(tmp_path / "count")
    remote = RemoteFolder(counting)
    remote.claim(claim(1))
    counting.calls.clear()
    publish(remote, local)
    for when in range(counting.calls.index(("write", f"checkpoint-20/{MANIFEST_NAME}"))):
        bucket = tmp_path / f"bucket-{when}"
        store = FaultyStore(bucket)
        zombie = RemoteFolder(store)
        zombie.claim(claim(1))
        store.calls.clear()

        def replace(name: str, key: str, store: FaultyStore = store, bucket: Path = bucket, when: int = when) -> None:
            if len(store.calls) == when + 1:
                RemoteFolder(FaultyStore(bucket)).claim(claim(2))

        store.before = replace
        with pytest.raises(ConflictError, match="attempt 2"):
            publish(zombie, local)
        assert zombie.steps() == []
        with pytest.raises(ConflictError):
            zombie.delete("checkpoint-20")


def test_two_claims_at_once_leave_one(tmp_path: Path) -> None:
    """Compare-and-swap: a start that read the claim before the other wrote it is refused."""
    store = FaultyStore(tmp_path / "bucket")

    def other(name: str, key: str) -> None:
        if name == "write":
            store.before = lambda name, key: None
            RemoteFolder(store).claim(claim(2))

    store.before = other
    with pytest.raises(ConflictError, match="same moment"):
        RemoteFolder(store).claim(claim(1))
    held = RemoteFolder(store).claimed_by()
    assert held is not None
    assert held.attempt == 2


def test_cleaning_takes_what_safepoint_left_unfinished(local: Path, tmp_path: Path) -> None:
    """What a dead attempt began goes, unless this node is going to continue it; what is not ours stays."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    publish(remote, local)
    for step in (30, 40):
        remote.mark(checkpoint_name(step), {"model.safetensors": 4})
        store.write(f"{checkpoint_name(step)}/model.safetensors", b"torn")
    store.write("checkpoint-50/model.safetensors", b"written by another tool")
    store.write("notes.txt", b"the user's own")
    # A publish that was cut off between its commit and its tidying: complete, but for what it was about to delete.
    remote.mark("checkpoint-20", {"left over": 37})
    store.write("checkpoint-20/left over", b"of an earlier checkpoint of this step")
    remote.claim(claim(2))
    assert remote.clean(keep=["checkpoint-30"]) == 2
    keys = {item.key.partition("/")[0] for item in store.list()}
    assert keys == {".safepoint", "checkpoint-20", "checkpoint-30", "checkpoint-50", "notes.txt"}
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid
    assert [item.key for item in store.list(".safepoint/unfinished")] == [".safepoint/unfinished/checkpoint-30"]
    assert remote.steps() == [20]
    assert remote.foreign_steps() == [50]


def test_marks_name_checkpoints_only(tmp_path: Path) -> None:
    """A user who can write a mark cannot have anything else deleted with it."""
    store = FaultyStore(tmp_path / "bucket")
    for name in ("notes", ".safepoint", "checkpoint-x", "sub/checkpoint-3"):
        store.write(f".safepoint/unfinished/{name}", b"")
    store.write("notes/mine.txt", b"the user's own")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    remote.clean(keep=[])
    assert store.read("notes/mine.txt") == b"the user's own"
    assert remote.claimed_by() is not None


def test_files_of_others_are_not_published_over(local: Path, tmp_path: Path) -> None:
    """Under the same name lies what another tool has written: it stays, and the upload says so."""
    store = FaultyStore(tmp_path / "bucket")
    store.write("checkpoint-20/weights.bin", b"another tool's")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    with pytest.raises(StorageError, match=r"weights\.bin; nothing was written"):
        publish(remote, local)
    assert [item.key for item in store.list("checkpoint-20")] == ["checkpoint-20/weights.bin"]


def test_a_deletion_that_was_cut_off_is_finished(local: Path, tmp_path: Path) -> None:
    """Wherever it was cut: the checkpoint is whole, or it is gone after the next start."""
    counting = FaultyStore(tmp_path / "count")
    remote = RemoteFolder(counting)
    remote.claim(claim(1))
    publish(remote, local)
    counting.calls.clear()
    remote.delete("checkpoint-20")
    for when in range(len(counting.calls)):
        store = FaultyStore(tmp_path / f"bucket-{when}")
        remote = RemoteFolder(store)
        remote.claim(claim(1))
        publish(remote, local)
        store.calls.clear()

        def cut(name: str, key: str, store: FaultyStore = store, when: int = when) -> None:
            if len(store.calls) == when + 1:
                raise TransientError("cut off")

        store.before = cut
        with pytest.raises(TransientError, match="cut off"):
            remote.delete("checkpoint-20")
        store.before = lambda name, key: None
        successor = RemoteFolder(store)
        successor.claim(claim(2))
        successor.clean(keep=[])
        folder = tmp_path / f"bucket-{when}" / "checkpoint-20"
        assert verify(folder).is_valid if successor.steps() else not folder.exists()
        assert list(store.list(".safepoint/unfinished")) == []


def test_what_changed_on_the_disk_is_not_uploaded(local: Path, tmp_path: Path) -> None:
    """A flipped bit or a file cut short after the commit never stands in the store under the manifest."""
    for change in (lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1]):
        path = local / "model.safetensors"
        good = path.read_bytes()
        path.write_bytes(change(good))
        store = FaultyStore(tmp_path / "bucket")
        remote = RemoteFolder(store)
        remote.claim(claim(1))
        with pytest.raises(CheckpointError, match="has changed since"):
            publish(remote, local)
        assert remote.steps() == []
        path.write_bytes(good)
    assert publish(remote, local) is Published.NOW


def test_files_added_later_never_take_the_checkpoint_away(local: Path, tmp_path: Path) -> None:
    """While a callback's file follows, the checkpoint in the store stays the valid one that it was."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    publish(remote, local)
    (local / "notes.txt").write_text("added by a callback")
    name_added_files(local)
    seen: list[bool] = []
    store.before = lambda name, key: seen.append((tmp_path / "bucket" / "checkpoint-20" / MANIFEST_NAME).exists())
    assert publish(remote, local) is Published.NOW
    assert all(seen)
    assert "notes.txt" in {entry.path for entry in remote.manifest(20).files}
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid


def test_a_damaged_checkpoint_costs_no_good_one(local: Path, tmp_path: Path) -> None:
    """What the start passed over counts for no policy, until it has been written again."""
    store = FaultyStore(tmp_path / "bucket")
    first = RemoteFolder(store)
    first.claim(claim(1))
    publish(first, local)
    output = prepared(tmp_path / "other")
    commit(output, 10)
    publish(first, output.root / "checkpoint-10")
    remote = RemoteFolder(store, attempt_id="run-1", passed_over=[20])
    assert remote.superseded([KeepNewest(1)]) == []
    (tmp_path / "bucket" / "checkpoint-20" / MANIFEST_NAME).write_bytes(b"damaged")
    publish(remote, local)
    assert remote.superseded([KeepNewest(1)]) == [10]


def test_a_start_that_was_overtaken_takes_nothing(tmp_path: Path) -> None:
    """A start that looked before a newer attempt claimed the location is refused, however late it claims."""
    store = FaultyStore(tmp_path / "bucket")
    slow = RemoteFolder(store)
    assert slow.claimed_by() is None
    RemoteFolder(store).claim(claim(2))
    with pytest.raises(ConflictError):
        slow.claim(claim(1))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"attempt": 1}', b"\xff" * 100])
def test_a_hostile_claim_is_no_claim(content: bytes, tmp_path: Path) -> None:
    """Whatever stands there, it is replaced, and nothing of it is used."""
    store = FaultyStore(tmp_path / "bucket")
    store.write(ATTEMPT_KEY, content)
    remote = RemoteFolder(store)
    assert remote.claimed_by() is None
    remote.claim(claim(1))
    remote.fence()


def test_a_manifest_under_another_name_is_refused(local: Path, tmp_path: Path) -> None:
    """A checkpoint that was copied to another step's name does not count as that step."""
    store = FaultyStore(tmp_path / "bucket")
    store.write(f"checkpoint-99/{MANIFEST_NAME}", (local / MANIFEST_NAME).read_bytes())
    with pytest.raises(ManifestError, match="step is 20"):
        RemoteFolder(store).manifest(99)
