"""Reads the requests of one connection, with limits for the size of a request.

The memory that a request takes depends on its lines more than on its bytes: each header line becomes several objects,
so 1 MiB of short lines took 17 MB.
"""

import re

import h11

MOST_HEADER_BYTES = 1 << 20
"""The limit for the request line and all headers of one request.

A browser keeps up to 180 cookies of 4 KiB for an address, and sends them to all ports. If this limit were lower,
another program at this address, such as a notebook, could set so many cookies that the server refuses the browser's
requests.
"""
MOST_LINES = 512
"""The limit of header lines of one request. A browser sends about 20 lines, and a proxy adds about 20. A proxy that
receives HTTP/2 may pass each of the 180 cookies on in a line of its own."""
_MOST_TARGET_BYTES = 16 << 10
_MOST_BETWEEN_CHUNKS = 16 << 10
"""The limit of bytes that belong to no chunk of a body: the size and extension of a chunk, or the trailers."""
_END_OF_HEADERS = re.compile(rb"\n\r?\n")


class RequestReader(h11.Connection):
    """The requests of one connection. uvicorn reads them with `next_event`."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEADER_BYTES)
        self._num_lines = 0  # at least the number of lines that are not read yet
        self._head_bytes = 0
        self.refusal = ""
        """Which limit a request has exceeded; empty if it has exceeded none."""

    @property
    def held_bytes(self) -> int:
        """How many bytes the server holds: the headers of the newest request, and what it has not read yet."""
        return self._head_bytes + len(self._receive_buffer)

    def receive_data(self, data: bytes) -> None:
        """Note what has arrived."""
        if not self._receive_buffer:
            self._num_lines = 0
        self._num_lines += data.count(b"\n")
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of a request.

        Raises:
            RemoteProtocolError: the request is invalid, or exceeds a limit.
        """
        is_head = self.their_state is h11.IDLE
        if is_head and self._num_lines > MOST_LINES:
            self._check_lines()
        before = len(self._receive_buffer)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:  # h11 gives this status for its limit of bytes
                self.refusal = f"The headers of the request have more than {MOST_HEADER_BYTES:,} bytes."
            raise
        if isinstance(event, h11.Request):
            self._head_bytes = before - len(self._receive_buffer)
            if len(event.target) > _MOST_TARGET_BYTES:
                raise self._refused("The address of the request is too long.")
        if event is h11.NEED_DATA and not is_head and len(self._receive_buffer) > _MOST_BETWEEN_CHUNKS:
            raise self._refused("The request has too much data outside of its chunks.")
        return event

    def _check_lines(self) -> None:
        data = bytes(self._receive_buffer)
        self._num_lines = data.count(b"\n")
        end = _END_OF_HEADERS.search(data)
        if data.count(b"\n", 0, len(data) if end is None else end.end()) > MOST_LINES:
            raise self._refused(f"The request has more than {MOST_LINES} lines of headers.")

    def _refused(self, why: str) -> h11.RemoteProtocolError:
        self.refusal = why
        return h11.RemoteProtocolError(why)
