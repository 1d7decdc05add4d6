"""A checkpoint is in the store exactly while its manifest is, and a writer that was replaced publishes nothing."""

from pathlib import Path

import pytest

from holdfast.checkpoint.catalog import checkpoint_name
from holdfast.checkpoint.manifest import MANIFEST_NAME
from holdfast.checkpoint.remote import ATTEMPT_KEY, Claim, RemoteFolder
from holdfast.checkpoint.verify import verify
from holdfast.errors import ConflictError, ManifestError, StorageError
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore


def claim(number: int) -> Claim:
    return Claim(run_id="run", attempt=number, attempt_id=f"run-{number}", since="now", host="node")


def publish(remote: RemoteFolder, folder: Path) -> bool:
    return remote.publish(folder, name=folder.name, record=folder.parent / f"{folder.name}.sent")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return commit(prepared(tmp_path / "local"), 20)


def test_what_was_published_is_valid_and_published_once(local: Path, tmp_path: Path) -> None:
    """The bucket's layout is the folder's, every byte of it; a second publish sends nothing."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    assert publish(remote, local)
    assert remote.steps() == [20]
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid
    store.calls.clear()
    assert not publish(remote, local)
    assert {name for name, _ in store.calls} == {"read"}


def test_the_manifest_is_written_last(local: Path, tmp_path: Path) -> None:
    """Whatever request fails, a later publish completes it, sends no file twice, and before that nothing is there."""
    total = FaultyStore(tmp_path / "count")
    counting = RemoteFolder(total)
    counting.claim(claim(1))
    total.calls.clear()
    publish(counting, local)
    num_calls = len(total.calls)
    assert total.calls[-1] == ("write", f"checkpoint-20/{MANIFEST_NAME}")
    for failing in range(num_calls):
        bucket = tmp_path / f"bucket-{failing}"
        store = FaultyStore(bucket)
        remote = RemoteFolder(store)
        remote.claim(claim(1))
        store.calls.clear()

        def fail(name: str, key: str, store: FaultyStore = store, failing: int = failing) -> None:
            if len(store.calls) == failing + 1:
                raise StorageError("cut off")

        store.before = fail
        with pytest.raises(StorageError, match="cut off"):
            publish(remote, local)
        assert remote.steps() == []
        store.before = lambda name, key: None
        uploaded = {key for name, key in store.calls if name == "upload"}
        store.calls.clear()
        assert publish(remote, local)
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
    assert writes[0] == ("delete", f"checkpoint-20/{MANIFEST_NAME}")
    assert writes[-1] == ("write", f"checkpoint-20/{MANIFEST_NAME}")
    assert verify(tmp_path / "bucket" / "checkpoint-20").is_valid


def test_a_replaced_writer_publishes_nothing(local: Path, tmp_path: Path) -> None:
    """From whichever request on another attempt has claimed the location, the older one ends without a commit."""
    counting = FaultyStore(tmp_path / "count")
    remote = RemoteFolder(counting)
    remote.claim(claim(1))
    counting.calls.clear()
    publish(remote, local)
    num_calls = len(counting.calls)
    for when in range(num_calls - 1):
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
            zombie.take_down(20)


def test_two_claims_at_once_leave_one(tmp_path: Path) -> None:
    """Compare-and-swap: whoever read the claim before the other wrote it is refused."""
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


def test_cleaning_takes_what_is_torn_and_keeps_what_goes_on(local: Path, tmp_path: Path) -> None:
    """Folders without a manifest go, unless this node holds the checkpoint and is going to upload it."""
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    publish(remote, local)
    for step in (30, 40):
        store.write(f"{checkpoint_name(step)}/model.safetensors", b"torn")
    store.write("notes.txt", b"the user's own")
    remote.claim(claim(2))
    assert remote.clean(keep_steps=[30]) == 1
    keys = {item.key.partition("/")[0] for item in store.list()}
    assert keys == {".holdfast", "checkpoint-20", "checkpoint-30", "notes.txt"}


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
    with pytest.raises(ManifestError, match="step 20"):
        RemoteFolder(store).manifest(99)
