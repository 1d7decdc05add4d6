"""Finding CRIU, reading its log, and looking at processes: without CRIU, and without root."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from safepoint.errors import FreezeError, UnsupportedError
from safepoint.foundation.processes import name_of, tree_of
from safepoint.transparent.criu.gate import folder_for_scripts
from safepoint.transparent.criu.messages import explain
from safepoint.transparent.criu.obstacles import refuse_obstacles
from safepoint.transparent.criu.program import find_criu
from safepoint.transparent.criu.trees import held, kill, resident_bytes


@pytest.fixture(autouse=True)
def _no_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a CRIU that the test writes is found."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)


def program(folder: Path, body: str) -> Path:
    path = folder / "bin" / "criu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_new_criu_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PATH, or where the variable names it."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    path = program(tmp_path, "echo Version: 4.2.1; echo GitID: v4.2.1")
    assert find_criu().version == "4.2.1"
    other = path.rename(tmp_path / "other")
    monkeypatch.setenv("SAFEPOINT_CRIU", str(other))
    assert find_criu().path == str(other)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo Version: 4.1.1", "is CRIU 4.1.1, which fails"),
        ("echo Version: 3.17", "is CRIU 3.17, which fails"),
        ("echo hello", "does not say"),
        ("exit 1", "does not say"),
    ],
)
def test_another_criu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    """With exit code 16, before anything is frozen, and with what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program(tmp_path, body)
    with pytest.raises(UnsupportedError, match=words) as caught:
        find_criu()
    assert "4.2" in str(caught.value.hint)


def test_without_criu_or_root_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="not installed"):
        find_criu()
    with pytest.raises(UnsupportedError, match="does not work"):
        find_criu(str(tmp_path / "absent"))
    program(tmp_path, "echo Version: 4.2.1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="needs root"):
        find_criu()


_HARMLESS = "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pie: 29700: Error (criu/pie/parasite.c:588): send_fds failed (-22)", "io_uring"),
        ("(00.1) Error (criu/files-reg.c:2331): File tmp/out has bad size 7182 (expect 1024)", "was changed"),
        ("(00.1) Error (criu/tty.c:1): tty: Found dangling tty with sid 1 pgid 2", "terminal"),
        ("(00.1) Error (criu/sk-unix.c:899): unix: Can't dump half of stream unix connection.", "Unix socket"),
        ("(00.1) Error (criu/cr-restore.c:1465): 4711: Can't fork for 4711: File exists", "in use"),
        ("(00.1) Error (criu/image.c:1): Can't write: No space left on device", "full"),
        (
            "(00.1) Error (criu/files-reg.c:1052): Can't dump ghost file /usr/lib/libcrypto.so.3 of 4734976 size, "
            "increase limit",
            "an update has replaced",
        ),
        ("Error (compel/src/lib/ptrace.c:27): suspending seccomp failed: Operation not permitted", "seccomp filter"),
        ("(00.1) Error (criu/x.c:1): Something new", "Something new"),
    ],
)
def test_a_log_becomes_a_reason(line: str, words: str) -> None:
    """The cause, not the last consequence, and not what CRIU writes in each run."""
    reason, hint = explain(f"{_HARMLESS}(00.0) Some progress\n{line}\nError (criu/cr-dump.c:1975): Dumping FAILED.\n")
    assert words in reason
    assert hint


def test_a_log_without_errors_gives_its_last_line() -> None:
    assert explain("hello\nworld")[0] == "world"
    assert explain("")[0] == "it printed no reason"
    assert explain(f"hello\n{_HARMLESS}")[0] == "hello"


def test_a_criu_without_any_rights_is_named() -> None:
    """It writes no log then, and only prints this."""
    reason, hint = explain(
        "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability: \n"
        "setcap cap_checkpoint_restore+eip /usr/sbin/criu\n"
    )
    assert "lacks a right" in reason
    assert "--privileged" in hint


def test_a_tree_is_found_with_its_memory() -> None:
    """The root first. A process that does not exist has no tree."""
    code = "import subprocess, sys; print(flush=True); subprocess.run(['/bin/sleep', '1000'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while len(tree := tree_of(process.pid)) < 2 or name_of(tree[1]) != "sleep":
            pass
        try:
            assert tree[0] == process.pid
            assert resident_bytes(tree) > 1 << 20
            refuse_obstacles(tree)
        finally:
            for pid in reversed(tree):
                os.kill(pid, 9)
    assert tree_of(process.pid) == []
    assert name_of(process.pid) == "?"


def test_obstacles_are_found_before_anything_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("anon_inode:[io_uring]")
    (tmp_path / "7" / "comm").write_text("python\n")
    with pytest.raises(FreezeError, match=r"process 7 \(python\)") as caught:
        refuse_obstacles([7], tmp_path)
    assert "USE_LIBUV=0" in str(caught.value.hint)


_BIG = "kept = b'x' * (200 << 20); print(flush=True); import sys; sys.stdin.read()"


def test_killed_processes_have_ended() -> None:
    """The kernel takes a while to free their memory. Until then, their numbers and ports are in use."""
    command = [sys.executable, "-c", _BIG]
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            assert process.stdout is not None
            process.stdout.readline()
            with held([process.pid]) as processes:
                kill(processes)
                assert process.poll() == -signal.SIGKILL


def test_scripts_lie_where_programs_can_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman mounts /dev/shm of a container with `noexec`. If all folders are like that, nothing is restored."""
    folders = [tmp_path / "memory", tmp_path / "disk"]
    without = {folders[0]}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC if path in without else 0))
    assert folder_for_scripts(folders) == folders[1]
    without.add(folders[1])
    with pytest.raises(UnsupportedError, match=r"noexec: .*memory, .*disk"):
        folder_for_scripts(folders)
