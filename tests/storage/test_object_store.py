"""What only object stores do: uploads that continue after a failure, credentials, and bounded memory."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from safepoint.errors import AccessDeniedError, ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.location import parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.opening import check_access, open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Content, Sink
from safepoint.testing.fault_proxy import FaultProxy
from tests.support.ceph_rgw import CephRgw
from tests.support.library_store import library_store
from tests.support.memory import MEASURE
from tests.support.s3_server import S3Server
from tests.support.streams import stream_of

Server = S3Server


def new_store(server: Server) -> ObjectStore:
    store = server.store(f"tests/{uuid.uuid4().hex}")
    assert isinstance(store, ObjectStore)
    return store


class CutError(Exception):
    """Ends an upload in these tests."""


def cut_after(num_parts: int):
    seen: list[int] = []

    def progress(num_bytes: int) -> None:
        seen.append(num_bytes)
        if len(seen) >= num_parts:
            raise CutError

    return progress


def test_a_cut_upload_goes_on(server: Server, tmp_path: Path) -> None:
    """Another store object repeats an interrupted upload, and sends only the missing parts."""
    store, source = new_store(server), tmp_path / "source"
    source.write_bytes(os.urandom(100 << 20))
    with pytest.raises(CutError):
        store.upload("big", source, progress=cut_after(3))
    assert list(store.list()) == []
    moved: list[int] = []
    again = ObjectStore(store.location, StorageOptions.from_environment(server.variables))
    again.upload("big", source, progress=moved.append)
    assert sum(moved) == 100 << 20
    assert moved[0] >= 3 * (16 << 20), "parts that had arrived are reported at once, together"
    assert bytes(again.read("big", most_bytes=1 << 30)) == source.read_bytes()
    assert again.sweep() == 0


def test_a_cut_stream_goes_on(server: Server) -> None:
    """An interrupted stream is read again from the beginning, and only the missing parts are sent."""
    store = new_store(server)
    data = os.urandom(60 << 20)
    with pytest.raises(CutError):
        store.upload("big", stream_of(data), progress=cut_after(3))
    assert list(store.list()) == []
    with FaultProxy(f"127.0.0.1:{server.port}") as proxy:
        variables = {**server.variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        again = ObjectStore(store.location, StorageOptions.from_environment(variables))
        moved: list[int] = []
        again.upload("big", stream_of(data), progress=moved.append)
        assert proxy.requests["PUT"] <= 8 - 3
    assert sum(moved) == len(data)
    assert bytes(store.read("big")) == data
    assert store.sweep() == 0


def test_a_stream_takes_nothing_over_from_another(server: Server) -> None:
    """A stream with other bytes than the interrupted one sends every part that differs."""
    store = new_store(server)
    data = os.urandom(40 << 20)
    with pytest.raises(CutError):
        store.upload("big", stream_of(data), progress=cut_after(3))
    other = data[: 8 << 20] + os.urandom(32 << 20)
    store.upload("big", stream_of(other))
    assert bytes(store.read("big")) == other
    assert store.sweep() == 0


def test_a_stream_that_obstore_sends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """To Google and Azure, obstore sends the parts."""
    store = library_store(server, f"tests/{uuid.uuid4().hex}", monkeypatch)
    data = os.urandom((60 << 20) + 5)
    moved: list[int] = []
    store.upload("big", stream_of(data), progress=moved.append)
    assert sum(moved) == len(data)
    assert bytes(store.read("big")) == data
    for broken in (lambda: store.upload("new", stream_of(data), fence=_cut), lambda: _torn(store, "new", data)):
        with pytest.raises(CutError):
            broken()
    assert [item.key for item in store.list()] == ["big"]


def test_a_stream_that_obstore_sends_ends_at_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, and no object appears."""
    store = library_store(server, f"tests/{uuid.uuid4().hex}", monkeypatch)
    with pytest.raises(TransientError, match="0 of 41943040 bytes were sent before the deadline"):
        store.upload("big", stream_of(os.urandom(40 << 20)), deadline_s=clock.monotonic_s())
    assert list(store.list()) == []


def _cut() -> None:
    raise CutError


def _torn(store: ObjectStore, key: str, data: bytes) -> None:
    def write_to(sink: Sink) -> None:
        stream_of(data[:-1]).write_to(sink)
        raise CutError

    store.upload(key, Content(size_bytes=len(data), write_to=write_to))


def test_memory_of_a_stream_is_bounded(server: Server) -> None:
    """A stream of half a gigabyte is uploaded with less than 64 MB of memory."""
    store = new_store(server)
    program = f"""
{MEASURE}
import sys
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Content
store = open_store(parse_location(sys.argv[1]))
store.write("warm", b"up")
block = memoryview(bytearray(1 << 20))
def write_to(sink):
    for number in range(512):
        block[:8] = number.to_bytes(8, "little")
        sink(block)
begin_measure()
store.upload("big", Content(size_bytes=512 << 20, write_to=write_to))
print(grown_mb())
"""
    grown_mb = float(_printed(program, server, str(store.location)))
    print(f"{grown_mb:.1f} MB")
    assert grown_mb <= 64
    assert bytes(store.read("big", start=300 << 20, length=8)) == (300).to_bytes(8, "little")


def _printed(program: str, server: Server, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **server.variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_parts_of_another_content_are_not_taken_over(server: Server, tmp_path: Path) -> None:
    """The file has changed since the first try: every part is sent, and none of the first is left."""
    store, source = new_store(server), tmp_path / "source"
    source.write_bytes(os.urandom(40 << 20))
    with pytest.raises(CutError):
        store.upload("big", source, progress=cut_after(2))
    source.write_bytes(os.urandom(40 << 20))
    store.upload("big", source)
    assert bytes(store.read("big")) == source.read_bytes()
    assert store.sweep() == 0


def test_a_sweep_keeps_what_is_to_go_on(server: Server, tmp_path: Path) -> None:
    """A sweep keeps uploads below a kept folder only; `checkpoint-1` does not keep `checkpoint-10`."""
    store, source = new_store(server), tmp_path / "source"
    source.write_bytes(os.urandom(40 << 20))
    keys = ("checkpoint-1/model", "checkpoint-10/model", "other")
    for key in keys:
        with pytest.raises(CutError):
            store.upload(key, source, progress=cut_after(1))
    assert store.sweep(only=lambda key: not key.startswith("checkpoint-1/"), keys=keys) == 2
    assert store.sweep(keys=keys) == 1
    assert store.sweep(keys=keys) == 0


def test_a_swept_upload_cannot_be_finished(server: Server, tmp_path: Path) -> None:
    """The writer of a swept upload gets an error, and no object appears."""
    store, source = new_store(server), tmp_path / "source"
    source.write_bytes(os.urandom(20 << 20))
    with pytest.raises(ObjectNotFoundError):
        store.upload("big", source, fence=lambda: _swept(store))
    assert list(store.list()) == []


def _swept(store: ObjectStore) -> None:
    assert store.sweep(keys=["big", "other"]) == 1


def test_memory_is_bounded(server: Server, tmp_path: Path) -> None:
    """Half a gigabyte is uploaded and downloaded with less than a quarter of that in memory."""
    store, source = new_store(server), tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(32):
            file.write(os.urandom(16 << 20))
    program = f"""
{MEASURE}
import sys
from pathlib import Path
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
store = open_store(parse_location(sys.argv[1]))
store.write("warm", b"up")
begin_measure()
store.upload("big", Path(sys.argv[2]))
for start in range(0, 512 << 20, 16 << 20):
    store.read("big", start=start, length=16 << 20)
print(grown_mb())
"""
    printed = _printed(program, server, str(store.location), str(source))
    assert float(printed) <= 256, f"{printed} MB"


def test_a_missing_bucket_is_named(server: Server) -> None:
    """A missing bucket is reported at once, with the location and a hint."""
    store = open_store(parse_location("s3://no-such-bucket/x"), StorageOptions.from_environment(server.variables))
    with pytest.raises(ObjectNotFoundError, match="no such bucket") as caught:
        check_access(store)
    assert "s3://no-such-bucket/x" in str(caught.value)


def test_a_host_that_is_not_there(server: Server) -> None:
    """An unreachable host is reported at the deadline, with what to check."""
    variables = {**server.variables, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    store = open_store(server.location("x"), StorageOptions.from_environment(variables))
    begun = clock.monotonic_s()
    with pytest.raises(TransientError, match="cannot be reached") as caught:
        store.read("key", deadline_s=begun + 1)
    assert "AWS_ENDPOINT_URL_S3" in str(caught.value)
    assert clock.monotonic_s() - begun < 10


@pytest.mark.s3
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-value"}, "the credentials are wrong"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, "the credentials are wrong"),
        (
            dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), CephRgw.other_keys, strict=True)),
            "do not permit the request",
        ),
    ],
)
def test_wrong_keys_and_missing_permission(changes: dict[str, str], said: str, rgw: CephRgw, tmp_path: Path) -> None:
    """Each has its own message, for small requests and multipart uploads, without any secret."""
    store = rgw.store("denied", **changes)
    with pytest.raises(AccessDeniedError, match=said) as caught:
        check_access(store)
    source = tmp_path / "source"
    source.write_bytes(bytes(20 << 20))
    with pytest.raises(AccessDeniedError, match=said) as large:
        store.upload("big", source)
    for text in (
        str(caught.value),
        str(large.value),
        repr(store),
        repr(StorageOptions.from_environment({**rgw.variables, **changes})),
    ):
        assert changes.get("AWS_SECRET_ACCESS_KEY", "secret!") not in text


def test_every_error_is_a_storage_error(server: Server) -> None:
    """No exception of the library reaches the caller."""
    store = new_store(server)
    with pytest.raises(StorageError):
        store.read("nothing", start=5, length=5)
