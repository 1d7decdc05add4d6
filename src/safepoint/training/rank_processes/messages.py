"""The messages between a launcher and its template, the process from which ranks are copied.

Each message is one frame on a pair of connected sockets that only the two processes have. The launcher sends `Plan`,
`Birth` and `Import`. The template answers with `Ready`, `Born`, `Stale` or `Unfit`.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safepoint.foundation.channels.channel import Channel, ChannelError, close_all
from safepoint.foundation.channels.codec import ProtocolError, decode, encode, parse

_MAX_DESCRIPTORS = 250


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
    """Requests the processes of all ranks of a node.

    Descriptors come with the message, in this order: one stdin for all ranks, stdout and stderr of each rank, and a
    pipe. A rank begins when it has read one byte from the pipe, and ends if the pipe is closed before that.

    Args:
        arguments: the arguments of each rank, as on the command line of a rank that is started as a new process.
        environments: the whole environment of each rank.
        folder: the working folder.
        umask: the mask of the modes of new files.
        cores: the processor cores on which the ranks may run.
        limits: the number of a resource → its soft limit and its hard limit; None for no limit.
    """

    arguments: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...]
    folder: str
    umask: int
    cores: tuple[int, ...]
    limits: Mapping[str, tuple[int | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Asks the template to import the modules that a rank has loaded by its first step. There is no answer."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The template has imported all packages, and has been checked.

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
    """A file of a loaded module has changed on disk, so a new template is needed.

    Args:
        module: the module.
    """

    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """No rank can be copied from this template, nor from a new template.

    Args:
        name: the package, the variable or the folder that is the cause.
        reason: why, as the end of a sentence that begins with the name.
    """

    name: str
    reason: str


Message = Plan | Birth | Import | Ready | Born | Stale | Unfit
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Plan, Birth, Import, Ready, Born, Stale, Unfit)}


class TemplateChannel(Channel):
    """One end of the connection.

    Args:
        connected: the socket, which this object owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, max_descriptors=_MAX_DESCRIPTORS)

    def send_message(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and copies of descriptors.

        Raises:
            ChannelError: the other side is gone.
        """
        self.send(encode(message), descriptors)

    def receive_message(self, limit_s: float | None = None) -> tuple[Message, list[int]]:
        """Wait for the next message.

        Args:
            limit_s: seconds to wait for the whole message; None for no limit.

        Returns:
            The message, and the descriptors that came with it, which the caller has to close.

        Raises:
            ChannelError: the other side is gone, did not answer in time, or sent something that is not a message.
        """
        body, descriptors = self.receive(limit_s)
        try:
            return decode(parse(body), _KINDS), descriptors
        except ProtocolError as error:
            close_all(descriptors)
            raise ChannelError(f"it sent something that is not a message ({error})") from error
