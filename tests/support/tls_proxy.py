"""Puts TLS in front of a server of this machine: it decrypts, and passes the bytes on as they are."""

import contextlib
import functools
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.networks import Network, make_there

_BLOCK = 1 << 16


class _Handler(socketserver.BaseRequestHandler):
    server: "_Proxy"

    def handle(self) -> None:
        with contextlib.suppress(OSError), self.server.context.wrap_socket(self.request, server_side=True) as client:
            with socket.create_connection(("127.0.0.1", self.server.target)) as target:
                back = threading.Thread(target=_pass_on, args=(target, client), daemon=True)
                back.start()
                _pass_on(client, target)
                back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, target: int, context: ssl.SSLContext) -> None:
        super().__init__((host, 0), _Handler)
        self.target, self.context = target, context


@contextmanager
def tls_in_front_of(target: int, *, host: str, certificates: Path, network: Network | None = None) -> Iterator[str]:
    """The https address at `host` of the server whose port on loopback is `target`; see `make_certificates`.

    With a `network`, the address is there, and the server itself cannot be reached from there.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    make = functools.partial(_Proxy, host, target, context)
    with make() if network is None else make_there(network, make) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"https://{host}:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
            thread.join()


__all__ = ["tls_in_front_of"]
