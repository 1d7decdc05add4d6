"""`python killed.py LOG [METHOD PATH NUMBER] -- ARGUMENTS…`: a `safepoint` command that is killed after a request.

LOG receives a line for each request that was answered. With METHOD, PATH and NUMBER, SIGKILL ends the process when
that request has been answered for the NUMBERth time, before the command sees the answer.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2

from safepoint.cli.failures import run_command
from safepoint.cli.main import root


def main() -> int:
    log, *words = sys.argv[1:]
    fatal, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    send: Any = httpx2.Client.send
    lock = threading.Lock()
    seen: list[list[str]] = []

    def counted(client: httpx2.Client, request: httpx2.Request, **options: Any) -> httpx2.Response:
        response: httpx2.Response = send(client, request, **options)
        # The names of a job's Secret and of a plan have a random part, which differs from command to command.
        path = re.sub("-nodes-[0-9a-f]{8}$", "-nodes-random", request.url.path)
        what = [request.method, re.sub("/successor-[a-z2-7]{22}$", "/successor-random", path)]
        with lock:
            seen.append(what)
            with Path(log).open("a") as file:
                file.write(f"{' '.join(what)}\n")
            if fatal and what == fatal[:2] and seen.count(what) == int(fatal[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        return response

    setattr(httpx2.Client, "send", counted)  # noqa: B010  a method of another library
    return run_command(root(), arguments)


if __name__ == "__main__":
    sys.exit(main())
