"""The messages between a launcher and its template process, which bears the ranks.

Each message is one frame on a pair of connected sockets that only the two processes have: the length in four bytes,
then JSON. The launcher sends `Plan`, `Birth` and `Import`. The template answers with `Ready`, `Born`, `Stale` or
`Unfit`.
"""

import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from safepoint.foundation import clock

_HEADER = struct.Struct("!I")
_MAX_BYTES = 16 << 20
_MAX_DESCRIPTORS = 250


class ChannelError(Exception):
    """The other side has closed the connection, does not answer in time, or sends what is no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The first message to a template: what its ranks will run.

    Args:
        program: script and arguments, or module and arguments.
        is_module: whether the program runs as `python -m` runs it.
        launcher_pid: the process that becomes the parent of the ranks.
        left_out: packages that are not imported.
    """

    program: tuple[str, ...]
    is_module: bool
    launcher_pid: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Asks for the processes of all ranks of a node.

    The descriptors of stdin, of stdout and stderr of each rank, and of a pipe come with the message, in this order. A
    rank begins when it has read one byte from the pipe, and ends if the pipe is closed before.

    Args:
        arguments: of each rank, as on the command line of a process that is started in the ordinary way.
        environments: the whole environment of each rank.
        folder: the working folder.
        umask: the mask of the modes of new files.
        cores: the processor cores on which the ranks may run.
        limits: the resource limits by the number of the resource: soft and hard.
    """

    arguments: tuple[tuple[str, ...], ...]
    environments: tuple[dict[str, str], ...]
    folder: str
    umask: int
    cores: tuple[int, ...]
    limits: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Asks the template to import more modules, which a rank has loaded until its first step. There is no answer."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The template has imported everything, and has been checked.

    Args:
        num_modules: how many modules are loaded.
        took_s: seconds since the template began.
    """

    num_modules: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Born:
    """The processes of the ranks exist, as children of the launcher.

    Args:
        pids: one for each rank, in the order of `Birth`.
    """

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A file of a loaded module has changed on disk; a new template is needed.

    Args:
        module: the module.
    """

    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """No rank can be born here, and a new template would not change that.

    Args:
        name: the package, the variable or the folder that is the cause.
        reason: why, as the end of a sentence that begins with the name.
    """

    name: str
    reason: str


Message = Plan | Birth | Import | Ready | Born | Stale | Unfit
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Plan, Birth, Import, Ready, Born, Stale, Unfit)}


class TemplateChannel:
    """One end of the connection.

    Args:
        connected: the socket, which this object owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors of which the other side gets copies.

        Raises:
            ChannelError: the other side is gone.
        """
        body = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
        frame = _HEADER.pack(len(body)) + body
        try:
            sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else self._socket.send(frame)
            self._socket.sendall(frame[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelError("it has ended") from error
        except OSError as error:
            raise ChannelError(f"it cannot be reached ({error.strerror or error})") from error

    def receive(self, limit_s: float | None = None) -> tuple[Message, list[int]]:
        """Wait for the next message.

        Args:
            limit_s: seconds to wait for the whole message; None for no limit.

        Returns:
            The message, and the descriptors that came with it, which the caller has to close.

        Raises:
            ChannelError: the other side is gone, did not answer in time, or sent what is no message.
        """
        end_s = None if limit_s is None else clock.monotonic_s() + limit_s
        descriptors: list[int] = []
        try:
            header = self._read(_HEADER.size, end_s, descriptors)
            (size,) = _HEADER.unpack(header)
            if size > _MAX_BYTES:
                raise ChannelError(f"it announced a message of {size} bytes")  # noqa: TRY301  closes the descriptors
            return _decode(self._read(size, end_s, descriptors)), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def has_data(self, limit_s: float) -> bool:
        """Wait until there is something to receive, or the other side is gone. Returns False after `limit_s`."""
        return bool(select.select([self._socket], [], [], limit_s)[0])

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor of this end."""
        return self._socket.fileno()

    def _read(self, size: int, end_s: float | None, descriptors: list[int]) -> bytes:
        found = bytearray()
        while len(found) < size:
            left_s = None if end_s is None else max(0.001, end_s - clock.monotonic_s())
            try:
                self._socket.settimeout(left_s)
                part, new, _, _ = socket.recv_fds(
                    self._socket, size - len(found), _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError as error:
                raise ChannelError("it does not answer") from error
            except ConnectionResetError as error:
                raise ChannelError("it has ended") from error
            except OSError as error:
                raise ChannelError(f"it cannot be reached ({error.strerror or error})") from error
            finally:
                self._socket.settimeout(None)
            descriptors += new
            if not part:
                raise ChannelError("it has ended")
            found += part
            if end_s is not None and clock.monotonic_s() > end_s and len(found) < size:
                raise ChannelError("it does not answer")
        return bytes(found)


def _decode(body: bytes) -> Message:
    try:
        found: Any = json.loads(body)
        kind = _KINDS[found.pop("kind")]
        values = {name: _frozen(value) for name, value in found.items()}
        message = kind(**values)
        if all(isinstance(getattr(message, field.name), _type_of(field.type)) for field in fields(kind)):
            return message
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChannelError("it sent what is no message") from error
    raise ChannelError("it sent a message with values of another type")


def _type_of(annotation: Any) -> Any:
    """The class of the values of a field, without the types of what a container holds."""
    return getattr(annotation, "__origin__", annotation)


def _frozen(value: Any) -> Any:
    """Lists as tuples, on all levels."""
    if isinstance(value, list):
        return tuple(_frozen(one) for one in cast("list[Any]", value))
    if isinstance(value, dict):
        return {key: _frozen(one) for key, one in cast("dict[str, Any]", value).items()}
    return value
