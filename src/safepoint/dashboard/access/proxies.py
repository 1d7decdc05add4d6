"""The user that a proxy names in a header, if the settings allow this proxy to name users.

If the proxy has an address of this machine, every user of the machine can send requests from this address. So only
you, root and the users of `--proxy-user` may name users: the kernel states which user has opened the connection. In a
container, this check is left out, because all processes there trust each other.
"""

import functools
import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

from safepoint.dashboard.access.sessions import Role, Visitor
from safepoint.dashboard.settings import DashboardSettings
from safepoint.foundation.processes import is_seeing_all, is_this_user
from safepoint.foundation.shared_folders.ownership import user_name

_MOST_CHARACTERS = 256
_log = logging.getLogger("safepoint")


class TwoUsersError(Exception):
    """A request has the header for the user's name twice, so the proxy has written at most one of the two headers."""


def proxied_visitor(
    settings: DashboardSettings,
    client: Sequence[Any] | None,
    headers: Sequence[tuple[bytes, bytes]],
    user: str = "",
) -> Visitor | None:
    """The visitor that a trusted proxy names.

    None if the request does not come from a trusted proxy, if it names no user, or if the user of this machine who
    has sent it may not name users. The header then has no effect.

    Args:
        settings: the options of the dashboard.
        client: address and port of the peer; None if they are not known.
        headers: the headers of the request, with names in lower case.
        user: who has opened the connection, see `connections`; empty for a connection from another machine.

    Raises:
        TwoUsersError: a request from a trusted proxy has the header twice.
    """
    if not settings.proxies or client is None or not _is_trusted(settings, str(client[0])):
        return None
    wanted = settings.user_header.lower().encode()
    found = [value for name, value in headers if name == wanted]
    if len(found) > 1:
        raise TwoUsersError
    name = _name_in(found[0]) if found else ""
    if not name:
        return None
    if not _may_name(settings, user):
        return None
    is_operator = name in settings.operators and not settings.is_read_only
    return Visitor(session=f"proxy {name}", role=Role.OPERATOR if is_operator else Role.VIEWER, name=name)


def _name_in(value: bytes) -> str:
    """The name in a header, exactly as the proxy has sent it; empty for a value that is not a name.

    Only the spaces and tabs that HTTP allows around a value are removed. If other spaces were removed, such as a
    no-break space, the name of one user could become the name of another user.
    """
    try:
        name = value.strip(b" \t").decode()
    except UnicodeDecodeError:
        return ""
    return name if len(name) <= _MOST_CHARACTERS and name.isprintable() else ""


def _may_name(settings: DashboardSettings, user: str) -> bool:
    if not user or not is_seeing_all():
        return True
    if user.isdecimal() and (int(user) in {0, *settings.proxy_users} or is_this_user(int(user))):
        return True
    _warn(user)
    return False


@functools.cache
def _warn(user: str) -> None:
    who = f"of user {user_name(int(user))}" if user.isdecimal() else "of an unknown user"
    _log.warning(
        "a program %s of this machine has named a user, from the address of the proxy; the name was ignored; if this "
        "program is the proxy, start the dashboard with --proxy-user",
        who,
    )


def _is_trusted(settings: DashboardSettings, address: str) -> bool:
    try:
        peer = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None:
        peer = peer.ipv4_mapped
    return any(peer in network for network in settings.proxies)
