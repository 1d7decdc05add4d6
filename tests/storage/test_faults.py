"""An object store over a network that fails: the right content, or the right error in time, never wrong bytes."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.errors import AccessDeniedError, ConditionError, TransientError
from safepoint.foundation import clock
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import ABSENT, Store
from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind, add_mixture
from tests.support.s3_server import S3Server
from tests.support.streams import stream_of

_PASSING = [
    Fault(kind=Kind.STATUS, status=500, nth=1),
    Fault(kind=Kind.STATUS, status=503, nth=1),
    Fault(kind=Kind.STATUS, status=429, nth=1),
    Fault(kind=Kind.RESET_BEFORE_BODY, nth=1),
    Fault(kind=Kind.RESET_AFTER_BODY, nth=1),
    Fault(kind=Kind.LOST_ANSWER, nth=1),
    Fault(kind=Kind.TRUNCATED, nth=1),
    Fault(kind=Kind.WRONG_LENGTH, nth=1),
    Fault(kind=Kind.CUT_LIST, nth=1, contains="list-type"),
]


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(f"127.0.0.1:{server.port}") as running:
        yield running


@pytest.fixture
def store(proxy: FaultProxy, server: S3Server) -> Store:
    variables = {**server.variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
    return open_store(server.location(f"faults/{uuid.uuid4().hex}"), StorageOptions.from_environment(variables))


@pytest.mark.parametrize("fault", _PASSING, ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_a_fault_that_passes_is_not_seen(fault: Fault, store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """Each request of each method fails once, and the result is the same as without the fault."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(40 << 20))

    def broken(action):
        proxy.clear()
        proxy.add(fault)
        return action()

    version = broken(lambda: store.write("a/key", b"one", condition=ABSENT))
    assert broken(lambda: store.stat("a/key")).version == version
    assert bytes(broken(lambda: store.read("a/key"))) == b"one"
    assert [item.key for item in broken(lambda: list(store.list("a")))] == ["a/key"]
    broken(lambda: store.upload("a/big", stream_of(os.urandom(40 << 20))))
    broken(lambda: store.upload("a/big", source))
    assert bytes(broken(lambda: store.read("a/big", start=0, length=1 << 20))) == source.read_bytes()[: 1 << 20]
    streamed = bytearray()
    broken(lambda: store.stream("a/big", streamed.extend, start=1, length=(40 << 20) - 1))
    assert streamed == source.read_bytes()[1:]
    assert bytes(store.read("a/big")) == source.read_bytes()
    broken(lambda: store.delete("a/key"))
    assert [item.key for item in store.list()] == ["a/big"]
    assert broken(store.sweep) == 0
    if fault.kind is not Kind.CUT_LIST:
        assert proxy.injected[fault.kind] >= 5


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_any_answer_of_an_upload_may_be_lost(
    kind: str, nth: int, store: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """One answer to an upload's requests is lost, and the object is complete."""
    source, data = tmp_path / "source", os.urandom(36 << 20)
    source.write_bytes(data)
    store.write("big", b"before")
    proxy.add(Fault(kind=Kind.LOST_ANSWER, nth=nth))
    store.upload("big", source if kind == "file" else stream_of(data))
    assert bytes(store.read("big")) == data


def test_a_lost_answer_does_not_turn_another_writers_object_into_ours(store: Store, proxy: FaultProxy) -> None:
    """Another writer writes between two tries: ConditionError."""
    store.write("key", b"theirs")
    proxy.add(Fault(kind=Kind.RESET_AFTER_BODY, method="PUT", nth=1))
    with pytest.raises(ConditionError):
        store.write("key", b"ours", condition=ABSENT)
    assert bytes(store.read("key")) == b"theirs"


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.RESET_BEFORE_BODY, Kind.TRUNCATED, Kind.STALL])
def test_a_fault_that_lasts_ends_at_the_deadline(kind: Kind, store: Store, proxy: FaultProxy) -> None:
    """A lasting fault raises TransientError, with the number of tries if there were several."""
    store.write("key", bytes(10_000))
    proxy.add(Fault(kind=kind, seconds=30))
    begun = clock.monotonic_s()
    with pytest.raises(TransientError):
        store.read("key", deadline_s=begun + 2)
    begun = clock.monotonic_s()
    if kind is not Kind.TRUNCATED:  # half of it arrives with each try, and is kept
        with pytest.raises(TransientError):
            store.stream("key", lambda block: None, start=0, length=10_000, deadline_s=begun + 2)
    assert clock.monotonic_s() - begun < 10


def test_a_refusal_is_not_repeated(store: Store, proxy: FaultProxy) -> None:
    """A request that is answered with 403 is not repeated."""
    proxy.add(Fault(kind=Kind.STATUS, status=403))
    with pytest.raises(AccessDeniedError):
        store.write("key", b"")
    assert proxy.requests["PUT"] == 1


def test_one_request_in_five_fails(store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """Forty objects and three large ones arrive unchanged over a network that fails often."""
    add_mixture(proxy, 0.2)
    for number in range(40):
        store.write(f"small/{number}", f"{number}".encode(), condition=ABSENT)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(50 << 20))
    for number in range(3):
        store.upload(f"big/{number}", source)
    proxy.clear()
    assert [bytes(store.read(f"small/{number}")) for number in range(40)] == [
        f"{number}".encode() for number in range(40)
    ]
    assert all(bytes(store.read(f"big/{number}")) == source.read_bytes() for number in range(3))
