"""The messages between a process that asks for copies, and the template."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.foundation.channels.channel import Channel
from safepoint.foundation.channels.codec import decode, encode, parse
from safepoint.training.rank_processes.messages import Birth


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Asks for a program. The descriptors of its three standard streams come with the message.

    Args:
        birth: the words behind `python` on the command line, and what the program inherits.
        session: the session that it belongs to (0: one of another PID namespace); None for one of its own.
        group: its process group, if the session is not its own.
        ignored: the signals that it ignores.
        blocked: the signals that are blocked in it.
        niceness: its niceness + 20.
    """

    birth: Birth
    session: int | None
    group: int
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]
    niceness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The template has imported everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The program is a child of the process that has asked.

    Args:
        pid: the program.
    """

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The program was not begun.

    Args:
        reason: why.
        is_expected: whether the program differs from what the template can copy, as some tests want it; otherwise the
            template has failed.
    """

    reason: str
    is_expected: bool


Message = Program | Ready | Begun | Refused
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Program, Ready, Begun, Refused)}


class CopyChannel(Channel):
    """One end of the connection.

    Args:
        connected: the socket, which this object owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, max_descriptors=3)

    def send_message(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self.send(encode(message), descriptors)

    def receive_message(self, limit_s: float | None = None) -> tuple[Message, list[int]]:
        body, descriptors = self.receive(limit_s)
        return decode(parse(body), _KINDS), descriptors
