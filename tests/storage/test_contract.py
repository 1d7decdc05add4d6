"""The contract of the Protocol `Store`, tested on a folder, on moto and on Ceph RGW."""

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safepoint.errors import ConditionError, ObjectNotFoundError, StorageError
from safepoint.foundation import clock
from safepoint.storage.library.library_bucket import LibraryBucket
from safepoint.storage.opening import check_access
from safepoint.storage.store import ABSENT, WHOLE_BYTES, Condition, Content, Store
from tests.support.streams import stream_of

_ODD = ["a b", "ä/ö", "a%2Fb", "a+b&c=d", "x" * 200, "dots...", "q?u#e", "tilde~_-.", "'\"quote"]
_BAD = ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\nb", "a\x00"]


def test_what_was_written_is_read(store: Store) -> None:
    """Content, size and version agree, and new content has a new version."""
    first = store.write("folder/key", b"one")
    assert bytes(store.read("folder/key")) == b"one"
    found = store.stat("folder/key")
    assert (found.key, found.size_bytes, found.version) == ("folder/key", 3, first)
    assert abs(found.modified_s - clock.wall_s()) < 3600
    second = store.write("folder/key", b"two, longer")
    assert second != first
    assert bytes(store.read("folder/key")) == b"two, longer"


def test_an_empty_object_is_one(store: Store, tmp_path: Path) -> None:
    """An object of zero bytes can be written, uploaded, listed and read."""
    store.write("empty", b"")
    (tmp_path / "nothing").touch()
    store.upload("uploaded", tmp_path / "nothing")
    assert [item.size_bytes for item in store.list()] == [0, 0]
    assert bytes(store.read("empty")) == bytes(store.read("uploaded", start=0, length=0)) == b""


@pytest.mark.parametrize("key", _ODD)
def test_odd_names_are_kept(key: str, store: Store) -> None:
    """A name that has to be escaped in requests is returned unchanged."""
    store.write(key, b"content")
    assert [item.key for item in store.list()] == [key]
    assert bytes(store.read(key)) == b"content"
    assert store.stat(key).size_bytes == 7
    store.delete(key)
    assert list(store.list()) == []


@pytest.mark.parametrize("key", _BAD)
def test_keys_that_could_leave_the_place_are_refused(key: str, store: Store, tmp_path: Path) -> None:
    """Every method refuses such a key before it sends or opens anything."""
    (tmp_path / "file").touch()
    for call in (
        lambda: store.stat(key),
        lambda: store.read(key),
        lambda: store.write(key, b""),
        lambda: store.delete(key),
        lambda: store.upload(key, tmp_path / "file"),
        lambda: store.upload(key, stream_of(b"")),
    ):
        with pytest.raises(ValueError, match="key"):
            call()


def test_what_is_missing_is_said_to_be(store: Store) -> None:
    """For an absent object, reading raises, deleting succeeds, and listing yields nothing."""
    for call in (lambda: store.stat("a/b"), lambda: store.read("a/b"), lambda: store.read("a", start=1, length=1)):
        with pytest.raises(ObjectNotFoundError):
            call()
    store.delete("a/b")
    assert list(store.list()) == list(store.list("a")) == []


def test_listing_knows_folders_and_order(store: Store) -> None:
    """A listing of `a/` has its objects at any depth, sorted by key, and no objects below `ab`."""
    for key in ("b", "a/2", "ab/1", "a/1/x", "a/10", "a-b"):
        store.write(key, b"")
    assert [item.key for item in store.list("a")] == ["a/1/x", "a/10", "a/2"]
    assert [item.key for item in store.list()] == sorted(["b", "a/2", "ab/1", "a/1/x", "a/10", "a-b"])
    assert [item.key for item in store.list("a/1")] == ["a/1/x"]


def test_more_objects_than_a_page_holds(store: Store) -> None:
    """A listing of more than a thousand objects has each of them once."""
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: store.write(f"many/{number:04}", b""), range(1101)))
    assert [item.key for item in store.list("many")] == [f"many/{number:04}" for number in range(1101)]


def test_ranges(store: Store) -> None:
    """A range yields exactly the requested bytes, or an error that names the size of the object."""
    data = bytes(range(256))
    store.write("range", data)
    assert bytes(store.read("range", start=10, length=20)) == data[10:30]
    assert bytes(store.read("range", start=250)) == data[250:]
    assert bytes(store.read("range", start=0, length=256)) == data
    for start, length in ((250, 7), (256, 1), (1000, 1)):
        with pytest.raises(StorageError):
            store.read("range", start=start, length=length)


def test_a_stream_hands_over_each_byte_once(store: Store) -> None:
    """A stream yields each byte of a range once, in order; an object that is too short or absent is an error."""
    data = os.urandom(3_000_000)
    store.write("stream", data)
    for start, length in ((0, len(data)), (1, 2_999_999), (1_048_576, 1_048_577), (2_999_999, 1), (5, 0)):
        received = bytearray()
        store.stream("stream", received.extend, start=start, length=length)
        assert received == data[start : start + length]
    with pytest.raises(StorageError):
        store.stream("stream", received.extend, start=2_999_999, length=2)
    with pytest.raises(StorageError):
        store.stream("stream", received.extend, start=3_000_000, length=1)
    with pytest.raises(ObjectNotFoundError):
        store.stream("nothing", received.extend, start=0, length=1)


def test_a_condition_that_does_not_hold_writes_nothing(store: Store) -> None:
    """Both conditions, "absent" and "of this version", are checked."""
    first = store.write("key", b"1", condition=ABSENT)
    with pytest.raises(ConditionError):
        store.write("key", b"2", condition=ABSENT)
    second = store.write("key", b"22", condition=Condition(version=first))
    with pytest.raises(ConditionError):
        store.write("key", b"333", condition=Condition(version=first))
    assert bytes(store.read("key")) == b"22"
    store.write("key", b"4444", condition=Condition(version=second))
    with pytest.raises((ConditionError, ObjectNotFoundError)):
        store.write("missing", b"1", condition=Condition(version=second))
    assert [item.key for item in store.list()] == ["key"]


@pytest.mark.parametrize("kind", ["absent", "version"])
def test_of_several_writers_one_wins(kind: str, store: Store) -> None:
    """Of twenty threads with one condition, one succeeds and nineteen get a ConditionError."""
    condition = ABSENT if kind == "absent" else Condition(version=store.write("key", b"before"))
    together = threading.Barrier(20)

    def write(number: int) -> int | None:
        together.wait()
        try:
            store.write("key", f"{number}".encode(), condition=condition)
        except ConditionError:
            return None
        return number

    with ThreadPoolExecutor(20) as threads:
        winners = [number for number in threads.map(write, range(20)) if number is not None]
    assert len(winners) == 1
    assert bytes(store.read("key")) == f"{winners[0]}".encode()


def test_a_reader_sees_the_old_or_the_new(store: Store) -> None:
    """While a writer replaces an object, every read returns one complete content."""
    contents = [bytes([number]) * 100_000 for number in range(20)]
    store.write("key", contents[0])
    done = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not done.is_set():
            seen.append(bytes(store.read("key")))

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        store.write("key", content)
    done.set()
    reader.join()
    assert seen
    assert set(seen) <= set(contents)


def test_a_listing_is_whole_while_neighbours_come_and_go(store: Store) -> None:
    """Objects that exist all the time are in every listing, while others appear and disappear."""
    standing = [f"standing/{number}" for number in range(3)]
    for key in standing:
        store.write(key, b"stands")
    is_done = threading.Event()

    def come_and_go(name: str) -> None:
        while not is_done.is_set():
            store.write(f"standing/{name}", os.urandom(64))
            store.write(f"{name}/only", b"alone in its folder")
            store.delete(f"{name}/only")

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(come_and_go, name) for name in ("a", "a", "b")]
        try:
            for _ in range(200):
                keys = [item.key for item in store.list()]
                assert [key for key in keys if key in standing] == standing
        finally:
            is_done.set()
        for writer in writers:
            writer.result()


def test_a_large_file_is_uploaded(store: Store, tmp_path: Path) -> None:
    """A file is uploaded, in parts where the store has parts; progress adds up, and the source stays."""
    source = tmp_path / "large"
    data = os.urandom(40 << 20)
    source.write_bytes(data)
    store.write("large", b"before")
    moved: list[int] = []
    store.upload("large", source, progress=moved.append)
    assert sum(moved) == len(data)
    assert store.stat("large").size_bytes == len(data)
    assert hashlib.sha256(store.read("large")).digest() == hashlib.sha256(data).digest()
    assert bytes(store.read("large", start=(16 << 20) - 3, length=6)) == data[(16 << 20) - 3 : (16 << 20) + 3]
    assert source.read_bytes() == data


@pytest.mark.parametrize("size_bytes", [0, 1000, 16 << 20, (16 << 20) + 1, (40 << 20) + 7])
def test_a_stream_is_uploaded(size_bytes: int, store: Store) -> None:
    """A stream that reuses one buffer is uploaded; progress adds up, and the old object is replaced."""
    data = os.urandom(size_bytes)
    store.write("key", b"before")
    moved: list[int] = []
    store.upload("key", stream_of(data), progress=moved.append)
    assert sum(moved) == size_bytes
    assert store.stat("key").size_bytes == size_bytes
    assert hashlib.sha256(store.read("key")).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("size_bytes", [1000, 40 << 20])
@pytest.mark.parametrize("says_more", [-1, 1, 9 << 20])
def test_a_stream_of_another_length_is_refused(size_bytes: int, says_more: int, store: Store) -> None:
    """A stream with another length than announced changes nothing; a sweep leaves nothing of it."""
    data = os.urandom(size_bytes)
    store.write("key", b"before")
    content = Content(size_bytes=size_bytes + says_more, write_to=stream_of(data).write_to)
    with pytest.raises(StorageError, match="a stream"):
        store.upload("key", content)
    store.sweep()
    assert bytes(store.read("key")) == b"before"
    assert [item.key for item in store.list()] == ["key"]


class TornError(Exception):
    """Ends a stream in these tests."""


@pytest.mark.parametrize("size_bytes", [1000, 40 << 20])
def test_what_a_stream_raises_comes_out(size_bytes: int, store: Store) -> None:
    """An exception of the stream reaches the caller; a sweep leaves nothing of the upload."""

    def write_to(sink) -> None:
        stream_of(os.urandom(size_bytes - 1)).write_to(sink)
        raise TornError

    store.write("key", b"before")
    with pytest.raises(TornError):
        store.upload("key", Content(size_bytes=size_bytes, write_to=write_to))
    store.sweep()
    assert bytes(store.read("key")) == b"before"
    assert [item.key for item in store.list()] == ["key"]


def source_of(kind: str, path: Path, size_bytes: int) -> tuple[Path | Content, bytes]:
    """A source to upload, and its bytes."""
    data = os.urandom(size_bytes)
    path.write_bytes(data)
    return (path if kind == "file" else stream_of(data)), data


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("size_bytes", [1000, 20 << 20])
def test_a_fence_stops_what_is_not_visible_yet(size_bytes: int, kind: str, store: Store, tmp_path: Path) -> None:
    """An exception of the fence reaches the caller; the old content stays, and a sweep leaves nothing."""
    source, data = source_of(kind, tmp_path / "source", size_bytes)

    def fence() -> None:
        raise StorageError("replaced")

    store.write("key", b"old")
    for key in ("key", "new"):
        with pytest.raises(StorageError, match="replaced"):
            store.upload(key, source, fence=fence)
    assert bytes(store.read("key")) == b"old"
    assert [item.key for item in store.list()] == ["key"]
    store.sweep()
    assert store.sweep() == 0
    store.upload("key", source, fence=lambda: None)
    assert bytes(store.read("key")) == data


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_fence_comes_after_the_last_byte(kind: str, store: Store, tmp_path: Path) -> None:
    """A claim that comes while a large file is sent is noticed before the object appears."""
    source, data = source_of(kind, tmp_path / "source", 20 << 20)
    moved: list[int] = []
    seen: list[int] = []
    store.upload("key", source, progress=moved.append, fence=lambda: seen.append(sum(moved)))
    assert seen == [len(data)]


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("size_bytes", [1000, 20 << 20])
def test_a_zombie_cannot_write_over_its_successor(size_bytes: int, kind: str, store: Store, tmp_path: Path) -> None:
    """A writer stops after its fence; its successor sweeps and writes; then the first writer fails."""
    if store.location.scheme == "file":
        pytest.skip("a folder's last step is a rename, which nothing can fence; its lock keeps zombies out")
    if size_bytes > WHOLE_BYTES and isinstance(getattr(store, "_requests", None), LibraryBucket):
        pytest.skip("unfinished uploads of obstore cannot be swept")
    zombie, _ = source_of(kind, tmp_path / "zombie", size_bytes)
    successor, data = source_of(kind, tmp_path / "successor", size_bytes)

    def fence() -> None:
        store.sweep()
        store.upload("key", successor)

    with pytest.raises(StorageError):
        store.upload("key", zombie, fence=_only_once(fence))
    assert bytes(store.read("key")) == data


def _only_once(action):
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) > 1:
            raise StorageError("replaced")
        action()

    return call


def test_threads_do_not_mix(store: Store, tmp_path: Path) -> None:
    """Eight threads upload, write and read their own keys at the same time."""

    def work(number: int) -> bool:
        source = tmp_path / f"source-{number}"
        source.write_bytes(bytes([number]) * (18 << 20 if number < 2 else 5000))
        store.upload(f"up/{number}", source)
        store.write(f"small/{number}", bytes([number]))
        return bytes(store.read(f"up/{number}")) == source.read_bytes() and bytes(
            store.read(f"small/{number}")
        ) == bytes([number])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_the_access_check_leaves_nothing(store: Store) -> None:
    """The access check writes, reads, lists and deletes an object, and leaves nothing."""
    check_access(store)
    assert list(store.list()) == []
