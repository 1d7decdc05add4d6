"""Finds the namespaces that a restore has made, so that CRIU can enter them.

In such a namespace CRIU runs as root, and the kernel looks for CRIU and its libraries in the namespace's mounts. A
namespace that a user or a container has made can have other files. With these files, another program could run as
root of this machine.
"""

import os
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation.processes import is_of_own_namespace, number_inside, status_words, user_of

_KINDS = ("pid", "mnt")


def first_process_of(pid: int) -> int:
    """The first process of the PID namespace of a process. After a restore, this is CRIU, which belongs to this user.

    Args:
        pid: a process in another PID namespace.

    Raises:
        FreezeError: the first process is not above `pid`, belongs to another user, or may see other files than
            this process. So CRIU must not run in this namespace.
    """
    try:
        first = _first_above(pid)
        if first is not None and user_of(first) == os.getuid() and _is_of_this_machine(Path(f"/proc/{first}")):
            return first
    except OSError:  # a process has ended
        pass
    raise FreezeError(
        f"process {pid} is in a container, or in namespaces of its user, in which CRIU must not run as root; the "
        "processes run on, and no image was made",
        hint="run the command in the container; or freeze the first process of the namespace",
    )


def _first_above(pid: int) -> int | None:
    """The first process of the PID namespace of `pid`, if it is above `pid` in the tree; otherwise None."""
    namespace = os.stat(f"/proc/{pid}/ns/pid")
    while pid:
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/pid"), namespace):
            return None
        if number_inside(pid) == 1:
            return pid
        pid = int(status_words(Path(f"/proc/{pid}"), b"PPid:")[0])
    return None


def _is_of_this_machine(process: Path) -> bool:
    """Whether only root of this machine can have mounted anything for `process`, and its root folder is the same as
    here."""
    are_own = all(is_of_own_namespace(process / "ns" / kind) for kind in _KINDS)
    return are_own and os.path.samestat(os.stat(process / "root"), os.stat("/"))
