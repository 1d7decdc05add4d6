"""Process images in folders of other users. Root freezes and restores, and another user could lead it to other files,
read the memory of processes, or let it restore another program.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.foundation.processes import name_of
from safepoint.transparent import freeze as freezing
from safepoint.transparent import staging
from safepoint.transparent import thaw as thawing
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.tree_dump import Restored
from safepoint.transparent.criu.trees import held, resident_bytes, send
from safepoint.transparent.images import location as locations
from safepoint.transparent.images.location import ImageLocation
from tests.support.criu_images import add_image, pagemap

_STRANGER = 65534
_CRIU = Criu(path="criu", version="4.2")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def freeze(program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], object]:
    """Freezes `program`, with a CRIU that writes one page and its log."""

    def dump(criu: Criu, pid: int, folder: Path, *, log: Path, **_: object) -> None:
        log.write_text("CRIU's log")
        (folder / "pages-1.img").write_bytes(bytes(range(16)) * 256)
        (folder / f"pagemap-{pid}.img").write_bytes(pagemap(1, [(1 << 20, 1)]))
        (folder / f"ids-{pid}.img").write_bytes(b"ids")

    monkeypatch.setattr(tree_dump, "dump", dump)
    monkeypatch.setattr(locations, "is_seeing_all", lambda: True)
    return lambda folder: (
        freezing.freeze_trees(_CRIU, [program.pid], ImageLocation(folder), is_running_after=True).manifest
    )


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders from which CRIU was to restore."""
    found: list[Path] = []

    @contextlib.contextmanager
    def restore(criu: Criu, stage: Path, *_: object) -> Iterator[list[Restored]]:
        found.append(stage)
        yield []

    monkeypatch.setattr(thawing, "_restored", restore)
    monkeypatch.setattr(locations, "is_seeing_all", lambda: True)
    monkeypatch.setattr(thawing.platform, "machine", lambda: "x86_64")
    return found


def change_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def give_away(path: Path, _: int) -> None:
    os.chown(path, _STRANGER, -1, follow_symlinks=False)


CHANGES = {
    "of everyone": (change_mode, 0o777),
    "of a group": (change_mode, 0o775),
    "sticky": (change_mode, 0o1777),
    "of a stranger": (give_away, 0),
}


@needs_root
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [".", "images", "images/.safepoint", "images/.safepoint/images"])
def test_a_folder_for_an_image(place: str, change: str, tmp_path: Path, freeze: Callable[[Path], object]) -> None:
    """Nothing is frozen; a link at the place of CRIU's log would lead root's write to another file."""
    (tmp_path / "above" / "images" / ".safepoint" / "images").mkdir(parents=True)
    apply, mode = CHANGES[change]
    apply(tmp_path / "above" / place, mode)
    log = tmp_path / "above" / "images" / ".safepoint" / "images" / freezing.LOG_NAME.format(0)
    if place in {".", "images/.safepoint"} and change == "sticky":  # as /tmp: only root can rename a folder in it
        freeze(tmp_path / "above" / "images")
        return
    with pytest.raises(UsageError, match="belongs to another user, or others may write to it"):
        freeze(tmp_path / "above" / "images")
    assert not log.exists()


@pytest.mark.parametrize(("mode", "is_in_memory"), [(0o1777, True), (0o777, False)])
def test_memory_in_which_others_can_rename_folders(
    mode: int, is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw pages are written to the private folder of the image instead."""
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "memory").chmod(mode)
    monkeypatch.setattr(staging, "_MEMORY", tmp_path / "memory")
    with staging.staging(1, tmp_path / "disk") as stage:
        assert stage.is_in_memory is is_in_memory
        assert stage.folder.parent == tmp_path / ("memory" if is_in_memory else "disk")


@needs_root
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "place", ["image-2", "image-2/image.json", "image-2/part-0", "image-2/part-0/core-7.img", "image-1/part-0"]
)
def test_an_image_to_restore(place: str, change: str, tmp_path: Path, restored: list[Path]) -> None:
    """Also an image to whose pages the image refers."""
    location = ImageLocation(tmp_path / "images")
    page = bytes(range(16)) * 256
    for number in (1, 2):
        add_image(location, tmp_path / f"dump-{number}", {7: page + bytes([number]) * 4096})
    thawing.thaw_image(_CRIU, location, "image-2")
    assert len(restored) == 1
    apply, mode = CHANGES[change]
    apply(location.folder / place, mode)
    with pytest.raises(UsageError, match="nothing was done"):
        thawing.thaw_image(_CRIU, location, "image-2")
    assert len(restored) == 1
    assert location.parent() == []


@pytest.mark.parametrize("name", [b"a\x1b[31mb", b"\xff\xfe", b"x\nVmRSS: 0 kB", b"\x0bVmRSS: 0"])
def test_the_name_of_a_program(name: bytes, tmp_path: Path, freeze: Callable[[Path], object]) -> None:
    """It does not end the command after the processes were stopped, and hides no memory."""
    code = (
        f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert name_of(process.pid).isprintable()
            assert resident_bytes([process.pid]) > 1 << 20
        finally:
            process.kill()


def test_the_name_of_a_program_in_a_manifest(
    tmp_path: Path,
    freeze: Callable[[Path], object],
    program: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name that the kernel gives is a name that a manifest may have."""
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    (folder / "comm").write_bytes(b"\x1b]0;title\x07\xff\n")
    monkeypatch.setattr(freezing, "name_of", lambda pid: name_of(7, tmp_path / "proc"))
    freeze(tmp_path / "images")


def test_a_process_that_was_ended_while_it_was_stopped(program: subprocess.Popen[bytes]) -> None:
    """The signal goes to the process, and not to another one that gets its number."""
    with held([program.pid]) as processes:
        program.kill()
        program.wait()
        send(signal.SIGKILL, processes)  # by its number, this would reach any process that has the number now
    with held([program.pid]) as processes:
        assert processes == []
