"""Another user of the output folder gives second names (hard links) to files elsewhere, while a run opens its own.

Where `protected_hardlinks` is 1, that is possible for files that the other user may write to; where it is 0, for
every file of the same file system.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SafepointError
from safepoint.foundation.events.stream import append_lines
from safepoint.foundation.files import FolderLock
from tests.support.checkpoints import prepared

Patch = pytest.MonkeyPatch


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of the user, elsewhere."""
    path = tmp_path / "script.sh"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def put(outside: Path, path: Path) -> None:
    """Give the file the other name, in one step."""
    working = path.with_name("working")
    with contextlib.suppress(FileNotFoundError):
        working.unlink()
    os.link(outside, working)
    os.replace(working, path)


def is_untouched(outside: Path) -> bool:
    return outside.read_text() == "#!/bin/sh\n" and outside.stat().st_mode & 0o777 == 0o755


def acquire(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = FolderLock.acquire(path, {"pid": 1})
        if lock is not None:
            lock.release()


def test_a_lock(outside: Path, tmp_path: Path) -> None:
    """The mode of the other file stays, and the run gets a lock of its own."""
    output = prepared(tmp_path / "out")
    put(outside, output.control / "lock")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    output.release()
    assert is_untouched(outside)
    assert (output.control / "lock").stat().st_nlink == 1


def test_a_lock_that_is_refused(outside: Path, tmp_path: Path) -> None:
    """The stranger holds a lock on the other file."""
    output = prepared(tmp_path / "out")
    put(outside, output.control / "lock")
    with outside.open("r+b") as file:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX)
        child = os.fork()  # locks of this kind do not exclude the process that holds them
        if child == 0:
            with contextlib.suppress(SafepointError):
                OutputFolder(output.root).claim(wait_s=0, waiting=lambda who: None)
            os._exit(0)
        os.waitpid(child, 0)
    assert is_untouched(outside)


def hide_while(name: str, outside: Path, path: Path, patch: Patch) -> None:
    """The second name is away while the file is looked at by its descriptor, and back when its name is looked at."""
    real = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        is_file = isinstance(arguments[0], int) and os.path.samestat(real(arguments[0]), os.stat(outside))
        if is_file:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        try:
            return real(*arguments, **options)
        finally:
            if is_file:
                put(outside, path)

    patch.setattr(os, name, call)


def put_again_after(name: str, outside: Path, path: Path, patch: Patch) -> None:
    """The second name is back as soon as a file of the run's own has replaced it."""
    real = getattr(os, name)

    def call(source: Any, target: Any, **options: Any) -> None:
        real(source, target, **options)
        if os.path.basename(target) == path.name and os.path.basename(source) != "working":
            working = path.with_name("working")
            os.link(outside, working)
            os.replace(working, path) if name == "rename" else os.rename(working, path)

    patch.setattr(os, name, call)


@pytest.mark.parametrize("use", [lambda path: append_lines(path, b"lines\n"), acquire], ids=["append", "lock"])
@pytest.mark.parametrize(
    ("attack", "call"), [(hide_while, "fstat"), (put_again_after, "replace"), (put_again_after, "rename")]
)
def test_in_the_moment_between(
    use: Callable[[Path], None],
    attack: Callable[[str, Path, Path, Patch], None],
    call: str,
    outside: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    path = prepared(tmp_path / "out").control / "file"
    put(outside, path)
    with monkeypatch.context() as patch:
        attack(call, outside, path, patch)
        use(path)
    assert is_untouched(outside)
