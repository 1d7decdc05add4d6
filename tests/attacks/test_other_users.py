"""Another user of the same machine, without rights: plants files, takes locks and ports, and pretends to be a job."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError, UsageError
from safepoint.foundation import environment
from safepoint.foundation.channels import socket_owner
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.files import FolderLock
from safepoint.foundation.processes import JOB_VARIABLE, processes_of
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading
from safepoint.jobs.local.attempt.launchers import Launchers
from safepoint.jobs.local.paths import make_private
from safepoint.settings.run_settings import RunSettings, place_output
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.protocol.channel import connect, new_keeper_key
from safepoint.snapshot.protocol.messages import KeeperPlan
from safepoint.training.rendezvous import job_secret
from safepoint.training.rendezvous.admission import Gate, Key, RefusedError, SameUser
from safepoint.training.rendezvous.store_server import StoreServer
from tests.support.job_values import job_spec
from tests.support.ports import free_port

_STRANGER = 65534
_SECRET = b"s" * 32
_PLANTED = """
import os
open(os.environ["MARK"], "a").write(" ".join(os.sys.argv) + "\\n")
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def stranger(code: str, *arguments: str, **variables: str) -> Generator[None]:
    """A process of another user that has printed a line, and then waits."""
    code = (
        "import encodings.idna, fcntl, os, socket, sys, threading\n"  # while they may be read
        f"os.setgid({_STRANGER}); os.setuid({_STRANGER})\n"
        f"{code}\nprint('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.communicate(timeout=30)


@pytest.fixture(params=[0o1777, 0o1775], ids=["all", "group"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder like /tmp: everyone, or everyone of a group, may write to it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(request.param)
    return folder


def give_away(path: Path) -> Path:
    os.chown(path, _STRANGER, _STRANGER, follow_symlinks=False)
    return path


class TestPlantedFiles:
    """What another user has put where everyone may write."""

    def test_every_interpreter_ignores_the_current_folder(self) -> None:
        """`python -m` and `python -c` would import modules from there."""
        source = Path(environment.__file__).parents[1]
        started = re.compile(r"(?:executable|python), \"(-[^\"]*)\"")
        first = {
            (str(file), option)
            for file in source.rglob("*.py")
            for option in started.findall(file.read_text("utf-8"))
        }
        assert len(first) >= 8
        assert {option for _, option in first} == {"-P"}

    @pytest.mark.ranks
    @pytest.mark.usefixtures("start_of_ranks")
    @pytest.mark.parametrize("name", ["json.py", "safepoint/__init__.py"])
    def test_modules_in_the_current_folder(self, name: str, shared: Path, tmp_path: Path) -> None:
        """Neither ranks nor keeper import them; the script's own folder counts as ever."""
        mark, script = tmp_path / "mark", tmp_path / "code" / "train.py"
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text(_PLANTED)
        script.parent.mkdir()
        (script.parent / "neighbour.py").write_text("WORD = 'found'")
        script.write_text("import json, neighbour\nprint('SCRIPT', neighbour.WORD)")
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "safepoint.cli.main",
                "run",
                "--output-dir",
                str(tmp_path / "o"),
                str(script),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=shared,
            env={**os.environ, "MARK": str(mark)},
        )
        assert not mark.exists(), mark.read_text()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SCRIPT found" in done.stdout

    @pytest.mark.parametrize("name", ["safepoint.toml", "pyproject.toml"])
    def test_settings(self, name: str, shared: Path) -> None:
        """They could name another output folder, from which a run would resume."""
        prefix = "tool.safepoint.run" if name.startswith("py") else "run"
        (shared / name).write_text(f'[{prefix}]\noutput-dir = "/tmp/evil"\n')
        assert Configuration.load(shared).tables
        give_away(shared / name)
        found = Configuration.load(shared)
        assert not found.tables
        assert "belongs to user" in found.ignored[0]

    @pytest.mark.parametrize(
        "text", ["x = " + "[" * 5000, "x = " + "{a = " * 3000, "x = " + "9" * 5000, f"[{'.'.join('a' * 9000)}]"]
    )
    def test_settings_that_no_parser_likes(self, text: str, tmp_path: Path) -> None:
        """In the current folder, which may be someone else's project."""
        (tmp_path / "safepoint.toml").write_text(f"[run]\n{text}\n")
        with pytest.raises(UsageError, match="nothing was done"):
            Configuration.load(tmp_path)

    @pytest.mark.parametrize("kind", ["folder", "folder above", "link"])
    def test_output_folders(self, kind: str, shared: Path, tmp_path: Path) -> None:
        """A run would resume from what is in it."""
        output, elsewhere = shared / "out", tmp_path / "elsewhere"
        elsewhere.mkdir()
        if kind == "link":
            output.symlink_to(elsewhere)
        else:
            output.mkdir()
        give_away(output)
        with pytest.raises(StorageError, match="belongs to another user"):
            OutputFolder(output / "below" if kind == "folder above" else output).create()
        assert list(elsewhere.iterdir()) == []

    def test_safepoints_own_folder(self, shared: Path) -> None:
        """Its owner could put another working folder in the place of the run's, and hold the lock."""
        output = OutputFolder(shared)
        (output.control / "work").mkdir(parents=True)
        (output.control / "trash").mkdir()
        give_away(output.control)
        output.control.chmod(0o777)
        for use in (output.create, output.prepare):
            with pytest.raises(StorageError, match="belongs to another user"):
                use()
        assert sorted(path.name for path in output.control.iterdir()) == ["trash", "work"]
        with pytest.raises(StorageError, match="belongs to another user"):  # it was made since
            output.claim(wait_s=0, waiting=print)

    def test_own_folders_in_a_shared_one(self, shared: Path) -> None:
        """As everyone has them in /tmp."""
        OutputFolder(shared / "mine").create()
        OutputFolder(shared / "mine").create()

    def test_the_state_folder(self, shared: Path) -> None:
        """The history in it names programs, which are started."""
        (shared / "state").mkdir()
        give_away(shared / "state")
        with pytest.raises(StorageError, match="another user may have created the state folder"):
            make_private(shared / "state" / "safepoint")

    def test_the_state_folder_without_a_umask(self, tmp_path: Path) -> None:
        """No other user can replace a folder above it."""
        before = os.umask(0)
        try:
            folder = make_private(tmp_path / "a" / "b" / "safepoint")
        finally:
            os.umask(before)
        assert [path.stat().st_mode & 0o777 for path in (folder, *folder.parents[:2])] == [0o700] * 3

    def test_a_user_without_a_home_folder(
        self, shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """`~` is no folder below the current one."""
        monkeypatch.chdir(shared)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        assert environment.home_folder() == str(tmp_path / f"safepoint-home-{os.geteuid()}")
        assert place_output("s3://bucket/x", local_dir=None, environ={}).folder.is_relative_to(tmp_path)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user")
    def test_a_secret_that_another_user_has_written(self, tmp_path: Path) -> None:
        """In a folder that others may write to; root could read it, and its writer would join the job as a node."""
        path = tmp_path / ".safepoint" / "job-secret"
        path.parent.mkdir()
        path.write_text("0" * 64)
        path.chmod(0o600)
        os.chown(path, 65533, 65533)
        with pytest.raises(StorageError, match="belongs to user 65533"):
            job_secret.agree_on_secret(RunSettings(output_dir=str(tmp_path)), environ={})

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
    def test_a_file_for_the_secret_that_has_no_end(self, kind: str, tmp_path: Path) -> None:
        """It is refused at once."""
        path = tmp_path / "secret"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(1 << 40)
        with pytest.raises(UsageError, match="no rank was started"):
            job_secret.agree_on_secret(RunSettings(), environ={"SAFEPOINT_JOB_SECRET_FILE": str(path)})

    def test_a_secret_that_others_can_read(self, tmp_path: Path) -> None:
        """It is none; another user may have written it."""
        (tmp_path / ".safepoint").mkdir()
        (tmp_path / ".safepoint" / "job-secret").write_text("0" * 64)
        with pytest.raises(StorageError, match="other users can read it"):
            job_secret.agree_on_secret(RunSettings(output_dir=str(tmp_path)), environ={})
        (tmp_path / ".safepoint" / "job-secret").chmod(0o600)
        assert job_secret.agree_on_secret(RunSettings(output_dir=str(tmp_path)), environ={}).value == b"0" * 64


class TestLocks:
    """A user who may read a file may lock it."""

    @pytest.fixture(autouse=True)
    def open_to_all(self, tmp_path: Path) -> None:
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(folder.stat().st_mode | 0o011)

    @pytest.mark.parametrize("is_older", [False, True])
    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o002, 0o660), (0o077, 0o600), (0, 0o666)])
    def test_who_may_not_write_cannot_lock(self, umask: int, mode: int, is_older: bool, tmp_path: Path) -> None:
        """Also a lock that an older release has made is closed to readers."""
        path, before = tmp_path / "lock", os.umask(umask)
        try:
            if is_older:
                path.touch()
            lock = FolderLock.acquire(path, {})
        finally:
            os.umask(before)
        assert lock is not None
        lock.release()
        assert path.stat().st_mode & 0o777 == mode

    def test_an_exclusive_lock_of_another_user_does_not_stop_readers(self, tmp_path: Path) -> None:
        """A manifest is readable, and so everyone can lock it."""
        path = tmp_path / "manifest"
        path.touch()
        path.chmod(0o644)
        begun_s = time.monotonic()
        with stranger(f"file = open({str(path)!r}); fcntl.flock(file, fcntl.LOCK_EX)"), reading(path):
            assert time.monotonic() - begun_s < 20

    def test_a_lease_of_another_user_does_not_keep_a_checkpoint(self, tmp_path: Path) -> None:
        """Otherwise everyone could fill the disk; leases of this user count."""
        path = tmp_path / "manifest"
        path.touch()
        path.chmod(0o644)
        with stranger(f"file = open({str(path)!r}); fcntl.flock(file, fcntl.LOCK_SH)"):
            assert lease_on(path) is Lease.NONE
            with reading(path):
                assert lease_on(path) is Lease.READER


def test_processes_of_another_user_are_not_a_jobs(tmp_path: Path) -> None:
    """Root can read everyone's variables: a job would wait for such a process for ever, and kill it."""
    with stranger("", **{JOB_VARIABLE: str(tmp_path)}):
        assert processes_of(tmp_path) == []
    own = subprocess.Popen(["/bin/sleep", "60"], env={JOB_VARIABLE: str(tmp_path)})
    try:
        while not Path(f"/proc/{own.pid}/environ").read_bytes():
            time.sleep(0.001)  # the kernel shows the variables a moment after the new program has begun
        assert processes_of(tmp_path) == [own.pid]
    finally:
        own.kill()
        own.wait()


def test_the_name_of_a_keeper_is_taken_when_others_can_see_it() -> None:
    """It is in the command line of its process, which takes a while to start."""
    key = new_keeper_key()
    process = KeeperProcess(KeeperPlan(key=key))
    connect(key).close()
    process.finish()


class TestPorts:
    """Another user listens where node 0 of a job on one machine should, or connects all the time."""

    def test_whose_a_socket_is(self) -> None:
        """Of either end; None before the connection is accepted."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            far = server.getsockname()
            with stranger("client = socket.create_connection(('127.0.0.1', int(sys.argv[1])))", str(far[1])):
                accepted, near = server.accept()
                assert socket_owner.owner_of(near, far) == _STRANGER
                assert socket_owner.owner_of(far, near) == os.getuid()
                accepted.close()
            with socket.create_connection(far) as client:
                assert socket_owner.owner_of(far, client.getsockname()) is None

    @pytest.mark.parametrize("accepts", ["server.accept()", ""])
    def test_a_stranger_in_the_place_of_node_0(self, accepts: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another node on this machine does not speak to it: it would learn the keys with which ranks are trusted."""
        monkeypatch.setattr("safepoint.training.rendezvous.admission._HANDSHAKE_S", 1.0)
        port = free_port()
        code = (
            "server = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
            f"threading.Thread(target=lambda: [{accepts}], daemon=True).start()"
        )
        node = StoreServer()
        node.start()
        with stranger(code, str(port)), pytest.raises(RefusedError, match="another user"):
            node.pass_on(SameUser(), "127.0.0.1", port)
        node.close()

    def test_node_0_of_the_same_user(self) -> None:
        """It is reached."""
        first, second = StoreServer(), StoreServer()
        first.start()
        second.start()
        second.pass_on(SameUser(), "127.0.0.1", first.port)
        with socket.create_connection(("127.0.0.1", second.port)) as client:
            client.sendall(bytes([0]) + (0x3C85F7CE).to_bytes(4, "little") + bytes([13]) + b"ping")
            assert client.recv(4) == b"ping"
        second.close()
        first.close()

    def test_the_port_of_a_job_on_this_machine_is_never_free(self, tmp_path: Path) -> None:
        """From the moment it is chosen, node 0 listens there."""
        launchers = Launchers(job_spec(num_nodes=2, python="/bin/sleep"), tmp_path, 1)
        launchers.reserve_port(lambda: True)
        held: list[str] = []
        popen = subprocess.Popen

        def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
            descriptors = options.get("pass_fds", ())
            assert isinstance(descriptors, tuple)
            held.extend(os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors)
            return popen(command, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", start)
            launchers.start(0, {}, ())
            launchers.start(1, {}, ())
        assert [text.partition(":")[0] for text in held] == ["socket"]
        while launchers.are_alive:
            pass

    def test_a_client_that_has_gone_costs_no_look_at_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stranger who connects and closes ten thousand times a second would make every rank wait."""
        if not socket_owner._answers():
            pytest.skip("this kernel cannot be asked whose a socket is")
        monkeypatch.setattr(socket_owner, "_find", lambda *_: pytest.fail("it reads the whole table"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert socket_owner.owner_of(("127.0.0.1", 1), server.getsockname()) is None

    def test_a_neighbour_with_many_connections_does_not_push_nodes_out(self) -> None:
        """The handshakes of the machine that has the most are closed first."""

        async def run(port: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            greeting = await reader.readexactly(23 + 32)
            flood = [
                await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(300)
            ]
            await asyncio.sleep(0.5)
            key = Key(_SECRET, node=1, may_use_token=False)
            assert await key._prove(greeting[23:], reader, writer)
            for _, other in (*flood, (reader, writer)):
                other.close()

        server, port = StoreServer(), free_port()
        server.start()
        server.serve_nodes(Gate(_SECRET, num_nodes=2, is_open=False), port)
        asyncio.run(run(port))
        server.close()
