"""Locks on the manifests of checkpoints, held by processes that may only read them: they would keep all checkpoints.

A lock says nothing certain about its holder. The process that took it may have ended, and its number may belong to
another process by now; and in a container, the processes of others are not visible.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading
from safepoint.storage import local_folder
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import parse_location
from safepoint.storage.store import ABSENT
from tests.support.checkpoints import commit, prepared

_STRANGER, _USER = 65534, 65533
_KINDS = ("flock", "fcntl", "open file")
_STEPS = (1, 2, 3, 4, 5, 6)
_HOLD = f"""
import fcntl, os, struct, sys
kind, has_ended, *paths = sys.argv[1:]
files = [open(path) for path in paths]
os.setgroups([]); os.setgid({_STRANGER}); os.setuid({_STRANGER})
def lock():
    for file in files:
        if kind == "flock":
            fcntl.flock(file, fcntl.LOCK_SH)
        else:
            command = fcntl.F_SETLK if kind == "fcntl" else fcntl.F_OFD_SETLK
            fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
taker = os.getpid()
if has_ended == "yes":
    taker = os.fork()
    if not taker:
        lock()
        os._exit(0)
    os.waitpid(taker, 0)
else:
    lock()
print(taker, flush=True)
sys.stdin.read()
"""
_PRUNE = """
import encodings.ascii, os, sys  # while they may be read
from pathlib import Path
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies, prune
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
prune(OutputFolder(Path(sys.argv[1])), parse_policies("newest=1"), print)
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """Six checkpoints that everyone may read, of a user who is not root."""
    made = prepared(tmp_path / "out")
    for step in _STEPS:
        commit(made, step)
    for path in (made.root, *made.root.rglob("*")):
        os.chown(path, _USER, _USER)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    return made


@contextlib.contextmanager
def stranger(output: OutputFolder, kind: str, *, has_ended: bool = False) -> Generator[int]:
    """A process of another user that has locked all manifests; the number of the process that took the locks."""
    manifests = [output.root / f"checkpoint-{step}" / "safepoint-manifest.json" for step in _STEPS]
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, kind, "yes" if has_ended else "no", *manifests],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate(timeout=30)


def steps_after_pruning(output: OutputFolder, *, user: int = _USER, is_container: bool = False) -> list[int]:
    """What is left of the checkpoints when all but the newest should be deleted."""
    command = [sys.executable, "-c", _PRUNE, output.root, str(user)]
    if is_container:
        command = ["unshare", "--pid", "--fork", "--mount-proc", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output.steps()


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("user", [_USER, 0])
def test_outside_of_containers(user: int, kind: str, has_ended: bool, output: OutputFolder) -> None:
    """No lock of another user counts."""
    with stranger(output, kind, has_ended=has_ended):
        assert steps_after_pruning(output, user=user) == [6]


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("user", [_USER, 0])
def test_in_a_container(user: int, kind: str, has_ended: bool, output: OutputFolder) -> None:
    """Nothing tells a neighbour's lock from that of a pod that reads a checkpoint: it counts for two checkpoints."""
    with stranger(output, kind, has_ended=has_ended):
        assert len(steps_after_pruning(output, user=user, is_container=True)) <= 3


def test_a_process_of_root_with_the_number_of_one_that_has_ended(output: OutputFolder) -> None:
    """The stranger has waited until the kernel gives the number away."""
    last, holder = Path("/proc/sys/kernel/ns_last_pid"), None
    if not os.access(last, os.W_OK):
        pytest.skip("the kernel lets no one choose the number of a process")
    with stranger(output, "flock", has_ended=True) as number:
        for _ in range(50):
            last.write_text(str(number - 1))
            started = subprocess.Popen(["sleep", "60"])
            if started.pid == number:
                holder = started
                break
            started.kill()
            started.wait()
        if holder is None:
            pytest.skip("other processes got the number")
        try:
            assert steps_after_pruning(output) == [6]
        finally:
            holder.kill()
            holder.wait()


@pytest.mark.parametrize("kind", _KINDS)
def test_a_lock_does_not_prevent_leases(kind: str, output: OutputFolder) -> None:
    """A reader holds a lease all the same, and its checkpoint stays."""
    manifest = output.root / "checkpoint-2" / "safepoint-manifest.json"
    with stranger(output, kind):
        assert lease_on(manifest) is Lease.NONE
        with reading(manifest):
            assert lease_on(manifest) is Lease.READER
            prune(output, parse_policies("newest=1"), lambda event: None)
            assert output.steps() == [6, 2]


def test_the_lease_of_another_user_who_may_write(output: OutputFolder) -> None:
    """Such as the owner of the folder, when root prunes it; from a container too."""
    manifest = output.root / "checkpoint-2" / "safepoint-manifest.json"
    code = (
        "import os, sys; from pathlib import Path; from safepoint.foundation.shared_folders.leases import reading\n"
        f"os.setgid({_USER}); os.setuid({_USER})\n"
        "with reading(Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, manifest], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        assert lease_on(manifest) is Lease.READER
        assert steps_after_pruning(output, user=0, is_container=True) == [6, 2]
    finally:
        process.communicate(timeout=30)
    assert lease_on(manifest) is Lease.NONE


@pytest.mark.timeout(60)
def test_the_lock_of_a_folder_as_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may read the folder can lock it: a copy, or an export, to this folder would never end."""
    monkeypatch.setattr(local_folder, "_LOCK_WITHIN_S", 0.2, raising=False)
    target = tmp_path / "store"
    target.mkdir()
    holder = os.open(target, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    store = LocalStore(parse_location(str(target)))

    def write() -> None:
        for number in range(20):
            store.write(str(number), b"content", condition=ABSENT)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits"
    os.close(holder)
    assert len(list(store.list())) == 20


def test_a_reader_that_may_not_write(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod in which the volume is read-only: two checkpoints with such readers stay."""
    real = os.open

    def read_only(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(30, "Read-only file system", path)
        return real(path, flags, *arguments, **options)

    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            for step in (2, 3):
                manifest = output.root / f"checkpoint-{step}" / "safepoint-manifest.json"
                stack.enter_context(reading(manifest))
                assert lease_on(manifest) is Lease.READER  # this user's, on this machine
        assert steps_after_pruning(output, user=_USER, is_container=True) == [6, 3, 2]
