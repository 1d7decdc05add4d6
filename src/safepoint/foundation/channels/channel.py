"""Frames of bytes over a connected Unix socket. A frame may bring the other side copies of descriptors."""

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence

from safepoint.foundation import clock

_HEADER = struct.Struct("<II")
MAX_FRAME_BYTES = 64 << 20


class ChannelError(OSError):
    """The other side has closed the connection, does not answer in time, or has sent something invalid.

    The text is a clause, such as `it has ended`. `it` stands for the other side, which the caller names.
    """


class Channel:
    """One connection; several threads may send, one receives.

    Args:
        connected: the socket, which this object owns.
        max_descriptors: how many descriptors a frame may bring. The kernel closes further ones.
    """

    def __init__(self, connected: socket.socket, *, max_descriptors: int = 2) -> None:
        self._socket = connected
        self._max_descriptors = max_descriptors
        self._sending = threading.Lock()

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame, and copies of descriptors.

        Raises:
            ChannelError: the other side has closed the connection.
            ValueError: the frame is too long.
        """
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
        frame = _HEADER.pack(len(body), len(descriptors)) + body
        try:
            with self._sending:
                sent = (
                    socket.send_fds(self._socket, [frame], descriptors) if descriptors else self._socket.send(frame)
                )
                if sent < len(frame):
                    self._socket.sendall(memoryview(frame)[sent:])
        except OSError as error:
            raise _named(error) from error

    def receive(self, limit_s: float | None = None) -> tuple[bytes, list[int]]:
        """Wait for the next frame.

        Args:
            limit_s: seconds to wait for the whole frame; None for no limit.

        Returns:
            The bytes, and the descriptors that came with them, which the caller closes.

        Raises:
            ChannelError: the other side sends no further frame, does not send it in time, or announces a frame that
                is too long. No descriptor is left open.
        """
        end_s = None if limit_s is None else clock.monotonic_s() + limit_s
        descriptors: list[int] = []
        try:
            header = self._read(_HEADER.size, end_s, descriptors)
            length, _ = _HEADER.unpack(header)
            if length > MAX_FRAME_BYTES:
                raise ChannelError(  # noqa: TRY301  closes the descriptors
                    f"it announced a frame of {length} bytes, more than {MAX_FRAME_BYTES}"
                )
            return self._read(length, end_s, descriptors), descriptors
        except BaseException as error:
            close_all(descriptors)
            if isinstance(error, OSError) and not isinstance(error, ChannelError):
                raise _named(error) from error
            raise

    def _read(self, size: int, end_s: float | None, descriptors: list[int]) -> bytes:
        found = bytearray()
        while len(found) < size:
            if end_s is not None and not self.has_data(end_s - clock.monotonic_s()):
                raise ChannelError("it does not answer")
            part, new, _, _ = socket.recv_fds(
                self._socket, size - len(found), self._max_descriptors, socket.MSG_CMSG_CLOEXEC
            )
            descriptors += new
            if not part:
                raise ChannelError("it has ended")
            found += part
        return bytes(found)

    def has_data(self, limit_s: float) -> bool:
        """Wait until there is something to receive, or the other side is gone. Returns False after `limit_s`."""
        if self._socket.fileno() < 0:
            return True  # another thread has closed this end; `receive` raises the error
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * limit_s)))

    def close(self) -> None:
        """End the connection; a thread in `receive` gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor of this end."""
        return self._socket.fileno()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a frame and are not used."""
    for descriptor in descriptors:
        os.close(descriptor)


def _named(error: OSError) -> ChannelError:
    # EBADF: another thread of this process has closed this end.
    if isinstance(error, BrokenPipeError | ConnectionResetError) or error.errno == errno.EBADF:
        return ChannelError("it has ended")
    return ChannelError(f"it cannot be reached ({error.strerror or error})")
