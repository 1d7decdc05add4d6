"""Listens, prints the link, and serves until the process is interrupted."""

import contextlib
import logging
import socket
from asyncio import sslproto
from collections.abc import Callable, Mapping
from dataclasses import replace

import uvicorn

from safepoint.dashboard.access.connections import ACCEPTED_AT_ONCE, BoundedListener, protocol_of
from safepoint.dashboard.access.guard import ENTER
from safepoint.dashboard.access.sessions import Role, Sessions, load_key
from safepoint.dashboard.application import make_application
from safepoint.dashboard.reading.places import OpenJobs
from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import ConflictError
from safepoint.jobs.local.paths import state_folder

_END_WITHIN_S = 2
_MOST_CONNECTIONS = 256
_TLS_BUFFER_BYTES = 16 << 10
"""How much asyncio reads from a TLS connection at once. asyncio makes a buffer of this size for each connection,
before its handshake. A record of TLS has 16 KiB."""


def serve(settings: DashboardSettings, openers: Mapping[str, OpenJobs], show: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: the options.
        openers: the name of each place in `--on` → a function that opens the jobs of this place.
        show: prints a line for the person who has started the dashboard.

    Raises:
        ConflictError: the address is in use, or is not an address of this machine.
        StorageError: the key that signs cookies cannot be read or written.
    """
    sessions = Sessions(load_key(state_folder() / "dashboard.key"), is_read_only=settings.is_read_only)
    listener = _listen(settings)
    port = listener.getsockname()[1]
    role = Role.VIEWER if settings.is_read_only else Role.OPERATOR

    def show_link(used: str | None = None) -> None:
        link = f"{settings.address(port)}{ENTER}?token={sessions.new_link(role)}"
        show(f"Open {link}" if used is None else f"A link was used ({used}). The next one is {link}")

    def started() -> None:
        show_link()
        show("Each link works once. Ctrl-C ends the dashboard; the jobs continue.")

    application = make_application(
        replace(settings, port=port),
        openers,
        sessions,
        link_used=lambda used: show_link(str(used)),
        started=started,
    )
    config = uvicorn.Config(
        application,
        http=protocol_of(listener),
        log_level=logging.ERROR,  # other programs could fill the terminal with warnings about invalid requests
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `access.proxies` decides which headers count
        ws="none",
        lifespan="on",
        limit_concurrency=_MOST_CONNECTIONS,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=_END_WITHIN_S,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    if config.is_ssl:
        sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _listen(settings: DashboardSettings) -> BoundedListener:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = BoundedListener(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConflictError(
            f"the dashboard cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; "
            "nothing was started",
            hint="give another --port, or leave out --port to use any free port",
        ) from error
    return listener
