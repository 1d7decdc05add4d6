"""Tests of safepoint.foundation.shared_folders.leases: an error is not the answer that no process reads a file."""

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import processes
from safepoint.foundation.files import is_locked
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading
from safepoint.transparent.images.location import ImageLocation
from tests.support.checkpoints import commit, prepared

_READ = """
import sys
from pathlib import Path
from safepoint.foundation.shared_folders.leases import reading
with reading(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def no_descriptors() -> Generator[None]:
    """This process cannot open a file: EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def reader(path: Path) -> Generator[None]:
    """Another process that reads the checkpoint."""
    process = subprocess.Popen([sys.executable, "-c", _READ, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.communicate(timeout=30)


def test_a_checkpoint_is_not_deleted_while_this_process_cannot_open_files(tmp_path: Path) -> None:
    output = prepared(tmp_path / "out")
    manifest = commit(output, 3) / "safepoint-manifest.json"
    with reader(manifest):
        with no_descriptors():
            found, is_in_use = lease_on(manifest), output.is_in_use("checkpoint-3")
        assert (found, is_in_use) == (Lease.UNREADABLE, True)
    assert lease_on(manifest) is Lease.NONE
    assert output.delete("checkpoint-3")


def test_all_checkpoints_count_as_in_use_while_their_locks_cannot_be_read(tmp_path: Path) -> None:
    """More than the two checkpoints that count when the holder of a lock is unknown."""
    output = prepared(tmp_path / "out")
    for step in (1, 2, 3, 4):
        commit(output, step)
    with no_descriptors():
        found = [output.is_in_use(f"checkpoint-{step}") for step in (1, 2, 3, 4)]
    assert found == [True] * 4


def test_a_process_image_is_in_use_while_its_lock_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image/image.json").touch()
    folder = ImageLocation(tmp_path)
    with no_descriptors():
        is_in_use = folder.is_in_use("image")
    assert is_in_use
    assert not folder.is_in_use("image")


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES])
def test_an_error_is_not_an_answer(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file cannot be opened, or its locks cannot be read."""
    path = tmp_path / "manifest"
    path.touch()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert lease_on(path) is Lease.UNREADABLE
        assert is_locked(path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", fail)
        assert lease_on(path) is Lease.UNREADABLE
        assert is_locked(path)
    assert lease_on(path) is Lease.NONE
    assert not is_locked(path)


def test_a_file_that_cannot_be_opened_for_writing_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks on a file that is open for reading say less: an NFS client does not ask its server."""
    path = tmp_path / "manifest"
    path.touch()
    real = os.open

    def interrupted(name: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE == os.O_RDWR:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return real(name, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", interrupted)
    assert lease_on(path) is Lease.UNREADABLE


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EIO])
@pytest.mark.parametrize("name", ["fdinfo", "status", "locks"])
def test_the_holder_of_a_shared_lock_cannot_be_found(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock would otherwise count as a lock of another user, which keeps no checkpoint."""
    path = tmp_path / "manifest"
    path.touch()
    real = os.open

    def read_only(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *arguments, **options)

    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(os, "open", read_only)
        stack.enter_context(reading(path))
        real_read, real_iterdir = Path.read_bytes, Path.iterdir
        real_text = Path.read_text

        def check(read: Path) -> None:
            if read.is_relative_to("/proc") and name in read.parts:
                raise OSError(code, os.strerror(code), str(read))

        def failing(function: Any) -> Any:
            def call(read: Path, *arguments: Any, **options: Any) -> Any:
                check(read)
                return function(read, *arguments, **options)

            return call

        patch.setattr(Path, "read_bytes", failing(real_read))
        patch.setattr(Path, "iterdir", failing(real_iterdir))
        patch.setattr(Path, "read_text", failing(real_text))
        patch.setattr("safepoint.foundation.shared_folders.leases.is_seeing_all", lambda: True)
        assert lease_on(path) is Lease.UNREADABLE
        with pytest.raises(OSError, match=os.strerror(code)):
            processes.find_lock(path.stat())


@pytest.mark.parametrize("kind", ["missing", "below a file", "folder", "link", "pipe", "socket"])
def test_what_no_process_can_have_a_lease_on(kind: str, tmp_path: Path) -> None:
    """`reading` raises an error for each of these, so their folders can be deleted."""
    path = tmp_path / "manifest"
    match kind:
        case "below a file":
            path.touch()
            path /= "manifest"
        case "folder":
            path.mkdir()
        case "link":
            (tmp_path / "target").touch()
            path.symlink_to(tmp_path / "target")
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, 0o140644)
        case _:
            pass
    with pytest.raises(OSError, match="manifest"), reading(path):
        pass
    assert lease_on(path) is Lease.NONE
    assert not is_locked(path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can hold a lease there. If all files counted as in use, no checkpoint would ever be deleted."""
    path = tmp_path / "manifest"
    path.touch()

    def refuse(*arguments: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lease_on(path) is Lease.NONE
    assert not is_locked(path)
