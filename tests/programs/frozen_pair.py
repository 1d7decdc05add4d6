"""Two processes with a TCP connection between them compute a chain of digests, and write a line for each step.

    frozen_pair.py OUT STEPS PAUSE_S

The program pauses after each step, until there is a file OUT.fast.
"""

import hashlib
import os
import socket
import sys
import time


def answer(connection: socket.socket) -> None:
    """The second process: its state depends on everything that it has received."""
    state = hashlib.sha256(b"begin")
    while data := connection.recv(32, socket.MSG_WAITALL):
        state.update(data)
        connection.sendall(state.digest())


def main() -> None:
    out, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if os.fork() == 0:
            server.close()
            answer(socket.create_connection(("127.0.0.1", port)))
            return
        connection, _ = server.accept()
    state = b"begin"
    with connection, open(out, "a", buffering=1) as file:
        for step in range(steps):
            connection.sendall(hashlib.sha256(state + step.to_bytes(4)).digest())
            state = connection.recv(32, socket.MSG_WAITALL)
            file.write(f"{step} {state.hex()}\n")
            if not os.path.exists(f"{out}.fast"):
                time.sleep(pause_s)
        file.write(f"end {state.hex()}\n")


if __name__ == "__main__":
    main()
