"""Closes the connections of other users of this machine to the ports of gloo, before a process group is used.

gloo authenticates no peer. Each user of a machine can connect to the port at which a rank waits for another rank,
take the place of this rank, read what is sent to it, and send objects, which PyTorch unpickles. The kernel reports
which user has opened a socket of this machine. So when a group has formed, this module looks at all connections that
gloo has accepted, and shuts down those of other users. A group that had used one of them then fails at its first
exchange, and the job restarts.

Not checked are connections from other machines, those of NCCL, and those of groups that connect only at their first
use (TORCH_GLOO_LAZY_INIT).
"""

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Generator
from types import ModuleType
from typing import Any

from safepoint.foundation.channels.socket_owner import owner_of
from safepoint.foundation.environment import user_name
from safepoint.foundation.processes import is_this_user
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import

_DESCRIPTORS = "/proc/self/fd"
_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_log = logging.getLogger("safepoint")


def install(context: RankContext) -> None:
    """Check the connections of each process group that the program creates, if there are several ranks."""
    if context.place.world_size > 1 and os.path.isdir(_DESCRIPTORS):
        after_import("torch.distributed.distributed_c10d", _hook)


def _hook(module: ModuleType) -> None:
    c10d: Any = module
    create = c10d._new_process_group_helper
    connections = AcceptedConnections()

    @functools.wraps(create)
    def create_and_check(*args: Any, **kwargs: Any) -> Any:
        with connections.checked():
            return create(*args, **kwargs)

    c10d._new_process_group_helper = create_and_check


class AcceptedConnections:
    """The connections that this process has accepted at ports which it opened in a `checked` block."""

    def __init__(self) -> None:
        self._ports: set[int] = set()

    @contextlib.contextmanager
    def checked(self) -> Generator[None]:
        """When the block ends, shut down those of its connections that other users of this machine have opened."""
        before = _sockets()
        yield
        new = [number for name, number in _sockets().items() if name not in before]
        self._ports |= {port for number in new if (port := _listening_port(number)) is not None}
        for number in new:
            with _opened(number) as one:
                if one is not None:
                    self._check(one)

    def _check(self, one: socket.socket) -> None:
        try:
            near, far = one.getsockname()[:2], one.getpeername()[:2]
        except OSError:  # it is not connected
            return
        owner = owner_of(far, near) if near[1] in self._ports else None
        if owner is None or is_this_user(owner):  # None: it was closed, or its other end is on another machine
            return
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        _log.warning(
            "a program of user %s connected to port %d, at which this rank waited for another rank; the connection "
            "was closed, and if the ranks cannot go on without it, they restart",
            user_name(owner),
            near[1],
        )


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by names that are unique on this machine."""
    found: dict[str, int] = {}
    for number in map(int, os.listdir(_DESCRIPTORS)):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            name = os.readlink(f"{_DESCRIPTORS}/{number}")
            if name.startswith("socket:"):
                found[name] = number
    return found


@contextlib.contextmanager
def _opened(number: int) -> Generator[socket.socket | None]:
    """A TCP socket of this process; None for any other socket, and if it was closed meanwhile."""
    try:
        is_blocking = os.get_blocking(number)
        one = socket.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with one:
        # Python has changed this if the program has set a default timeout for sockets.
        one.setblocking(is_blocking)
        yield one if one.family in _FAMILIES and one.type is socket.SOCK_STREAM else None


def _listening_port(number: int) -> int | None:
    with _opened(number) as one, contextlib.suppress(OSError):
        if one is not None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return one.getsockname()[1]
    return None
