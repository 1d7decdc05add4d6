"""The network streams of an HTTP client, so that any thread can end them while other threads use them."""

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from typing import Any

_CONNECTED = ".connect_tcp.complete"
_SENDS = ".send_request_headers.started"
_OPENED = (_CONNECTED, ".start_tls.complete", ".setup_socks5_connection.complete")


class ClosedError(Exception):
    """`OpenStreams.close` was called."""


class OpenStreams:
    """The streams that a client has opened, and how many threads use them."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._copies: weakref.WeakKeyDictionary[Any, socket.socket] = weakref.WeakKeyDictionary()
        self._num_used = 0
        self._changed = threading.Condition()
        self.closing: Future[None] = Future()
        """This future is done when `close` was called."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.closing.done()

    def trace(self, event: str, details: Mapping[str, Any]) -> None:
        """The extension `trace` of a request: the HTTP client calls it while it connects, sends and receives.

        Raises:
            ClosedError: the client has connected, or begins to send a request, after `close`.
        """
        opened = details["return_value"] if event.endswith(_OPENED) else None
        if opened is not None:
            with self._changed:
                self._streams.add(opened)
                if event.endswith(_CONNECTED):
                    self._copy(opened)
        if self.is_closed and (opened is not None or event.endswith(_SENDS)):
            if opened is not None:
                opened.close()
            raise ClosedError

    def _copy(self, stream: Any) -> None:
        """Keep a copy of the stream's descriptor. During a handshake, the stream itself has no descriptor.

        A server can keep a handshake in one call for ever, in spite of the timeout.
        """
        opened = stream.get_extra_info("socket")
        with contextlib.suppress(OSError):  # too many open files: the timeout is left
            copy = socket.socket(opened.family, opened.type, opened.proto, os.dup(opened.fileno()))
            self._copies[stream] = copy
            weakref.finalize(stream, copy.close)

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """In this context, a thread uses streams of the client.

        Raises:
            ClosedError: `close` was called before.
        """
        with self._changed:
            if self.is_closed:
                raise ClosedError
            self._num_used += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_used -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """End all streams. A thread that reads from a stream, or writes to it, gets an error."""
        with self._changed:
            for stream in list(self._streams):
                with contextlib.suppress(OSError):  # the stream has ended
                    # SSLSocket.shutdown would also change attributes that the reading thread uses.
                    connected = self._copies.get(stream) or stream.get_extra_info("socket")
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def close(self, *, within_s: float) -> None:
        """End all streams, and wait until no thread uses them, but not longer than `within_s`."""
        with self._changed:
            if not self.is_closed:
                self.closing.set_result(None)
        self.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_used, within_s)
