"""Identifies processes, even if a pid is reused. Finds and ends the processes of a job.

Everything is read from /proc. The launchers of a job set an environment variable, and all their children inherit it.
The processes of the job are found by this variable, even if they have left their parent.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import sys
import weakref
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safepoint.errors import printable

_PROC = Path("/proc")
_OWNER_OF_NAMESPACE = 0xB701
"""NS_GET_USERNS, see ioctl_ns(2)."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel: the number of the PID namespace that contains all others."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_IS_HIDDEN = {errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM}
"""The errors of files in /proc if the process has ended, or if this process may not read the file."""
_ALL_USERS = ["0", "0", "4294967295"]
"""The map of the outermost user namespace: each number stands for itself."""
STOPPED = frozenset("Tt")
"""The states of a process that is stopped, or that a debugger traces."""
JOB_VARIABLE = "SAFEPOINT_JOB_DIR"
"""The environment variable with the job's folder. It is set in all processes of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identifies one process.

    Args:
        pid: its number.
        start_ticks: when it started, in clock ticks since the machine booted.
        boot: identifies the boot of the machine.
    """

    pid: int
    start_ticks: int
    boot: str

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. A zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks and boot_id() == self.boot

    def send(self, number: int) -> None:
        """Send the signal `number` to the process, if the process still runs."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_to_group(self, number: int) -> None:
        """Send the signal `number` to the process group that this process leads, or led before it ended."""
        if identify(self.pid) in {None, self}:  # do nothing if another process has this pid now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def identify(pid: int) -> ProcessId | None:
    """The identity of a process; None when there is no such process."""
    ticks = _start_ticks(pid, also_ended=True)  # include a child that has ended but was not reaped
    return None if ticks is None else ProcessId(pid=pid, start_ticks=ticks, boot=boot_id())


def boot_id() -> str:
    """Identifies this boot of the machine; empty when unknown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def processes_of(folder: Path) -> list[int]:
    """The pids of a job's processes, without the calling process. `folder` is the job's folder.

    Only processes of this user count: any user can set the variable, and root can read it in the processes of all
    users. The variables of other users' processes are not read at all. The kernel would read them from the memory of
    the process, and the user may have mapped this memory from a file system that never answers.
    """
    listed = [int(entry) for entry in os.listdir(_PROC) if entry.isdecimal()]
    found = [pid for pid in listed if pid != os.getpid() and _is_process_of(pid, folder)]
    return [pid for pid in found if _start_ticks(pid) is not None]


def memory_of(pid: int, folder: Path) -> int | None:
    """The bytes of memory that a process of a job uses; None if this pid is not a process of the job.

    Memory that several processes share counts for each of them. `folder` is the job's folder.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        if _is_process_of(pid, folder):
            return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _is_process_of(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        if user_of(pid) == os.getuid():
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            return f"{JOB_VARIABLE}={folder}".encode() in variables
    return False


def kernel_lines(path: Path) -> list[bytes]:
    """The lines of a list in /proc.

    Other users choose names in such lists, for example names of processes and mounts. A name may have any bytes, and
    the kernel escapes only a few, among them the newline. So the lines are not decoded: the bytes might not be UTF-8,
    and `str.splitlines` would also split a line at other characters in a name, such as a vertical tab.

    Raises:
        OSError: the list cannot be read.
    """
    return path.read_bytes().split(b"\n")


def stat_fields(folder: Path) -> list[bytes]:
    """The fields of the file `stat` of a process or a thread, from its state on; empty if it has ended.

    The state is the 3rd field of the file. The name before it, in brackets, may contain spaces and brackets itself.

    Args:
        folder: the folder of the process or the thread in /proc.
    """
    with contextlib.suppress(OSError, IndexError):
        return (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()
    return []


def run_state(folder: Path) -> str:
    """The state of a process or a thread as one letter, such as a letter of `STOPPED`; X if it has ended."""
    fields = stat_fields(folder)
    return fields[0].decode() if fields else "X"


def status_words(folder: Path, name: bytes) -> list[bytes]:
    """The words of one line of the file `status` of a process, without the first word; empty without such a line.

    Args:
        folder: the folder of the process in /proc.
        name: the first word of the line, such as `Uid:`.

    Raises:
        OSError: the process has ended.
    """
    for line in kernel_lines(folder / "status"):
        if line.startswith(name):
            return line.split()[1:]
    return []


def tree_of(root: int) -> list[int]:
    """The processes of the tree of `root`, parents first; empty if `root` does not exist."""
    found: list[int] = []
    pending = [root]
    while pending:
        pid = pending.pop(0)
        children = children_of(pid)
        if children is not None:
            found.append(pid)
            pending += children
    return found


def children_of(pid: int) -> list[int] | None:
    """The processes that the process `pid` has started; None if there is no process `pid`."""
    found: list[int] = []
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return None
    for task in tasks:
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def name_of(pid: int, proc: Path = _PROC) -> str:
    """The name of a process, such as `python3`, with escapes for control characters; `?` if it has ended."""
    try:
        return printable((proc / str(pid) / "comm").read_text(errors="replace").strip()) or "?"
    except OSError:
        return "?"


def number_inside(pid: int) -> int:
    """The number of a process in its own PID namespace.

    The result is `pid` if Safepoint is in the same namespace, or if the process has ended.

    Args:
        pid: the number of the process in Safepoint's namespace.
    """
    with contextlib.suppress(OSError, IndexError):
        return int(status_words(_PROC / str(pid), b"NSpid:")[-1])
    return pid


def with_number_inside(number: int, open_file: Path) -> int | None:
    """Find the process of this user that has `number` in its own PID namespace, and has a file open.

    Args:
        number: the number of the process in its own namespace.
        open_file: the file.

    Returns:
        The number of the process in Safepoint's namespace; None if there is no such process.
    """
    file = open_file.stat()
    for pid in [number, *(int(entry) for entry in os.listdir(_PROC) if entry.isdecimal())]:
        with contextlib.suppress(OSError):
            if number_inside(pid) == number and user_of(pid) == os.getuid():
                for descriptor in (_PROC / str(pid) / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.path.samestat(descriptor.stat(), file):
                            return pid
    return None


def user_of(pid: int) -> int | None:
    """The real user of a process, which a setuid program does not change; None when the process has ended."""
    with contextlib.suppress(OSError):
        return _user_of(pid)
    return None


def _user_of(pid: int) -> int | None:
    with contextlib.suppress(IndexError):
        return int(status_words(_PROC / str(pid), b"Uid:")[0])
    return None


def is_this_user(user: int) -> bool:
    """Whether `user` is certainly the user of this process.

    If the user of this process is one of `unknown_users`, the result is True only if the network namespace of this
    process belongs to the user namespace of this process.

    Args:
        user: the number that the kernel reports as the user of a socket.
    """
    return user == os.geteuid() and (user not in unknown_users() or is_of_own_namespace(_PROC / "self/ns/net"))


def unknown_users() -> frozenset[int]:
    """The number that the kernel reports in a user namespace for all users who have no number there.

    Empty in the outermost namespace, where each user has a number.
    """
    with contextlib.suppress(OSError):
        if (_PROC / "self/uid_map").read_text().split() == _ALL_USERS:
            return frozenset()
    try:
        return frozenset({int((_PROC / "sys/kernel/overflowuid").read_text())})
    except (OSError, ValueError):
        return frozenset({65534})


def is_of_own_namespace(namespace: Path) -> bool:
    """Whether a namespace, such as `/proc/self/ns/net`, belongs to the user namespace of this process."""
    with contextlib.suppress(OSError), namespace.open("rb") as file:  # an outer user namespace cannot be opened
        owner = fcntl.ioctl(file, _OWNER_OF_NAMESPACE)
        try:
            return os.path.samestat(os.fstat(owner), os.stat(_PROC / "self/ns/user"))
        finally:
            os.close(owner)
    return False


def place_of(status: os.stat_result) -> str:
    """The device and the inode number of a file, as /proc writes them."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def find_lock(status: os.stat_result) -> tuple[bool, bool]:
    """Whether any process of this machine holds a lock on a file, and whether one of this user's processes does.

    The pids in the kernel's list of locks are not used. A process may pass its lock on together with the open file,
    and end. Another process may then get its pid. So the open files of this user's processes are searched.

    Raises:
        OSError: /proc cannot be read, for example because this process has too many open files.
    """
    place, is_listed = place_of(status), False
    with _if_visible():
        is_listed = place in (_PROC / "locks").read_text(encoding="utf-8").split()
    for entry in os.listdir(_PROC):
        with _if_visible():
            is_own = entry.isdecimal() and _user_of(int(entry)) == os.getuid()
            if is_own and any(_holds_lock(file, place) for file in (_PROC / entry / "fdinfo").iterdir()):
                return True, True
    return is_listed, False


def _holds_lock(file: Path, place: str) -> bool:
    with _if_visible():
        lines = kernel_lines(file)
        return any(place.encode() in line.split() for line in lines if line.startswith(b"lock:"))
    return False


@contextlib.contextmanager
def _if_visible() -> Generator[None]:
    """Leave the `with` block if the process has ended, has closed the file, or hides its open files."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IS_HIDDEN:
            raise


def is_seeing_all() -> bool:
    """Whether /proc shows all processes of this machine, and not only the processes of one container."""
    try:
        return os.stat(_PROC / "self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def kill(pids: Iterable[int]) -> None:
    """Kill these processes with SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def wait_for_end(process: int, limit_s: float | None = None) -> bool:
    """Wait until a process has ended; returns whether it has.

    Args:
        process: a pidfd, a descriptor that stands for the process.
        limit_s: how long to wait, in seconds; None for no limit.
    """
    waiting = select.poll()
    waiting.register(process, select.POLLIN)  # a pidfd is readable when its process has ended
    return bool(waiting.poll(None if limit_s is None else 1000 * max(0.0, limit_s)))


def end_with_parent(parent: int, number: int) -> None:
    """Make the kernel send this process the signal `number` when its parent ends. On Linux only.

    If the parent has ended already, this process sends the signal to itself.

    Args:
        parent: the process id of the parent.
        number: the signal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def set_name(name: str) -> None:
    """Give this process a name, of which `ps -o comm` and `top` show at most 15 bytes. Only on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


_not_for_children: "weakref.WeakSet[Any]" = weakref.WeakSet()


def close_in_children(connection: Any) -> None:
    """Close `connection` in forked processes: a data loader's worker would keep it open after the rank has died."""
    _not_for_children.add(connection)


def _close_in_child() -> None:
    for connection in list(_not_for_children):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def _start_ticks(pid: int, *, also_ended: bool = False) -> int | None:
    fields = stat_fields(_PROC / str(pid))
    if not fields or (fields[0] in {b"Z", b"X"} and not also_ended):
        return None
    return int(fields[19])  # the 22nd field of the file
