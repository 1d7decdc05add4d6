"""One process tree: frozen, restored, and equal to one that was never frozen."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation.processes import tree_of
from tests.support.criu import environment
from tests.support.patience import PATIENCE
from tests.support.s3_server import free_ports

PROGRAM = Path(__file__).parents[1] / "programs" / "frozen_training.py"

ENVIRONMENT = {
    "USE_LIBUV": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "WORLD_SIZE": "2",
}
# torchrun's own store uses io_uring, whatever the environment says.
LAUNCHER = """
import os, subprocess, sys
command = [sys.executable, *sys.argv[1:]]
ranks = [subprocess.Popen(command, env={**os.environ, "RANK": rank}) for rank in "01"]
sys.exit(max(rank.wait() for rank in ranks))
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


class Trainings:
    """Trainings in the background, each the root of a session. All that are left at the end are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restored: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def output(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def start(self, name: str, *words: str) -> int:
        return self.run(name, [sys.executable, str(PROGRAM), str(self.folder / name), *words])

    def run(self, name: str, command: Sequence[str]) -> int:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_ports(1)[0])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process.pid

    def reap(self) -> None:
        """Wait for the process that was ended, so that its number is free."""
        self._processes.pop().wait(30 * PATIENCE)

    def end(self) -> None:
        for root in [*self.restored, *(process.pid for process in self._processes)]:
            for pid in tree_of(root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()

    def has_reached(self, name: str, step: int) -> None:
        wait_for(lambda: len(self.output(name)) > step, f"step {step} of {name}")

    def go_fast(self, name: str) -> None:
        """No more pauses: how long a training takes to its end is not for a limit of a test to know."""
        (self.folder / f"{name}.fast").touch()

    def has_ended(self, name: str) -> list[str]:
        self.go_fast(name)
        wait_for(lambda: self.output(name)[-1:] != [] and self.output(name)[-1].startswith("end"), f"end of {name}")
        return self.output(name)


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[Trainings]:
    found = Trainings(tmp_path)
    yield found
    found.end()


def safepoint(*words: object, code: int = 0) -> dict[str, Any]:
    """Run a command with `--json`; the answer, or the error."""
    result = subprocess.run(
        [sys.executable, "-m", "safepoint.cli.main", *map(str, words), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr + result.stdout
    return json.loads(result.stdout if code == 0 else result.stderr.splitlines()[-1])


@contextlib.contextmanager
def occupied(pid: int) -> Generator[None]:
    """Let another process have the number of an ended one."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    while (other := subprocess.Popen(["sleep", "1000"])).pid != pid:
        other.kill()
        other.wait()
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    try:
        yield
    finally:
        other.kill()
        other.wait()


def reference(trainings: Trainings, *words: str) -> list[str]:
    """What a training writes that is never frozen."""
    subprocess.run([sys.executable, PROGRAM, trainings.folder / "reference", *words], check=True)
    return trainings.output("reference")


def test_a_training_goes_on_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    """Frozen in the middle of a step and ended; restored; each loss and the weights are those of the reference."""
    expected = reference(trainings, "400")
    pid = trainings.start("out", "400", "0.1")
    trainings.has_reached("out", 5)
    frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    assert not frozen["is_running"]
    num_lines = len(trainings.output("out"))
    assert num_lines < 400
    restored = safepoint("thaw", tmp_path / "images")
    assert restored["pid"] == pid
    assert not restored["has_own_namespace"]
    assert trainings.has_ended("out") == expected
    assert [path.name for path in Path("/dev/shm").glob("safepoint-image-*")] == []


@contextlib.contextmanager
def control_group() -> Generator[Path]:
    """A new control group, in one of version 1 or in the tree of version 2."""
    root = next(path for name in ("pids", "unified", "") if (path := Path("/sys/fs/cgroup", name)).is_dir())
    if not os.access(root / "cgroup.procs", os.W_OK):
        pytest.skip("control groups cannot be made here")
    group = root / f"safepoint-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.parametrize("is_left", [True, False])
def test_a_program_of_another_control_group(is_left: bool, trainings: Trainings, tmp_path: Path) -> None:
    """As one that another session or service has started. It is restored in the group of the command."""
    expected = reference(trainings, "60")
    with control_group() as group:
        pid = trainings.start("out", "60", "0.1")
        (group / "cgroup.procs").write_text(str(pid))
        trainings.has_reached("out", 5)
        safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
        trainings.reap()
        if not is_left:
            group.rmdir()
        restored = safepoint("thaw", tmp_path / "images")
        own, other = (Path(f"/proc/{name}/cgroup").read_text() for name in ("self", restored["pid"]))
        assert other == own
        assert trainings.has_ended("out") == expected


def test_files_with_other_permissions(trainings: Trainings, tmp_path: Path) -> None:
    """As those of a volume that Kubernetes has mounted in another pod with an `fsGroup`: the group may write to
    all."""
    expected = reference(trainings, "60")
    pid = trainings.start("out", "60", "0.1")
    trainings.has_reached("out", 5)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    for name in ("out", "out.log"):
        (trainings.folder / name).chmod(0o660)
    trainings.folder.chmod(0o755)
    safepoint("thaw", tmp_path / "images")
    assert trainings.has_ended("out") == expected


def test_a_training_that_runs_on_is_restored_beside_itself(trainings: Trainings, tmp_path: Path) -> None:
    """The numbers of its processes are in use, so the copy gets a namespace. Both end as the reference does."""
    expected = reference(trainings, "400")
    pid = trainings.start("out", "400", "0.1")
    trainings.has_reached("out", 5)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", "--leave-running")
    restored = safepoint("thaw", tmp_path / "images" / "image-1")
    assert restored["has_own_namespace"]
    trainings.restored.append(restored["pid"])
    trainings.go_fast("out")
    wait_for(lambda: sum(line.startswith("end") for line in trainings.output("out")) == 2, "both ends")
    lines = trainings.output("out")
    # Both append to one file: each line of the reference, and those after the freeze twice.
    assert set(lines) == set(expected)
    assert len(expected) < len(lines) < 2 * len(expected)


def test_a_training_in_its_own_namespace_is_frozen_again(trainings: Trainings, tmp_path: Path) -> None:
    """There, its processes have the numbers that they had; with them it is restored where these are free again."""
    expected = reference(trainings, "400")
    pid = trainings.start("out", "400", "0.1")
    trainings.has_reached("out", 5)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    numbers: list[int] = []
    for _ in range(2):
        with occupied(pid):
            restored = safepoint("thaw", tmp_path / "images")
        assert restored["has_own_namespace"]
        numbers.append(restored["pid"])
        trainings.restored.append(restored["pid"])
        trainings.has_reached("out", len(trainings.output("out")) + 3)
        frozen = safepoint("freeze", "--pid", restored["pid"], "--to", tmp_path / "images")
        shown = safepoint("images", "show", tmp_path / "images" / f"image-{len(numbers) + 1}")
        assert shown["manifest"]["parts"][0]["root_pid"] == pid
        assert not frozen["is_running"]
        wait_for(lambda: not Path(f"/proc/{numbers[-1]}").exists(), "the end of the processes")
    restored = safepoint("thaw", tmp_path / "images")
    assert restored == restored | {"pid": pid, "has_own_namespace": False}
    trainings.restored.append(pid)
    assert trainings.has_ended("out") == expected


def test_a_chain_of_three_of_adapters(trainings: Trainings, tmp_path: Path) -> None:
    """The second image stores at most 11 % of the pages, and each is restored by stock CRIU to the same end."""
    expected = reference(trainings, "200", "lora")
    pid = trainings.start("out", "200", "lora", "0.15")
    shares: list[float] = []
    for number in range(3):
        trainings.has_reached("out", 5 * (number + 1))
        is_last = number == 2
        words = [] if is_last else ["--leave-running"]
        frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", *words)
        shares.append(frozen["num_stored"] / frozen["num_pages"])
        print(f"image {number + 1}: {frozen}")
    trainings.reap()
    assert frozen["needs"] == ["image-2", "image-1"]
    assert shares[0] > 0.9
    assert max(shares[1:]) <= 0.11
    for name in ("image-3", "image-2"):
        # The file grows after the earlier freeze, so it is set back to what it was then.
        safepoint("images", "verify", tmp_path / "images" / name, "--deep")
    safepoint("thaw", tmp_path / "images" / "image-3")
    assert trainings.has_ended("out") == expected


def test_two_ranks_of_one_launcher_go_on_bit_for_bit(trainings: Trainings, tmp_path: Path) -> None:
    """DDP over gloo: three processes, with open TCP connections between them, on loopback."""
    launcher = [sys.executable, "-c", LAUNCHER, str(PROGRAM)]
    environ = {**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_ports(1)[0])}
    subprocess.run([*launcher, tmp_path / "reference", "200"], env=environ, check=True, capture_output=True)
    pid = trainings.run("out", [*launcher, str(tmp_path / "out"), "200", "0.3"])
    trainings.has_reached("out", 5)
    frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    assert frozen["num_processes"] == 3
    assert len(trainings.output("out")) < 200
    restored = safepoint("thaw", tmp_path / "images")
    trainings.restored.append(restored["pid"])
    assert trainings.has_ended("out") == trainings.output("reference")


def test_a_damaged_image_is_refused_before_a_process_starts(trainings: Trainings, tmp_path: Path) -> None:
    pid = trainings.start("out", "2000", "0.05")
    trainings.has_reached("out", 2)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    regions = max(
        (tmp_path / "images" / "image-1" / "part-0").glob("*.regions"), key=lambda path: path.stat().st_size
    )
    with regions.open("r+b") as file:
        file.seek(regions.stat().st_size // 2)
        file.write(b"changed")
    error = safepoint("thaw", tmp_path / "images", code=14)
    assert "damaged, or was changed" in error["message"]
    assert not Path(f"/proc/{pid}").exists()


def test_a_full_folder_lets_the_processes_run_on(trainings: Trainings, tmp_path: Path) -> None:
    """The image does not fit; the training was stopped for it, and goes on."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=700", "tmpfs", small], check=True)
    try:
        pid = trainings.start("out", "2000", "0.02")
        trainings.has_reached("out", 2)
        error = safepoint("freeze", "--pid", pid, "--to", small, code=13)
        assert "space" in error["message"] or "room" in error["message"]
        trainings.has_reached("out", len(trainings.output("out")) + 5)
        assert safepoint("images", "list", small) == []
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["dump", "store"])
def test_a_killed_command_lets_the_processes_run_on(
    trainings: Trainings, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """Killed while CRIU runs, or while the pages are stored: the training goes on, and no raw pages are left."""
    images = tmp_path / "images"
    pid = trainings.start("out", "2000", "0.02")
    trainings.has_reached("out", 2)
    command = [sys.executable, "-m", "safepoint.cli.main", "freeze", "--pid", str(pid), "--to", str(images)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    name = "criu-dump-0.log" if moment == "dump" else "work-*/image/part-0/*.regions"
    wait_for(lambda: any((images / ".safepoint" / "images").glob(name)), moment)
    process.send_signal(number)
    process.wait()
    trainings.has_reached("out", len(trainings.output("out")) + 5)
    wait_for(lambda: not list(Path("/dev/shm").glob("safepoint-image-*")), "the raw pages are deleted")
    assert list(images.glob("image-*")) == []
    safepoint("freeze", "--pid", pid, "--to", images)
    assert [path.name for path in images.glob("image-*")] == ["image-1"]


def test_io_uring_is_named(tmp_path: Path, trainings: Trainings) -> None:
    """CRIU cannot dump it; the message says how to start the program without it."""
    program = (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        "ring = libc.syscall(425, 8, ctypes.create_string_buffer(120))\n"
        "print(ring, flush=True)\n"
        "time.sleep(1000)\n"
    )
    pid = trainings.run("ring", [sys.executable, "-c", program])
    log = tmp_path / "ring.log"
    wait_for(lambda: log.read_text().endswith("\n"), "the program")
    if int(log.read_text()) < 0:
        pytest.skip("this kernel has no io_uring")
    error = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", code=1)
    assert "io_uring" in error["message"]
    assert "USE_LIBUV=0" in error["hint"]
    assert "nothing was frozen" in error["message"]
    assert Path(f"/proc/{pid}/status").read_text().find("(sleeping)") > 0


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_without_root_nothing_is_frozen(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *("setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-m", "safepoint.cli.main"),
            *("freeze", "--pid", str(os.getpid()), "--to", str(tmp_path / "images")),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in {1, 16}, result.stderr
