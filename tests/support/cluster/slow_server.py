"""A proxy in front of the API server that passes on what clients send some time later, or not at all."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path

from tests.support.cluster.running import RunningCluster

_BLOCK = 1 << 16


class SlowServer:
    """The proxy, on a free port of this machine.

    Args:
        target: the address and port of the API server.
        delay_s: how much later each block of a client arrives.
        most_blocks: after so many blocks of a connection, nothing is passed on any more; None for no end.
    """

    def __init__(self, target: tuple[str, int], *, delay_s: float, most_blocks: int | None) -> None:
        self._target, self._delay_s, self._most_blocks = target, delay_s, most_blocks
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()
            num_blocks = 0
            with contextlib.suppress(OSError):
                while block := client.recv(_BLOCK):
                    if self._most_blocks is not None and num_blocks >= self._most_blocks:
                        self._is_over.wait()
                        return
                    num_blocks += 1
                    time.sleep(self._delay_s)
                    server.sendall(block)

    def close(self) -> None:
        """End it, and what it keeps."""
        self._is_over.set()
        self._listener.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)


@contextlib.contextmanager
def slow_server(
    cluster: RunningCluster, folder: Path, *, delay_s: float = 0.0, most_blocks: int | None = None
) -> Generator[Path]:
    """The kubeconfig of an administrator whose requests go through a `SlowServer`."""
    cluster.local("it is at another address than that in the server's certificate")
    document = json.loads(cluster.kubeconfig.read_text())
    address, port = document["clusters"][0]["cluster"]["server"].removeprefix("https://").split(":")
    server = SlowServer((address, int(port)), delay_s=delay_s, most_blocks=most_blocks)
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{server.port}"
    place = folder / "slow.kubeconfig"
    place.write_text(json.dumps(document))
    try:
        yield place
    finally:
        server.close()
