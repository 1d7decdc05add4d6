"""A store refuses one object: it is archived, encrypted with a key that is disabled, or a policy names it.

That is a fault of the checkpoint that has the object, and hides no other one. A store that refuses everything is an
error of the store.
"""

from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.removal import remove
from safepoint.errors import AccessDeniedError, NothingValidError, StorageError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.store import Store
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign
from tests.support.hostile_s3 import Request, hostile_store, objects_of
from tests.support.stores import FaultyStore

_ARCHIVED = (403, "InvalidObjectState")
_REFUSALS = [_ARCHIVED, (403, "AccessDenied"), (400, "KMS.DisabledException"), (400, "InvalidRequest")]
_FILES = [MANIFEST_NAME, "model.safetensors", "sub/optimizer.pt"]


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket with the checkpoints of steps 10 and 20."""
    output = prepared(tmp_path / "bucket")
    for step in (10, 20):
        commit(output, step)
    return output.root


class Refuse:
    """Answers requests for some objects with an error."""

    def __init__(self, *keys: str, status: int = 403, code: str = "InvalidObjectState") -> None:
        self.keys, self.status, self.code = keys, status, code

    def __call__(self, request: Request) -> bool:
        if request.command != "GET" or not any(request.key.startswith(f"run/{key}") for key in self.keys):
            return False
        return request.send(self.status, f"<Error><Code>{self.code}</Code></Error>".encode())


def start(store: Store, folder: Path, **options: bool) -> tuple[int, list[CheckpointRejected]]:
    """The step that a start on an empty node resumes from, and what was rejected."""
    output, events = prepared(folder), list[Event]()
    peers, settings = Peers(Place(), timeout_s=1), RunSettings()
    first = FirstStart(peers, output, store, settings)
    point = CheckpointChooser(
        peers, output, Folders(), store, settings, first, events.append, reads_foreign=options.get("trainer", False)
    ).choose()
    assert point is not None
    assert verify(point.path).is_valid
    return point.manifest.step, [event for event in events if isinstance(event, CheckpointRejected)]


@pytest.mark.parametrize(("status", "code"), _REFUSALS)
@pytest.mark.parametrize("file", _FILES)
def test_an_older_one_is_resumed(file: str, status: int, code: str, bucket: Path, tmp_path: Path) -> None:
    """The refused object is named, with the server's reason and what to do."""
    refuse = Refuse(f"checkpoint-20/{file}", status=status, code=code)
    with hostile_store(refuse, objects_of(bucket)) as (store, _):
        step, rejected = start(store, tmp_path / "local")
    assert step == 10
    assert len(rejected) == 1
    assert all(part in rejected[0].line for part in (f"checkpoint-20/{file}", code, "archive"))


@pytest.mark.parametrize("file", _FILES)
def test_commands_show_the_others(file: str, bucket: Path) -> None:
    """`list` and `verify` report it; the newest complete checkpoint is another one; `prune` does not touch it."""
    with hostile_store(Refuse(f"checkpoint-20/{file}"), objects_of(bucket)) as (store, _):
        inventory = Inventory(store)
        newest, older = inventory.items()
        assert older.is_complete
        assert inventory.verify(older) == ()
        faults = inventory.verify(newest)
        assert [fault.file for fault in faults] == [file]
        assert "InvalidObjectState" in faults[0].reason
        assert newest.is_complete == (file != MANIFEST_NAME)
        assert inventory.superseded(parse_policies("newest=1")) == []


@pytest.mark.parametrize("name", ["a{:02}", "checkpoint-{}", "zz{:02}"])
@pytest.mark.parametrize("file", [MANIFEST_NAME, "model.safetensors"])
@pytest.mark.parametrize("claim", [{}, {"run/.safepoint/attempt.json": b"{}"}])
def test_many_refused_objects(name: str, file: str, claim: dict[str, bytes], bucket: Path) -> None:
    """A person who may create objects creates a hundred archived ones, and chooses their names: none is an error of
    the store."""
    names = [name.format(number + 100) for number in range(100)]
    refused = {f"run/{one}/{file}": b"{}" for one in names}
    objects = {**claim, **objects_of(bucket), **refused, f"run/checkpoint-99/{MANIFEST_NAME}": b"{}"}
    with hostile_store(Refuse("checkpoint-99", *names), objects) as (store, _):
        inventory = Inventory(store)
        assert [one.name for one in inventory.items() if one.is_complete] == ["checkpoint-20", "checkpoint-10"]
        assert inventory.verify(inventory.item("checkpoint-10")) == ()


def test_a_checkpoint_without_a_readable_manifest_is_not_deleted(bucket: Path) -> None:
    """It may be of a later release; the failure is reported."""
    with hostile_store(Refuse(f"checkpoint-20/{MANIFEST_NAME}"), objects_of(bucket)) as (store, server):
        inventory = Inventory(store)
        removal = remove(inventory, [inventory.items()[0]])
        assert len(removal.failed) == 1
        assert f"run/checkpoint-20/{MANIFEST_NAME}" in server.objects


@pytest.mark.parametrize("refuse", [Refuse(""), Refuse("", code="AccessDenied")])
def test_a_store_that_gives_nothing(refuse: Refuse, bucket: Path, tmp_path: Path) -> None:
    """Listings work, and every object is refused: exit code 13, not 14."""
    with hostile_store(refuse, objects_of(bucket)) as (store, _):
        with pytest.raises(AccessDeniedError):
            start(store, tmp_path / "local")
        with pytest.raises(AccessDeniedError):
            Inventory(store).items()


def test_keys_that_have_expired(bucket: Path, tmp_path: Path) -> None:
    """They are no fault of a checkpoint, even if the server still gives an object."""
    refuse = Refuse(f"checkpoint-20/{MANIFEST_NAME}", code="ExpiredToken")
    with hostile_store(refuse, objects_of(bucket)) as (store, _), pytest.raises(StorageError, match="expired"):
        start(store, tmp_path / "local")


def test_all_checkpoints_are_refused(bucket: Path, tmp_path: Path) -> None:
    """Training does not begin at step 0."""
    objects = {**objects_of(bucket), "run/.safepoint/attempt.json": b"{}"}
    with hostile_store(Refuse("checkpoint-"), objects) as (store, _), pytest.raises(NothingValidError):
        start(store, tmp_path / "local")


def test_another_programs_checkpoint(tmp_path: Path) -> None:
    """The newest one of a plain Trainer has a refused file: the older one is used, and the other one examined."""
    for step in (4, 8):
        write_foreign(tmp_path / "bucket", step)
    with hostile_store(Refuse("checkpoint-8/optimizer.pt"), objects_of(tmp_path / "bucket")) as (store, _):
        step, rejected = start(store, tmp_path / "local", trainer=True)
        inventory = Inventory(store)
        faults = inventory.verify(inventory.items()[0])
    assert step == 4
    assert "checkpoint-8/optimizer.pt" in rejected[0].line
    assert [fault.file for fault in faults] == ["optimizer.pt"]


# ---- a run that writes -------------------------------------------------------------------------------------------


@pytest.fixture
def claimed(bucket: Path) -> tuple[RemoteFolder, set[str]]:
    """A claimed folder, and the keys that it refuses to read."""
    refused: set[str] = set()

    def before(name: str, key: str) -> None:
        if name in {"read", "stat"} and key in refused:
            raise AccessDeniedError(f"GET {key}: refused")

    remote = RemoteFolder(FaultyStore(bucket, before))
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="", host="here"))
    return remote, refused


@pytest.mark.parametrize("key", [f"checkpoint-20/{MANIFEST_NAME}", f"{UNFINISHED}/checkpoint-20"])
def test_a_start_cleans_around_it(key: str, claimed: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A mark and a refused object together do not end a start, and nothing is deleted on their account."""
    remote, refused = claimed
    remote.mark("checkpoint-20", {"model.safetensors": 5120})
    refused.add(key)
    assert remote.clean(keep=()) == 0
    assert "checkpoint-20" in caplog.text
    refused.clear()
    assert Inventory(remote.store).items()[0].is_complete


def test_retention_of_a_run(claimed: Any, tmp_path: Path) -> None:
    """The refused one is neither counted nor deleted; the others are."""
    remote, refused = claimed
    output = OutputFolder(remote.store.location.folder)
    for step in (30, 40):
        commit(output, step)
        remote.note_commit(step)
    refused.add(f"checkpoint-20/{MANIFEST_NAME}")
    assert remote.superseded(parse_policies("newest=1"), run_id="run") == [10, 30]
