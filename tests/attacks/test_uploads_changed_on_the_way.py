"""A bit of an upload changes on its way to the store: it is sent again, or fails, and never counts."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.tools.copy import copy, export
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import SafepointError, TransientError
from safepoint.foundation import clock
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.file_parts import FilePart, md5_of
from safepoint.storage.s3.requests import S3Requests
from safepoint.storage.store import ABSENT, Store
from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind
from tests.support.checkpoints import commit, keep_final, prepared
from tests.support.library_store import library_store
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server
from tests.support.streams import stream_of

_LARGE = os.urandom((33 << 20) + 5)
_FLIP_FIRST = Fault(kind=Kind.FLIPPED, method="PUT", nth=1)
_FLIP_ALL = Fault(kind=Kind.FLIPPED, method="PUT")


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(f"127.0.0.1:{server.port}") as running:
        yield running


@pytest.fixture
def store(proxy: FaultProxy, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Its requests pass the proxy, as do those of commands in this process."""
    variables = {**server.variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return open_store(server.location(f"changed/{uuid.uuid4().hex}"), StorageOptions.from_environment(variables))


def _large_file(folder: Path) -> Path:
    (folder / "large").write_bytes(_LARGE)
    return folder / "large"


_Write = Callable[..., object]
_WRITES: dict[str, tuple[_Write, bytes]] = {
    "small": (lambda store, _, **until: store.write("key", b"content", **until), b"content"),
    "new": (lambda store, _, **until: store.write("key", b"content", condition=ABSENT, **until), b"content"),
    "fenced": (lambda store, _, **until: store.upload("key", stream_of(b"a"), fence=lambda: None, **until), b"a"),
    "file in parts": (lambda store, folder, **until: store.upload("key", _large_file(folder), **until), _LARGE),
    "stream in parts": (lambda store, _, **until: store.upload("key", stream_of(_LARGE), **until), _LARGE),
}


@pytest.mark.parametrize("name", _WRITES)
def test_what_changed_once_is_sent_again(name: str, store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """One body, or one part, arrives with another bit: the object has the right content in the end."""
    write, content = _WRITES[name]
    proxy.add(_FLIP_FIRST)
    write(store, tmp_path)
    assert proxy.injected[Kind.FLIPPED] == 1
    assert bytes(store.read("key")) == content


@pytest.mark.parametrize("name", _WRITES)
def test_what_always_changes_is_an_error(name: str, store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """A machine that damages every body makes the write fail; it does not return."""
    write, _ = _WRITES[name]
    proxy.add(_FLIP_ALL)
    with pytest.raises(TransientError, match="changed on its way"):
        write(store, tmp_path, deadline_s=clock.monotonic_s() + 2.5 * PATIENCE)


@pytest.mark.parametrize("name", ["file in parts", "stream in parts"])
def test_parts_that_obstore_sends_are_read_back(
    name: str, proxy: FaultProxy, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ETags of its parts are unknown, and servers may compare nothing. One that compares gets the part again."""
    write, content = _WRITES[name]
    store = library_store(server, f"changed/{uuid.uuid4().hex}", monkeypatch, endpoint=proxy.endpoint)
    proxy.add(_FLIP_FIRST)
    try:
        write(store, tmp_path)
    except TransientError as error:
        message = error.message
    else:
        message = ""
        assert bytes(store.read("key")) == content
    assert not message or "changed on its way" in message


@pytest.mark.parametrize("name", ["file in parts", "stream in parts"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_without_md5_in_etags_an_upload_is_read_back(
    name: str,
    is_changed: bool,
    moto: MotoServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose ETags say nothing, and which compares nothing, is asked for what has arrived."""
    send, complete = S3Requests.send_part, S3Requests.complete
    etags: dict[str, str] = {}

    def send_other(self, upload, number, source, md5, **kwargs):
        if is_changed and number == 2:
            source = memoryview(bytes(source.size_bytes if isinstance(source, FilePart) else len(source)))
            md5 = md5_of(source)
        etag = send(self, upload, number, source, md5, **kwargs)
        etags[f"odd-{number}"] = etag
        return f"odd-{number}"

    monkeypatch.setattr(S3Requests, "send_part", send_other)
    monkeypatch.setattr(
        S3Requests,
        "complete",
        lambda self, upload, odd, **kwargs: complete(
            self, upload, {number: etags[etag] for number, etag in odd.items()}, **kwargs
        ),
    )
    write, content = _WRITES[name]
    store = moto.store(f"changed/{uuid.uuid4().hex}")
    if is_changed:
        with pytest.raises(TransientError, match="changed on its way"):
            write(store, tmp_path)
    else:
        write(store, tmp_path)
        assert bytes(store.read("key")) == content


def _claimed(store: Store) -> RemoteFolder:
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="one", since="", host="here"))
    return remote


def _uploader(output: OutputFolder, store: Store, keep: str | None = None) -> Uploader:
    return Uploader(output, _claimed(store), policies=parse_policies(keep), report=lambda event: None)


@pytest.mark.parametrize("path", ["uploader", "final", "copy", "export", "manifest"])
def test_every_way_to_the_store(path: str, store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """What counts in the store is what was in the folder, though a file of it changed on the way."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    name = "checkpoint-10"
    contains = "safepoint-manifest.json" if path == "manifest" else "model.safetensors"
    if path == "final":
        name, contains = "final", "config.json"
        keep_final(output, config_json=b"{}" * 50)
    fault = Fault(kind=Kind.FLIPPED, method="PUT", contains=contains, nth=1)
    if path in {"uploader", "manifest", "final"}:
        uploader = _uploader(output, store)
        uploader.with_final = True
        proxy.add(fault)
        while uploader.upload_next():
            pass
    else:
        proxy.add(fault)
        source = Inventory(open_store(store.location.of_folder(output.root)))
        if path == "copy":
            copy(source, source.item(name), store.location)
        else:
            name = "model"
            export(source, source.item("checkpoint-10"), store.location.child(name))
    assert proxy.injected[Kind.FLIPPED] == 1
    if path == "export":
        folder = output.root / "checkpoint-10"
        assert bytes(store.read("model/model.safetensors")) == (folder / "model.safetensors").read_bytes()
        return
    stored = Inventory(store)
    assert stored.verify(stored.item(name)) == ()


def test_the_last_good_one_stays(store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """Every upload of the next checkpoint changes on the way: it does not count, and nothing is pruned for it."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    uploader = _uploader(output, store, "newest=1")
    assert uploader.upload_next()
    commit(output, 20)
    proxy.add(Fault(kind=Kind.FLIPPED, method="PUT", contains="checkpoint-20/"))
    uploader.deadline_s = clock.monotonic_s() + 2
    with pytest.raises(SafepointError):
        uploader.upload_next()
    stored = Inventory(store)
    assert [item.name for item in stored.items() if item.is_complete] == ["checkpoint-10"]
    assert stored.verify(stored.item("checkpoint-10")) == ()
    proxy.clear()
    uploader.deadline_s = None
    while uploader.upload_next():
        pass
    assert stored.verify(stored.item("checkpoint-20")) == ()
