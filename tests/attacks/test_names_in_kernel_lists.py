"""Names that other users choose, in lists of the kernel: those of processes, and those of FUSE mounts.

A name may have any bytes. The kernel escapes few of them, and `str.splitlines` splits at more characters than the
newline.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from safepoint.foundation import processes
from safepoint.foundation.volumes import mounts
from safepoint.foundation.volumes.mounts import Mount, file_system_of, mount_of
from safepoint.snapshot.memory import host_memory

_STRANGER = 65534
_PR_SET_NAME = 15
_BREAKS = [b"\v", b"\f", b"\r", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8"]
"""What `str.splitlines` takes for the end of a line."""
_ROOT = b"22 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n"
_ALL = [*_BREAKS, b"\xff", b"\xed\xa0\x80", b"\\040", b" - "]


@pytest.fixture
def named(request: pytest.FixtureRequest) -> Generator[int]:
    """A process with the name that the test gives; of another user, if this one is root."""
    code = (
        "import ctypes, os, sys\n"
        f"if os.getuid() == 0: os.setgroups([]); os.setgid({_STRANGER}); os.setuid({_STRANGER})\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_NAME}, bytes.fromhex(sys.argv[1]), 0, 0, 0)\n"
        "print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, request.param.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    yield process.pid
    process.communicate(timeout=30)


@pytest.mark.parametrize("named", [b"\xff\xfe", b"a\xff) Z 1 1 1", *_BREAKS], indirect=True)
def test_a_process_of_any_name(named: int) -> None:
    """Such a process may have got the pid of a process of a job that has ended."""
    found = processes.identify(named)
    assert found is not None
    assert found.is_alive
    other = processes.ProcessId(pid=named, start_ticks=1, boot=found.boot)
    assert not other.is_alive
    other.send(signal.SIGTERM)
    other.send_to_group(signal.SIGTERM)
    assert found.is_alive


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("named", [one + b"Uid: 0" for one in _BREAKS], indirect=True)
def test_a_process_that_claims_another_user(named: int) -> None:
    """Its user would count as root: root's job would wait for this process, and its lock would count as root's."""
    assert processes.user_of(named) == _STRANGER


@pytest.mark.parametrize("name", _ALL)
def test_a_mount_of_any_name(name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any user can make it with FUSE. Neither a start nor a check of a file may fail because of it."""
    (tmp_path / "self").mkdir()
    table = tmp_path / "self" / "mountinfo"
    hostile = name.replace(b" ", b"\\040")
    table.write_bytes(
        _ROOT
        + b"40 22 0:50 / /tmp/a" + hostile + b"b rw,nosuid shared:9 - fuse.x" + hostile + b" rw,user_id=1600\n"
        + b"41 22 0:50 / /tmp/" + hostile + b" rw - fuse e" + hostile + b"vil rw,user_id=1600\n"
        + b"42 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    )  # fmt: skip
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    assert file_system_of(Path("/")) == "ext4"
    assert mount_of(Path("/")) == Mount(point=Path("/"), root="/", kind="ext4")
    assert mount_of(Path("/sys/fs/cgroup")) == Mount(point=Path("/sys/fs/cgroup"), root="/", kind="cgroup2")
    (tmp_path / "meminfo").write_text("MemTotal: 100000000 kB\nMemAvailable: 50000000 kB\n")
    (tmp_path / "self" / "cgroup").write_bytes(b"0::/a" + name + b"\n")
    assert host_memory.look(tmp_path) is not None


def test_the_kernels_own_list(tmp_path: Path) -> None:
    """In a mount namespace of its own: the kernel's own list has the name."""
    script = (
        'mkdir -p "$1/$2" && mount -t tmpfs hostile "$1/$2" && shift 2 && exec "$@"'
        if os.getuid() == 0
        else "exit 77"
    )
    code = (
        "from pathlib import Path; from safepoint.snapshot.memory import host_memory; "
        "from safepoint.foundation.volumes.mounts import file_system_of; "
        "host_memory.look(); print('KIND', file_system_of(Path('/proc')))"
    )
    for name in _ALL:
        command = ["unshare", "--mount", "sh", "-c", script, "sh", os.fsencode(tmp_path), b"a" + name + b"b"]
        done = subprocess.run(
            [*command, sys.executable, "-c", code], capture_output=True, text=True, errors="replace", check=False
        )
        if "KIND" not in done.stdout and "Error" not in done.stderr:
            pytest.skip("this system makes no mount namespace")
        assert done.stdout == "KIND proc\n", done.stderr
