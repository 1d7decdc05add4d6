"""Runs a program in a container of a job, and reads what it prints (`pods/exec`, over a WebSocket)."""

import json
from collections.abc import Iterator, Sequence

from safepoint.errors import SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.suspension.websocket import messages, upgrade_headers

_PROTOCOLS = "v5.channel.k8s.io, v4.channel.k8s.io"
_OUTPUT, _ERRORS, _END = 1, 2, 3
"""The first byte of each message, which names the stream that the message belongs to."""
_MOST_BYTES = 1 << 20
_MOST_SHOWN = 400


def run_in_pod(
    api: ClusterApi, pod: str, container: str, command: Sequence[str], *, idle_s: float, limit_s: float
) -> Iterator[str]:
    """The lines that a program prints.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        pod: the name of the pod.
        container: the name of the container.
        command: the program and its arguments; no shell changes them.
        idle_s: how long the program may print nothing.
        limit_s: how long the program may run.

    Raises:
        AccessDeniedError: you may not run programs in pods.
        TransientError: the connection broke, or the program printed nothing for too long.
        WaitTimeoutError: the program ran longer than `limit_s`. This call does not end the program.
        SafepointError: the program cannot be started, it failed, or it prints more than 1 MiB.
    """
    rest, errors, num_bytes = b"", b"", 0
    with api.upgraded(pod, container, command, headers=upgrade_headers(_PROTOCOLS)) as connection:
        for message in messages(connection, idle_s=idle_s, limit_s=limit_s):
            stream, data = message[:1], message[1:]
            num_bytes += len(data)
            if num_bytes > _MOST_BYTES:
                raise SafepointError(
                    f"the program in pod {pod} printed more than {_MOST_BYTES >> 20} MiB; the rest was not read"
                )
            if stream == bytes((_OUTPUT,)):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            elif stream == bytes((_ERRORS,)):
                errors = (errors + data)[-_MOST_SHOWN:]
            elif stream == bytes((_END,)):
                if rest:  # the last line may have no line break
                    yield rest.decode(errors="replace")
                _check_end(data, errors)
                return


def _check_end(data: bytes, errors: bytes) -> None:
    """Raise SafepointError if the program failed, or was not started."""
    try:
        status = json.loads(data)
    except (ValueError, RecursionError):
        status = {}
    if at(status, "status") != "Success":
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SafepointError(last or str(at(status, "message") or "the program failed"))
