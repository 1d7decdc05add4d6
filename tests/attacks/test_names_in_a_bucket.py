"""Other programs put objects with impossible names below the location: every command works as without them."""

import http.client
import logging
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.storage.location import Location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.opening import open_store, try_access
from safepoint.storage.store import Store
from tests.support.ceph_rgw import CephRgw
from tests.support.checkpoints import commit, prepared
from tests.support.moto_server import MotoServer

_NAMES = [
    *("/absolute", "a//b", "./a", "a/../b", "..", "../../up", "checkpoint-10//x", "checkpoint-10/./x"),
    *("ctrl\x01", "checkpoint-10/tab\there", "del\x7f", "checkpoint-10/", "console-folder/", ".safepoint//x"),
    *(".safepoint/unfinished/../x", "checkpoint-20//safepoint-manifest.json"),
]


def _put(server: MotoServer, key: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("PUT", f"/{server.bucket}/{quote(key, safe='/')}", body=b"stranger")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture
def store(moto: MotoServer, tmp_path: Path) -> Store:
    """A location with one checkpoint."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    store = moto.store(f"names/{uuid.uuid4().hex}")
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="one", since="", host="here"))
    uploader = Uploader(output, remote, policies=(), report=lambda event: None)
    while uploader.upload_next():
        pass
    return store


@pytest.mark.parametrize("name", _NAMES)
def test_a_strangers_name_is_skipped(name: str, store: Store, moto: MotoServer) -> None:
    """Listing, checking, repairing and a start's own clean-up work, and the object stays."""
    before = [item.key for item in store.list()]
    _put(moto, f"{store.location.path}/{name}")
    assert [item.key for item in store.list()] == before
    inventory = Inventory(store)
    assert [(item.name, item.is_complete) for item in inventory.items()] == [("checkpoint-10", True)]
    assert inventory.verify(inventory.item("checkpoint-10")) == ()
    repaired = repair(inventory, deep=False, drop_damaged=True, dry_run=False, idle_s=0)
    assert repaired.damaged == repaired.unfinished == ()
    RemoteFolder.as_guest(store).clean(keep=())
    try_access(store)
    assert inventory.item("checkpoint-10").is_complete


def test_one_warning_for_a_location(store: Store, moto: MotoServer, caplog: pytest.LogCaptureFixture) -> None:
    """A person reads of it once, however often the location is listed."""
    for name in ("a//b", "c//d", "console-folder/"):
        _put(moto, f"{store.location.path}/{name}")
    with caplog.at_level(logging.WARNING, "safepoint"):
        for _ in range(3):
            list(store.list())
    assert len(caplog.records) == 1
    assert str(store.location) in caplog.text


@pytest.mark.parametrize("server", ["moto", pytest.param("rgw", marks=pytest.mark.s3)])
def test_unfinished_uploads_of_any_name(server: str, request: pytest.FixtureRequest) -> None:
    """An unfinished upload of a stranger does not keep those of this run from being deleted."""
    store = request.getfixturevalue(server).store(f"names/{uuid.uuid4().hex}")
    names = ["ctrl\x01", "a//b", "checkpoint-30/a +%2Fb", "checkpoint-30/ä"]
    for name in names:
        store._requests.begin(f"{store.location.path}/{name}", deadline_s=None)
    swept: list[str] = []
    assert store.sweep(only=lambda key: key.startswith("checkpoint-") and swept.append(key) is None) == 2
    assert sorted(swept) == names[2:]


@pytest.mark.s3
def test_on_a_real_server(rgw: CephRgw) -> None:
    """Names that need escapes, and impossible ones, on Ceph RGW."""
    store = rgw.store(f"names/{uuid.uuid4().hex}")
    odd = ["a b", "a+b", "a%2Fb", "ä/ö", " lead", "trail ", "x\u2028y"]
    for key in odd:
        store.write(key, b"")
    root = open_store(Location(scheme=store.location.scheme, bucket=rgw.bucket), _options(rgw))
    for name in ("ctrl\x01", "newline\n", "a//b"):
        assert isinstance(root, ObjectStore)
        assert root._requests is not None
        root._requests._call(_request(f"{store.location.path}/{name}"), None)
    assert [item.key for item in store.list()] == sorted(odd)


def _options(rgw: CephRgw):
    from safepoint.storage.options import StorageOptions

    return StorageOptions.from_environment(rgw.variables)


def _request(key: str):
    from safepoint.storage.s3.requests import Request

    return Request(method="PUT", key=key, query={}, body=b"stranger")


@pytest.mark.parametrize("name", ["new\nline", "ctrl\x01", "checkpoint-10/tab\there", "bytes\udcff"])
def test_in_a_folder(name: str, tmp_path: Path) -> None:
    """The same for names that only a folder can have."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 10)
    (tmp_path / "out" / name).write_bytes(b"stranger")
    inventory = Inventory(open_store(Location.of_folder(output.root)))
    assert [(item.name, item.is_complete) for item in inventory.items()] == [("checkpoint-10", True)]
    assert repair(inventory, deep=False, drop_damaged=True, dry_run=False, idle_s=0).damaged == ()
    assert folder.is_dir()
