"""The folder's lock against the user's own code, and against processes that look the same."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ConflictError
from safepoint.foundation import files
from safepoint.foundation.environment import host_name
from safepoint.foundation.files import FolderLock, is_locked
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.protocol.channel import new_keeper_key
from safepoint.snapshot.protocol.messages import KeeperPlan
from tests.support.checkpoints import prepared

SPAWN = multiprocessing.get_context("spawn")


def claims(root: Path) -> bool:
    try:
        return OutputFolder(root).claim(wait_s=0, waiting=lambda who: None)
    except ConflictError:
        return False


def another_process_claims(root: Path) -> bool:
    with SPAWN.Pool(1) as pool:
        return pool.apply(claims, [root])


def test_user_code_that_reads_the_folder_does_not_release_it(tmp_path: Path) -> None:
    """A script may list, copy or hash all files of its output folder while it trains."""
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    for path in output.root.rglob("*"):
        if path.is_file():
            path.read_bytes()
            with path.open("a"):
                pass
    assert not another_process_claims(output.root)
    assert is_locked(output.control / "lock")  # looking from within does not release it either
    assert not another_process_claims(output.root)
    output.release()
    assert another_process_claims(output.root)


def test_one_process_does_not_claim_a_folder_twice(tmp_path: Path) -> None:
    """Two trainings in threads of one process are two writers."""
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    assert not claims(output.root)
    output.release()


def test_a_forked_child_that_stays_does_not_hold_it(tmp_path: Path) -> None:
    """A data loader's worker outlives its parent: the next start must not wait for it."""
    path = tmp_path / "lock"
    lock = FolderLock.acquire(path, {})
    assert lock is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    os.close(reading)
    try:
        held = os.dup(lock._file.fileno())  # nothing but the lock itself is left of the parent's description
        os.close(held)
        assert is_locked(path)
        lock._file.close()  # what the system does when the parent is killed
        deadline = time.monotonic() + 10
        while is_locked(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_locked(path)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_releasing_releases_it_whatever_children_hold(tmp_path: Path) -> None:
    """Also a child that was forked without Python's knowledge, and has the descriptor."""
    lock = FolderLock.acquire(tmp_path / "lock", {})
    assert lock is not None
    copy = os.dup(lock._file.fileno())
    lock.release()
    assert not is_locked(tmp_path / "lock")
    os.close(copy)


def _hold_as(path: Path, owner: dict[str, Any], gate: Any) -> None:
    lock = FolderLock.acquire(path, owner)
    gate.wait(60)
    gate.wait(60)
    assert lock is not None


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperClient]:
    process = KeeperProcess(KeeperPlan(key=new_keeper_key()))
    client = KeeperClient.connect(process.key, wait_s=30, rank=0, num_ranks=1)
    assert client is not None
    yield client
    client.close()
    process.finish()


def test_a_keeper_with_the_same_pid_and_host_is_another_one(tmp_path: Path, keeper: KeeperClient) -> None:
    """PID namespaces and replaced pods repeat both: only the keeper's own identity counts."""
    output = prepared(tmp_path / "out")
    deadline = time.monotonic() + 10
    while not keeper.identity and time.monotonic() < deadline:
        time.sleep(0.01)
    gate = SPAWN.Barrier(2)
    twin = {"pid": keeper.pid, "host": host_name(), "since": "noon"}
    holder = SPAWN.Process(target=_hold_as, args=(output.keeper_lock, twin, gate))
    holder.start()
    try:
        gate.wait(60)
        with pytest.raises(ConflictError, match=f"pid {keeper.pid} "):
            output.claim(wait_s=0, waiting=lambda who: None, keeper=keeper.identity)
        with pytest.raises(ConflictError):
            output.claim(wait_s=0, waiting=lambda who: None)
    finally:
        gate.wait(60)
        holder.join(30)
    assert keeper.open_folder(str(output.root)) == ""
    assert json.loads(output.keeper_lock.read_bytes())["keeper"] == keeper.identity
    assert output.claim(wait_s=0, waiting=lambda who: None, keeper=keeper.identity)
    output.release()
    with pytest.raises(ConflictError):
        output.claim(wait_s=0, waiting=lambda who: None, keeper="another")


def test_a_kernel_without_open_file_description_locks_has_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes such as gVisor answer EINVAL."""
    real = files.fcntl.fcntl

    def old(descriptor: int, command: int, argument: bytes) -> Any:
        if command in {files.fcntl.F_OFD_SETLK, files.fcntl.F_OFD_GETLK}:
            raise OSError(22, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(files.fcntl, "fcntl", old)
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    assert not another_process_claims(output.root)
    output.release()
    assert another_process_claims(output.root)
