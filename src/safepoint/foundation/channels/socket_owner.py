"""Which user has opened the other end of a connection between two programs of this machine.

The kernel reports the user of the socket that has a given pair of addresses. Another user can end a connection, and
its pair of addresses then becomes free for a socket of this user, before this process has accepted the connection and
read what was sent over it. So `user_at_other_end` also checks that the connection still exists.

The kernel reports the user of a single socket (sock_diag(7)). If the kernel does not support this, as in some
sandboxes, this module reads the kernel's table of all sockets (/proc/net/tcp). Reading the table takes tens of
milliseconds for ten thousand sockets.
"""

import contextlib
import errno
import functools
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

Address = tuple[str, int]


class Connected(Protocol):
    """A connected socket of this process, such as a `socket.socket` or the socket of an asyncio transport."""

    def getsockname(self) -> Any:
        """The address of this end."""

    def getpeername(self) -> Any:
        """The address of the other end."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """The value of an option."""
        ...


_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_REQUEST = struct.Struct("=IHHIIBBBBIHH16s16sI8s")
"""struct nlmsghdr and struct inet_diag_req_v2."""
_ANSWER = struct.Struct("=IHHIIBBBB48sIIIII")
"""struct nlmsghdr and struct inet_diag_msg."""
_ERROR = struct.Struct("=IHHIIi")
"""struct nlmsghdr and struct nlmsgerr."""
_LOOPBACK = "127.0.0.1"
_IPV4_BYTES = 4
_ESTABLISHED = 1
_MAPPED = "0000000000000000FFFF0000"


def user_at_other_end(connected: Connected) -> int | None:
    """The user who has opened the other end of a TCP connection.

    None if this user is not known: the other end is on another machine, or one of the two ends is closed, in one
    direction or in both.
    """
    try:
        near, far = (ends[:2] for ends in (connected.getsockname(), connected.getpeername()))
        owner = owner_of(_without_interface(far), _without_interface(near))
        # This is checked last. While this end is connected, no other socket can have the addresses of the other end.
        return owner if is_established(connected) else None
    except OSError:  # the connection has ended
        return None


def is_established(connected: Connected) -> bool:
    """Whether a TCP connection is open in both directions."""
    try:
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False


def owner_of(local: Address, remote: Address) -> int | None:
    """The user of a socket on this machine; None if the socket is closed or does not exist.

    For a socket that its process has closed, the kernel reports root as the user. For this reason, closed sockets
    are treated as missing.

    To find out who is at the other end of a connection, call `user_at_other_end`: the socket with these addresses may
    belong to a later connection.

    Args:
        local: the address of the socket.
        remote: the address that the socket is connected to.
    """
    try:
        return _ask(local, remote)
    except OSError as error:
        # If the kernel supports the request, ENOENT means that this socket is closed. The table is not read in this
        # case: another program could connect and close again and again, and make this process read the table each
        # time.
        is_gone = error.errno == errno.ENOENT and _answers()
        return None if is_gone else _find(local, remote)


@functools.cache
def _answers() -> bool:
    """Whether the kernel finds a socket that exists.

    If sock_diag is not supported, the kernel reports ENOENT for every socket.
    """
    with (
        contextlib.suppress(OSError),
        socket.create_server((_LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        return _ask(client.getsockname(), client.getpeername()) is not None
    return False


def _ask(client: Address, server: Address) -> int | None:
    (client_host, client_port), (server_host, server_port) = client, server
    ports = socket.htons(client_port), socket.htons(server_port)
    hosts = _packed(client_host), _packed(server_host)
    head = _REQUEST.size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0
    family = socket.AF_INET if len(hosts[0]) == _IPV4_BYTES else socket.AF_INET6
    what = family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_REQUEST.pack(*head, *what, *ports, *hosts, 0, _ANY_COOKIE))
        answer = kernel.recv(4096)
    if len(answer) < _ANSWER.size:  # an error
        error = -_ERROR.unpack_from(answer)[-1]
        raise OSError(error, "the kernel does not report who owns the socket")
    _, kind, _, _, _, _, state, _, _, _, _, _, _, user, inode = _ANSWER.unpack_from(answer)
    return user if kind == _SOCK_DIAG_BY_FAMILY and state == _ESTABLISHED and inode else None


def _find(client: Address, server: Address) -> int | None:
    # A client may use an IPv6 socket for an IPv4 address, as torch's client does.
    for table, prefix in (("tcp", ""), ("tcp6", _MAPPED)):
        ends = f" {_as_listed(*client, prefix)} {_as_listed(*server, prefix)} {_ESTABLISHED:02X} "
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines():
                if ends in line:
                    columns = line.split()
                    return int(columns[7]) if columns[9] != "0" else None
    return None


def _without_interface(address: Address) -> Address:
    """An address without the interface of a link-local address."""
    host, port = address
    return host.partition("%")[0], port


def _as_listed(host: str, port: int, prefix: str) -> str:
    address = _packed(host)
    words = [int.from_bytes(address[begin : begin + 4], "little") for begin in range(0, len(address), 4)]
    before = prefix if len(address) == _IPV4_BYTES else ""
    return f"{before}{''.join(f'{word:08X}' for word in words)}:{port:04X}"


def _packed(host: str) -> bytes:
    """The bytes of an address: 4 for IPv4, even if an IPv6 socket reports the address, and 16 for IPv6."""
    if "." in host:
        return socket.inet_aton(host.removeprefix("::ffff:"))
    return socket.inet_pton(socket.AF_INET6, host)
