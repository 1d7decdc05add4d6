"""Every message is read as it was written; any other bytes are one kind of error."""

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.foundation.channels.codec import ProtocolError, encode
from safepoint.snapshot.protocol.messages import (
    VERSION,
    Hello,
    KeeperMessage,
    RankMessage,
    decode_keeper_message,
    decode_rank_message,
)
from tests.support.keeper_messages import KEEPER_MESSAGES, RANK_MESSAGES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
HELLO = {"type": "Hello", "version": VERSION, "rank": 1, "num_ranks": 2, "restart": 0}


@pytest.mark.parametrize("kind", RANK_MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_of_ranks_are_read_as_they_were_written(kind: type, data: st.DataObject) -> None:
    """And a rank does not take them for the keeper's."""
    message = data.draw(RANK_MESSAGES[kind])
    assert decode_rank_message(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_keeper_message(encode(message))


@pytest.mark.parametrize("kind", KEEPER_MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_of_the_keeper_are_read_as_they_were_written(kind: type, data: st.DataObject) -> None:
    """And a keeper does not take them for a rank's."""
    message = data.draw(KEEPER_MESSAGES[kind])
    assert decode_keeper_message(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_rank_message(encode(message))


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_refused(body: bytes) -> None:
    """By one exception, whatever they are."""
    for decode in (decode_rank_message, decode_keeper_message):
        with pytest.raises(ProtocolError):
            decode(body)


@settings(max_examples=200, deadline=None)
@given(message=st.one_of(*RANK_MESSAGES.values(), *KEEPER_MESSAGES.values()), data=st.data())
def test_a_message_with_altered_bytes_is_read_or_refused(
    message: RankMessage | KeeperMessage, data: st.DataObject
) -> None:
    """What can be read is a message, and written as the same bytes' meaning."""
    body = bytearray(encode(message))
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[place] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    for decode in (decode_rank_message, decode_keeper_message):
        with contextlib.suppress(ProtocolError):
            read = decode(bytes(body))
            assert decode(encode(read)) == read


def _places(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else []
    return [place for key, value in items for place in [(*path, key), *_places(value, (*path, key))]]


@settings(max_examples=300, deadline=None)
@given(message=st.one_of(*RANK_MESSAGES.values()), value=JSON, data=st.data())
def test_a_message_with_another_value_is_read_or_refused(
    message: RankMessage, value: Any, data: st.DataObject
) -> None:
    """At any depth: a value of another type, a missing field, an unknown field."""
    record = json.loads(encode(message))
    places = _places(record)
    *path, last = data.draw(st.sampled_from(places))
    holder = record
    for key in path:
        holder = holder[key]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            holder[last] = value
        case "remove":
            del holder[last]
        case _ if isinstance(holder, dict):
            holder[f"{last}2"] = value
        case _:
            holder.append(value)
    with contextlib.suppress(ProtocolError):
        read = decode_rank_message(json.dumps(record).encode())
        assert dataclasses.is_dataclass(read)
        assert decode_rank_message(encode(read)) == read


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"type": "Goodby"}, "no message of the type 'Goodby'"),
        ({"type": "Welcome"}, "no message of the type 'Welcome'"),
        ({"type": ["Hello"]}, "no message of the type"),
        ({"rank": -1}, "Hello.rank must be an integer from 0"),
        ({"rank": 1 << 63}, "Hello.rank must be an integer from 0 to 2\\^63 - 1, not 9223372036854775808"),
        ({"rank": True}, "not True"),
        ({"rank": "1"}, "not '1'"),
        ({"rank": 1.0}, "not 1.0"),
        ({"rank": [[[[]]]]}, "Hello.rank"),
        ({"num_ranks": 0}, "num_ranks 0 must be at least 1"),
        ({"more": 1}, "missing or unknown: \\['more'\\]"),
        (
            {"version": VERSION + 1},
            f"uses version {VERSION + 1} .* and this keeper uses version {VERSION}: run one release",
        ),
        ({"version": None, "rank": "?"}, "uses version None"),
    ],
)
def test_the_error_says_what_is_wrong(changes: dict[str, Any], text: str) -> None:
    """A mismatch of versions before anything else: the fields of another version may be others."""
    assert decode_rank_message(json.dumps(HELLO).encode()) == Hello(rank=1, num_ranks=2, restart=0)
    with pytest.raises(ProtocolError, match=text):
        decode_rank_message(json.dumps({**HELLO, **changes}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"type":' * 100_000,
        b'{"type":"BlockPopulated","number":' + b"9" * 10_000 + b"}",
        b'{"type":"BlockPopulated","number":1e999}',
        b'{"type":"BlockPopulated","number":NaN}',
        b'{"type":"BlockPopulated","number":1,"number":1}',
        b'{"type":"Goodbye"}{}',
        b'{"type":"SnapshotStaged"}',
        b'{"type":"RemoveAtExit","folder":"/home"}',
        b'{"type":"RemoveAtExit","folder":"scratch-1"}',
        b'{"type":"RemoveAtExit","folder":"/tmp/scratch-\\u0000"}',
        b'{"type":"OpenFolder","folder":"/\\ud800","is_committer":true}',
        b'{"type":"LendBlock","number":1,"capacity_bytes":0}',
        b'{"type":"LendBlock","number":1,"capacity_bytes":4097}',
    ],
)
def test_what_would_harm_the_keeper_is_refused(body: bytes) -> None:
    """Nesting, huge numbers, names twice, folders that are not the rank's own, memory that is not in pages."""
    with pytest.raises(ProtocolError):
        decode_rank_message(body)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\\b", "safepoint-manifest.json"])
def test_a_file_outside_of_the_checkpoint_is_refused(path: str) -> None:
    """Before the keeper writes it."""
    file = {"path": path, "block": 1, "offset": 0, "size_bytes": 1, "archives": []}
    record = {"type": "BeginSnapshot", "step": 1, "number": 1, "request": 1, "files": [file], "trigger": "periodic"}
    body = json.dumps({**record, "is_requested": False, "facts": None}).encode()
    with pytest.raises(ProtocolError, match=r"BeginSnapshot.files\[0\]: path"):
        decode_rank_message(body)
