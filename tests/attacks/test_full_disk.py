"""A disk without room: what frees space must not need any."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import files
from safepoint.foundation.files import FolderLock
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint

CODE = """
import errno, os, sys
from pathlib import Path
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
output = prepared(Path(sys.argv[1]) / "out")
commit(output, 3)
commit(output, 4)
(output.control / "lock").touch()
(output.work / "dead").mkdir()
(output.work / "dead/part").write_bytes(bytes(1 << 16))
(output.root / "checkpoint-3/model.safetensors").write_bytes(b"damaged")
number = 0
def fill():
    with (output.root / "filling").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    try:
        for number in range(1 << 20):
            os.mkfifo(output.root / f"pipe-{os.getpid()}-{number}")
    except OSError as error:
        assert error.errno == errno.ENOSPC
fill()
COMMAND
"""


def on_a_small_disk(tmp_path: Path, command: str) -> "subprocess.CompletedProcess[str]":
    """Run it on a file system of 512 KiB of which all bytes and all names are in use."""
    unshare = shutil.which("unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=512k,nr_inodes=200 none {disk}"
    inside = [unshare or "unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if os.getuid() == 0:
        inside = [unshare or "unshare", "--mount", "sh", "-c"]
    if unshare is None or subprocess.run([*inside, mount], check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no file system for us")
    script = tmp_path / "fill.py"
    script.write_text(CODE.replace("COMMAND", command))
    return subprocess.run(
        [*inside, f'{mount} && exec "$@"', "sh", sys.executable, str(script), str(disk)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_repair_frees_space_on_a_full_disk(tmp_path: Path) -> None:
    """What a dead run has left is deleted, without room for a lock's text or a probe."""
    done = on_a_small_disk(
        tmp_path,
        """
done = safepoint("checkpoints", "repair", output.root)
print(done.code, done.stdout, done.stderr)
assert "Traceback" not in done.stderr
assert list(output.work.iterdir()) == []
(output.root / "room").write_bytes(bytes(1 << 14))
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", ['"prune", output.root, "--keep", "newest=1"', '"repair", output.root, "--drop-damaged"']
)
def test_the_other_ways_to_free_space_end_without_a_traceback(command: str, tmp_path: Path) -> None:
    """They delete, or say that the disk is full."""
    done = on_a_small_disk(
        tmp_path,
        f"""
done = safepoint("checkpoints", {command})
assert "Traceback" not in done.stderr, done.stderr
assert done.code in (0, 13, 14), (done.code, done.stderr)
assert (output.root / "checkpoint-4").is_dir()
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_lock_counts_without_its_text(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is for the message of a process that is refused, and no more."""

    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(os, "ftruncate", refuse)
    lock = FolderLock.acquire(tmp_path / "lock", {"pid": 1})
    assert lock is not None
    assert files.is_locked(tmp_path / "lock")
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("command", ["repair", "prune", "copy", "export"])
def test_every_command_says_what_the_disk_said(
    command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the reason, and exit code 13 or less; no traceback, whichever call fails."""
    output = prepared(tmp_path / "out")
    for step in (2, 3, 4):
        commit(output, step)
    (output.root / "checkpoint-3/model.safetensors").write_bytes(b"damaged")

    def refuse(path: object, *arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    for name in ("mkdir", "rename"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    arguments = {
        "repair": [output.root, "--drop-damaged"],
        "prune": [output.root, "--keep", "newest=1"],
        "copy": [output.root / "checkpoint-4", tmp_path / "copy"],
        "export": [output.root / "checkpoint-4", tmp_path / "model"],
    }[command]
    done = safepoint("checkpoints", command, *arguments)
    assert "Traceback" not in done.stderr
    assert done.code == 13, (done.stdout, done.stderr)
    assert os.strerror(code) in done.stderr


def test_a_lock_that_cannot_be_created_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for one more name: a StorageError with the reason."""
    output = prepared(tmp_path / "out")
    real = os.open

    def refuse(path: object, flags: int, *arguments: int, **options: int) -> int:
        if str(path).endswith("lock"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(str(path), flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    done = safepoint("checkpoints", "repair", output.root)
    assert done.code == 13, done.stderr
    assert "No space left" in done.stderr
    assert OutputFolder(output.root).steps() == []
