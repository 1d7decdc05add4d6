"""Closes the connections of other users of this machine to the ports of gloo, before a process group is used.

gloo does not authenticate peers. Each user of a machine can connect to the port at which a rank waits for another
rank, and act as this other rank: read the data for it, and send objects, which PyTorch unpickles. The kernel reports
which user has opened a socket of this machine. So when a group has formed, this module examines all connections that
gloo has accepted, and shuts down the connections of other users. If a group uses such a connection, the group fails
at its first exchange, and the ranks restart.

This module does not check three kinds of connections: connections from other machines, connections of NCCL, and
connections of groups that connect only at their first use (TORCH_GLOO_LAZY_INIT).
"""

import contextlib
import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Generator
from types import ModuleType
from typing import Any

from safepoint.foundation.channels.socket_owner import is_established, user_at_other_end
from safepoint.foundation.processes import is_this_user
from safepoint.foundation.shared_folders.ownership import user_name
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import

_CREATE = "_new_process_group_helper"
_DESCRIPTORS = "/proc/self/fd"
_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_log = logging.getLogger("safepoint")


def install(context: RankContext) -> None:
    """Check the connections of each process group that the program creates, if there are several ranks."""
    if context.place.world_size > 1 and os.path.isdir(_DESCRIPTORS):
        after_import("torch.distributed.distributed_c10d", hook)


def hook(module: ModuleType) -> None:
    """Replace the function of torch that creates every process group."""
    create = getattr(module, _CREATE)

    @functools.wraps(create)
    def create_without_strangers(*args: Any, **kwargs: Any) -> Any:
        with without_strangers():
            return create(*args, **kwargs)

    setattr(module, _CREATE, create_without_strangers)


@contextlib.contextmanager
def without_strangers() -> Generator[None]:
    """After the block, shut down connections from other users of this machine to ports that the block has opened."""
    before = _sockets()
    yield
    new = [number for name, number in _sockets().items() if name not in before]
    ports = {port for number in new if (port := _listening_port(number)) is not None}
    found: set[str] = set()
    for number in new if ports else ():
        with _opened(number) as one:
            user = None if one is None else _stranger_of(one, ports)
            if one is not None and user is not None:
                found.add(user)
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
    if found:
        _log.warning(
            "a program of %s connected to a port at which this rank waited for another rank; the connection was "
            "closed. If the process group already used this connection, the ranks fail and restart",
            " and ".join(sorted(found)),
        )


def _stranger_of(one: socket.socket, ports: set[int]) -> str | None:
    """Who has opened a connection to one of `ports`; None if it is this user, or a program on another machine."""
    try:
        one.getpeername()
        host, port = one.getsockname()[:2]
    except OSError:  # the socket is not connected
        return None
    if port not in ports:
        return None
    owner = user_at_other_end(one)
    if owner is None:  # the other end is on another machine, or one of the two ends is closed
        is_local = ipaddress.ip_address(host.removeprefix("::ffff:").partition("%")[0]).is_loopback
        return "an unknown user" if is_local or not is_established(one) else None
    return None if is_this_user(owner) else f"user {user_name(owner)}"


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by names that are unique on this machine."""
    found: dict[str, int] = {}
    for number in map(int, os.listdir(_DESCRIPTORS)):
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            name = os.readlink(f"{_DESCRIPTORS}/{number}")
            if name.startswith("socket:"):
                found[name] = number
    return found


@contextlib.contextmanager
def _opened(number: int) -> Generator[socket.socket | None]:
    """A TCP socket of this process. None if the descriptor belongs to another kind of socket, or was closed."""
    try:
        is_blocking = os.get_blocking(number)
        one = socket.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with one:
        # Restore the blocking mode: Python has changed it if the program has set a default timeout for sockets.
        one.setblocking(is_blocking)
        yield one if one.family in _FAMILIES and one.type is socket.SOCK_STREAM else None


def _listening_port(number: int) -> int | None:
    with _opened(number) as one, contextlib.suppress(OSError):
        if one is not None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return one.getsockname()[1]
    return None
