"""A server that sends a WebSocket's message in tiny parts, or parts without end, to keep a command busy."""

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import StorageError
from safepoint.jobs.cluster.suspension import websocket

_PART, _PING = bytes((0x00, 0x01, 0x61)), bytes((0x89, 0x00))
_BEGIN, _MESSAGE = bytes((0x02, 0x01, 0x61)), bytes((0x82, 0x00))


class Endless:
    """A connection that sends `first` and then `frame` again and again; it notes how many bytes were read."""

    def __init__(self, first: bytes, frame: bytes) -> None:
        self._first, self._frame = first, frame
        self.num_bytes = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data, self._first = self._first + self._frame * 1000, b""
        self.num_bytes += len(data)
        assert self.num_bytes < 1 << 20, "it reads on and on"
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None: ...


@pytest.mark.parametrize(
    ("first", "frame"), [(_BEGIN, _PART), (_BEGIN, b"\x00\x00"), (b"", _PING), (b"", _MESSAGE), (_BEGIN, _PING)]
)
def test_frames_without_end(first: bytes, frame: bytes) -> None:
    with pytest.raises(StorageError, match="more than 65,536 frames"):
        for _ in websocket.messages(Endless(first, frame), idle_s=1):
            pass
