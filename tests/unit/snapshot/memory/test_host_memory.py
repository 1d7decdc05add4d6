"""The least room counts: of the machine, and of every control group around this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.snapshot.memory.host_memory import Room, look

GB = 1 << 30
MACHINE = f"MemTotal: {32 * GB >> 10} kB\nMemFree: 12 kB\nMemAvailable: {20 * GB >> 10} kB\nHugePages_Total: 0\n"


class Tree:
    """A proc file system and the control groups that it speaks of."""

    def __init__(self, root: Path, mounts: str, cgroup: str) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MACHINE)
        (self.proc / "self" / "mountinfo").write_text(mounts.format(cgroup=self.groups))
        (self.proc / "self" / "cgroup").write_text(cgroup)

    def add(self, path: str, **files: object) -> str:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")
        return str(folder)


VERSION_2 = "30 23 0:26 / {cgroup} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n20 1 8:1 / / rw - ext4 /d rw\n"
VERSION_1 = (
    "31 23 0:27 / {cgroup}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 {root} {cgroup}/memory rw,relatime master:9 - cgroup cgroup rw,memory\n"
)


def test_the_machine_alone(tmp_path: Path) -> None:
    """And nothing where the system does not say."""
    tree = Tree(tmp_path, "", "")
    assert look(tree.proc) == Room(available_bytes=20 * GB, limit_bytes=32 * GB, limited_by="the machine")
    (tree.proc / "meminfo").write_text("MemTotal: 1 kB\n")
    assert look(tree.proc) is None
    assert look(tmp_path / "nowhere") is None


def test_version_2_with_nested_limits(tmp_path: Path) -> None:
    """A group above may leave less than one's own; clean page cache can be taken."""
    tree = Tree(tmp_path, VERSION_2, "0::/kubepods/pod/container\n")
    tree.add("", memory__stat="inactive_file 0")
    above = tree.add(
        "kubepods", memory__max=10 * GB, memory__current=9 * GB, memory__stat=f"anon 1\ninactive_file {GB // 2}"
    )
    tree.add("kubepods/pod", memory__max="max", memory__current=9 * GB, memory__stat="inactive_file 0")
    tree.add("kubepods/pod/container", memory__max=8 * GB, memory__current=GB, memory__stat="inactive_file 0")
    assert look(tree.proc) == Room(available_bytes=3 * GB // 2, limit_bytes=10 * GB, limited_by=f"{above}/memory.max")
    tree.add("kubepods", memory__max=7 * GB)
    room = look(tree.proc)
    assert room is not None
    assert room.available_bytes == 0, "more than the limit is used"


def test_version_2_within_a_namespace(tmp_path: Path) -> None:
    """The own group is the root of what is mounted."""
    tree = Tree(tmp_path, VERSION_2, "0::/\n")
    own = tree.add("", memory__max=2 * GB, memory__current=GB, memory__stat=f"inactive_file {GB}")
    assert look(tree.proc) == Room(available_bytes=2 * GB, limit_bytes=2 * GB, limited_by=f"{own}/memory.max")


@pytest.mark.parametrize(("root", "below"), [("/", "docker/abc"), ("/docker", "abc"), ("/docker/abc", "")])
def test_version_1(tmp_path: Path, root: str, below: str) -> None:
    """Whatever part of the hierarchy is mounted; other controllers do not matter."""
    cgroup = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/unified\n"
    tree = Tree(tmp_path, VERSION_1.replace("{root}", root), cgroup)
    own = tree.add(
        f"memory/{below}".rstrip("/"),
        memory__limit_in_bytes=4 * GB,
        memory__usage_in_bytes=3 * GB,
        memory__stat=f"inactive_file 5\ntotal_inactive_file {GB}",
    )
    expected = Room(available_bytes=2 * GB, limit_bytes=4 * GB, limited_by=f"{own}/memory.limit_in_bytes")
    assert look(tree.proc) == expected
    tree.add(f"memory/{below}".rstrip("/"), memory__limit_in_bytes=9223372036854771712)
    assert look(tree.proc) == Room(available_bytes=20 * GB, limit_bytes=32 * GB, limited_by="the machine")


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """Groups of another hierarchy, without the controller, or with noise in their files."""
    tree = Tree(tmp_path, VERSION_2, "0::/own\n3:memory:/not/mounted\n")
    tree.add("own", memory__max="noise", memory__current=1, memory__stat="")
    assert look(tree.proc) == Room(available_bytes=20 * GB, limit_bytes=32 * GB, limited_by="the machine")
    Tree(tmp_path / "other", VERSION_1.replace("{root}", "/other"), "4:memory:/docker\n")
    room = look(tmp_path / "other" / "proc")
    assert room is not None
    assert room.limited_by == "the machine"


def test_some_stays_free() -> None:
    """A twentieth of the limit, at least 64 MiB."""
    room = Room(available_bytes=10 * GB, limit_bytes=100 * GB, limited_by="")
    assert room.spare_bytes == 5 * GB
    assert room.has(5 * GB)
    assert not room.has(5 * GB + 1)
    assert Room(available_bytes=0, limit_bytes=GB, limited_by="").spare_bytes == 64 << 20


LOOK = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from safepoint.snapshot.memory.host_memory import look
room = look()
print(room.limit_bytes, room.available_bytes, room.limited_by)
"""


def own_group() -> Path | None:
    """This process's memory group, version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return None


def test_a_real_limit() -> None:
    """A process in a group of version 1 with 300 MB sees them."""
    above = own_group()
    if above is None or not os.access(above, os.W_OK):
        pytest.skip("needs a writable memory control group of version 1")
    group = above / f"safepoint-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a memory control group cannot be made: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        seen = subprocess.run([sys.executable, "-c", LOOK, str(group)], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    limit, available, by = seen.stdout.split()
    assert int(limit) == 300 << 20
    assert 200 << 20 < int(available) < 300 << 20
    assert by == f"{group}/memory.limit_in_bytes"
