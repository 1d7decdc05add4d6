"""The options of the dashboard. Invalid options are refused before the dashboard listens."""

import ipaddress
import math
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safepoint.errors import UsageError, without_credentials
from safepoint.foundation.quantities import parse_bytes
from safepoint.foundation.shared_folders.ownership import open_trusted
from safepoint.storage.location import parse_location

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_SIGNED_IN = "X-Forwarded-User"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """The options of `safepoint dashboard`.

    Args:
        host: the address to listen on.
        port: the port; 0 for any free port. A fixed port has a risk: after the dashboard has ended, a program of
            another user can listen on it, and send a script to a page that is still open. If a later dashboard uses
            the same port, the script can do there what the user of the browser may do.
        is_read_only: whether every visitor may only read.
        tls_certificate: a PEM file with the certificate; None to answer without TLS.
        tls_key: a PEM file with the key of the certificate; None to answer without TLS.
        names: further names by which browsers reach the dashboard, as in the Host header, without the port.
        proxies: the addresses of the proxies that sign users in. They name the user in a header.
        proxy_users: the user IDs that a proxy on this machine may have, besides your user ID and 0.
        user_header: the header in which a proxy names the user.
        operators: the users who may change something, as a proxy names them.
        gpu_price: the price of an hour of a GPU, in any currency; 0 if it is not known.
        cpu_price: the price of an hour of a processor core, for jobs without GPUs; 0 if it is not known.
        bucket_sizes: location in an object store → how many bytes may be stored below it.

    Raises:
        UsageError: an option is invalid, or other machines could reach the dashboard without TLS.
    """

    host: str = "127.0.0.1"
    port: int = 0
    is_read_only: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    names: tuple[str, ...] = ()
    proxies: tuple[Network, ...] = ()
    proxy_users: tuple[int, ...] = ()
    user_header: str = _SIGNED_IN
    operators: tuple[str, ...] = ()
    gpu_price: float = 0.0
    cpu_price: float = 0.0
    bucket_sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError(
                "TLS needs both a certificate and its key; nothing was started",
                hint="give --tls-certificate and --tls-key",
            )
        for path in (self.tls_certificate, self.tls_key):
            if path is not None and not path.is_file():
                raise UsageError(f"{path} is not a file; nothing was started", hint="give the path of a PEM file")
            if path is not None:
                _check_trusted(path)
        if not self.is_loopback and not self.has_tls:
            raise UsageError(
                f"--host {self.host} can be reached from other machines; without TLS, they could read the cookies; "
                "nothing was started",
                hint="give --tls-certificate and --tls-key, or listen on 127.0.0.1 behind a proxy or an SSH tunnel",
            )
        if not _HEADER.fullmatch(self.user_header):
            raise UsageError(f"--user-header {self.user_header!r} is not the name of a header; nothing was started")
        for option, price in (("--gpu-price", self.gpu_price), ("--cpu-price", self.cpu_price)):
            if not 0 <= price < math.inf:
                raise UsageError(f"{option} {price} is not a price; nothing was started", hint="give 0 or more")
        if self.operators and not self.proxies:
            raise UsageError(
                "--operator names users of a proxy, but no proxy is trusted; nothing was started",
                hint="give --proxy-address, the address that the proxy's requests come from",
            )
        if self.proxy_users and not self.proxies:
            raise UsageError(
                "--proxy-user names the user of a proxy, and no proxy is trusted; nothing was started",
                hint="give --proxy-address, the address that the proxy's requests come from",
            )
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"--name {name!r} is not a host name; nothing was started", hint="leave out the scheme and port"
                )

    @property
    def has_tls(self) -> bool:
        """Whether the dashboard answers over TLS."""
        return self.tls_certificate is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def accepted_names(self) -> frozenset[str]:
        """The names that the Host header of a request may have, in lower case and without the port."""
        own = (f"[{self.host}]" if ":" in self.host else self.host) if self.host not in {"0.0.0.0", "::"} else ""
        return frozenset(name.lower() for name in (*_LOOPBACK, own, *self.names) if name)

    def price_of(self, unit: str) -> float:
        """The price of a slot for an hour; 0 if it is not known.

        Args:
            unit: the kind of the slot, see `JobCost`. The device of a `rank` is not known: it has the price of a
                GPU, or the price of a core if GPUs have no price.
        """
        return self.cpu_price if unit == "CPU" else self.gpu_price or (self.cpu_price if unit == "rank" else 0.0)

    def address(self, port: int) -> str:
        """The address to open in a browser, without a path, such as `http://127.0.0.1:8765`.

        Without TLS, it is the address at which the dashboard listens. A name could lead to another address of this
        machine. A program of another user may listen there at the same port, and would get the token in the link. For
        example, `localhost` may lead to ::1, and the name of the machine to 127.0.1.1.
        """
        name = self.names[0] if self.names and self.has_tls else self.host
        if name in {"0.0.0.0", "::"}:
            name = "localhost"
        elif name == "localhost" and not self.has_tls:
            name = "127.0.0.1"
        shown = f"[{name}]" if ":" in name and not name.startswith("[") else name
        return f"{'https' if self.has_tls else 'http'}://{shown}:{port}"

    def address_by(self, host: str) -> str:
        """The address for another person to open in a browser.

        Args:
            host: the Host header of a request, which the dashboard accepts. With TLS, the address has this name.
        """
        return f"https://{host}" if self.has_tls else self.address(self.port)


def _check_trusted(path: Path) -> None:
    """Raise UsageError if another user may have written the file. The other user could know the dashboard's key."""
    try:
        open_trusted(path).close()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be used: {error.strerror}; nothing was started", hint="use a file that only you may write"
        ) from error


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """The addresses of proxies.

    Raises:
        UsageError: a text is neither an address nor a network.
    """
    found: list[Network] = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise UsageError(
                f"--proxy-address {text!r} is invalid: {error}; nothing was started",
                hint="give an address or a network, such as 127.0.0.1 or 10.128.0.0/14",
            ) from error
    return tuple(found)


def user_numbers(texts: Sequence[str]) -> tuple[int, ...]:
    """The IDs of users of this machine.

    Args:
        texts: each the name or the ID of a user.

    Raises:
        UsageError: a text is no name of a user of this machine.
    """
    found: list[int] = []
    for text in texts:
        try:
            found.append(int(text) if text.isascii() and text.isdecimal() else pwd.getpwnam(text).pw_uid)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"--proxy-user {text[:100]!r}: this machine has no such user; nothing was started",
                hint="give the name or the number of the user that the proxy runs as",
            ) from error
    return tuple(found)


def bucket_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Location in an object store → how many bytes may be stored below it.

    Args:
        texts: each a location, `=` and a size, such as `s3://models/team=2T`.

    Raises:
        UsageError: a text has another form, or its location is not in an object store.
    """
    found: dict[str, int] = {}
    for text in texts:
        place, _, size = text.rpartition("=")
        try:
            location, num_bytes = parse_location(place), parse_bytes(size)
        except ValueError as error:
            raise UsageError(
                f"--bucket-size {without_credentials(text)[:200]!r} is invalid: {error}; nothing was started",
                hint="give a location and a size, such as s3://models/team=2T",
            ) from error
        if not location.is_remote:
            raise UsageError(
                f"--bucket-size names {location}, which is not in an object store; nothing was started",
                hint="leave it out: for a folder, the size of the disk is used",
            )
        found[str(location)] = num_bytes
    return found
