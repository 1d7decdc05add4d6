"""The size limit of /dev/shm in the pods of a job. This module sends no requests.

NCCL and the workers of a DataLoader exchange data through files in /dev/shm. Such files are part of the pod's memory.
"""

import contextlib
from collections.abc import Container, Mapping

from safepoint.errors import UsageError
from safepoint.foundation.quantities import parse_bytes

PATH = "/dev/shm"
"""At this path, each pod gets a volume with the medium Memory, unless its runtime mounts another volume there."""
_LEAST_BYTES = 64 << 20


def parse_shared_memory(option: str, text: str, resources: Mapping[str, str]) -> int:
    """The size limit of /dev/shm in bytes, as a user has written it.

    Args:
        option: the name of the option, for messages.
        text: its value.
        resources: the resources of each pod, by the names that Kubernetes uses.

    Raises:
        UsageError: the text is not a size, or the size is less than the 64 MiB that containers have anyway, or more
            than the pod's memory.
    """
    example = f"for example {option} 8Gi"
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", hint=example) from error
    if size_bytes < _LEAST_BYTES:
        raise UsageError(
            f"{option} {text} is less than 64 MiB, which a container has without this option; nothing was submitted",
            hint=example,
        )
    memory = resources.get("memory")
    with contextlib.suppress(ValueError):  # the check of the resources says what is wrong with an invalid size
        if memory is not None and size_bytes > parse_bytes(memory):
            raise UsageError(
                f"{option} {text} is more than the memory of the pod, {memory}, and files in {PATH} count towards "
                "this memory; nothing was submitted",
                hint="set a smaller size, or more --memory",
            )
    return size_bytes


def check_is_free(limit_bytes: int | None, mounted: Container[str], runtime: str) -> None:
    """Raise UsageError if there is a limit, but the runtime or a patch mounts a volume of its own at /dev/shm."""
    if limit_bytes is not None and PATH in mounted:
        raise UsageError(
            f"--shared-memory has no effect, because runtime {runtime} or a patch mounts a volume at {PATH}; nothing "
            "was submitted",
            hint="leave --shared-memory out, or set the size of that volume",
        )
