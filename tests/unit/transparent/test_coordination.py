"""Several trees, frozen and restored at one moment; faults at each step, with a stand-in for CRIU."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import FreezeError, SafepointError, UsageError
from safepoint.foundation.processes import tree_of
from safepoint.transparent import freeze as freeze_module
from safepoint.transparent.criu import stopping as stopping_module
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.stopping import refuse_stopped, stopped_trees
from safepoint.transparent.criu.trees import send
from safepoint.transparent.freeze import freeze_trees
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import verify
from safepoint.transparent.thaw import thaw_image
from tests.support.criu_images import dump
from tests.support.patience import PATIENCE

_CRIU = Path(__file__).parents[2] / "support" / "stand_in_criu.sh"
_TREE = "sleep 1000 & sleep 1000 & wait"


def state(pid: int) -> str:
    """The state of a process, as /proc has it; X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


class Trees:
    """Two trees of three sleeping processes, and a folder in which a stand-in for CRIU freezes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = ImageLocation(folder / "images")
        self._children = [subprocess.Popen(["/bin/sh", "-c", _TREE], start_new_session=True) for _ in range(2)]
        self.roots = [child.pid for child in self._children]
        for root in self.roots:
            wait_for(lambda root=root: len(tree_of(root)) == 3, "a tree")
        self.processes = [pid for root in self.roots for pid in tree_of(root)]
        self.criu = Criu(path=str(_CRIU), version="4.2.1")
        (folder / "dumps").mkdir()
        for root in self.roots:
            dump(folder / "dumps" / str(root), {root: b"page" * 1024})
        os.environ["STAND_IN_PROCESSES"] = " ".join(map(str, self.processes))
        os.environ["STAND_IN_DUMPS"] = str(folder / "dumps")

    def freeze(self, **options: Any) -> None:
        freeze_trees(self.criu, self.roots, self.location, **{"is_running_after": False, **options})

    def start(self, call: str) -> "subprocess.Popen[bytes]":
        """Another process that freezes or restores. `trees`, `note` and the functions are known to `call`."""
        code = f"""
from pathlib import Path
import signal
import time
from safepoint.transparent import staging
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.freeze import freeze_trees
from safepoint.transparent.thaw import thaw_image
from safepoint.transparent.images.location import ImageLocation
staging._MEMORY = Path("absent")
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background, where it is ignored
def note(_):
    Path("noted").touch()
    time.sleep(1000)
criu, roots = Criu(path={self.criu.path!r}, version="4.2.1"), {self.roots!r}
location = ImageLocation(Path({str(self.location.folder)!r}))
{call}
"""
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    def are_running(self, pids: list[int] | None = None) -> bool:
        return {state(pid) for pid in pids or self.processes} <= {"S", "R", "D"}

    def are_ended(self) -> bool:
        return {state(pid) for pid in self.processes} <= {"X", "Z"}

    def has_reached(self, mark: str) -> None:
        wait_for((self.folder / mark).exists, mark)

    def restored(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("restored-?"))]

    def is_clean(self) -> bool:
        """Whether there are no raw pages and no guards."""
        guards = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_guard(path, self.folder)]
        return not guards and not list(self.folder.glob("images/.safepoint/images/work-*"))

    def reap(self) -> None:
        for child in self._children:
            child.wait(30 * PATIENCE)

    def end(self) -> None:
        for pid in [*self.processes, *self.restored()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.reap()


def _is_guard(path: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"safepoint-guard" in path.read_bytes() and str(folder).encode() in path.read_bytes()
    return False


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trees]:
    monkeypatch.chdir(tmp_path)
    for name in ("STAND_IN_PROCESSES", "STAND_IN_DUMPS", "STAND_IN_FAULT"):
        monkeypatch.setenv(name, "")  # restored at the end
    # Raw pages go to the disk, so that the test sees only its own.
    monkeypatch.setattr("safepoint.transparent.staging._MEMORY", tmp_path / "absent")
    found = Trees(tmp_path)
    yield found
    found.end()


@pytest.fixture
def frozen(trees: Trees) -> Trees:
    trees.freeze()
    trees.reap()
    return trees


def test_all_trees_are_stopped_before_one_is_dumped(trees: Trees) -> None:
    """Then the image is committed, and all are ended; one part for each, in their order."""
    trees.freeze()
    assert trees.are_ended()
    for part in range(2):
        assert (trees.folder / f"dumped-{part}").read_text() == "\n"
    manifest = verify(trees.location, "image-1", deep=True)
    assert [part.root_pid for part in manifest.parts] == trees.roots
    assert trees.is_clean()


def test_trees_that_run_on_do_so_before_their_pages_are_stored(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    store = freeze_module.store_dumps
    seen: list[bool] = []

    def look(*arguments: Any, **options: Any) -> Any:
        seen.append(trees.are_running())
        return store(*arguments, **options)

    monkeypatch.setattr(freeze_module, "store_dumps", look)
    trees.freeze(is_running_after=True)
    assert seen == [True]
    assert trees.are_running()
    assert trees.location.names() == ["image-1"]


@pytest.mark.parametrize("is_running_after", [False, True])
@pytest.mark.parametrize("what", ["fail", "die"])
@pytest.mark.parametrize("part", [0, 1])
def test_if_one_dump_fails_all_trees_run_on(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, part: int, what: str, is_running_after: bool
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", f"dump {part} {what}")
    with pytest.raises(FreezeError, match="run on") as caught:
        trees.freeze(is_running_after=is_running_after)
    assert ("signal 9" if what == "die" else "Something went wrong") in str(caught.value)
    wait_for(trees.are_running, "all run")
    assert trees.location.names() == []
    assert trees.is_clean()


@pytest.mark.parametrize("step", ["store_dumps", "carry", "before_end", "commit"])
def test_if_a_later_step_fails_all_trees_run_on(trees: Trees, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "no space")

    options: dict[str, Any] = {}
    if step == "before_end":
        options["before_end"] = fail
    elif step == "commit":
        monkeypatch.setattr("safepoint.transparent.images.location.NewImage.commit", fail)
    else:
        monkeypatch.setattr(freeze_module, step, fail)
    with pytest.raises(OSError, match="no space"):
        trees.freeze(**options)
    wait_for(trees.are_running, "all run")
    assert trees.location.names() == (["image-1"] if step == "before_end" else [])
    assert trees.is_clean()


def test_if_a_process_is_killed_the_others_run_on(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those below it, which are not found through it any more."""
    monkeypatch.setenv("STAND_IN_FAULT", "dump 1 kill-root")
    with pytest.raises(FreezeError):
        trees.freeze()
    wait_for(lambda: trees.are_running([pid for pid in trees.processes if pid != trees.roots[1]]), "the others run")
    assert trees.location.names() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_if_safepoint_is_killed_while_criu_runs_all_trees_run_on(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """But not before CRIU has ended."""
    monkeypatch.setenv("STAND_IN_FAULT", "dump 1 wait")
    process = trees.start("freeze_trees(criu, roots, location, is_running_after=False)")
    trees.has_reached("dumped-1")
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
        assert "T" in {state(pid) for pid in trees.processes}
    (trees.folder / "release").touch()
    process.wait()
    wait_for(trees.are_running, "all run")
    assert trees.location.names() == []


def test_an_interrupted_command_does_not_wait_for_a_criu_that_hangs(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives CRIU some seconds, and ends it. Nothing releases this one."""
    monkeypatch.setenv("STAND_IN_FAULT", "dump 1 wait")
    call = "from safepoint.transparent import freeze\nfreeze._INTERRUPTED_S = 0.1\n"
    process = trees.start(f"{call}freeze_trees(criu, roots, location, is_running_after=False)")
    trees.has_reached("dumped-1")
    process.send_signal(signal.SIGINT)
    assert process.wait(60 * PATIENCE) != 0
    wait_for(trees.are_running, "all run")
    assert trees.location.names() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_if_safepoint_is_killed_after_the_commit_all_trees_run_on(trees: Trees, number: signal.Signals) -> None:
    """The image is whole. It is not known yet whether the caller has recorded the end of the processes."""
    process = trees.start("freeze_trees(criu, roots, location, is_running_after=False, before_end=note)")
    trees.has_reached("noted")
    process.send_signal(number)
    process.wait()
    wait_for(trees.are_running, "all run")
    verify(trees.location, "image-1", deep=True)


def test_what_cannot_be_frozen_together_is_refused_first(trees: Trees) -> None:
    """A tree within a tree, this process, and a process that is stopped already."""
    child = trees.processes[1]
    with pytest.raises(UsageError, match="is below"):
        freeze_trees(trees.criu, [trees.roots[0], child], trees.location, is_running_after=True)
    with pytest.raises(UsageError, match="cannot freeze itself"):
        freeze_trees(trees.criu, [os.getpid()], trees.location, is_running_after=True)
    with pytest.raises(UsageError, match="first process"):
        freeze_trees(trees.criu, [1], trees.location, is_running_after=True)
    os.kill(child, signal.SIGSTOP)
    wait_for(lambda: state(child) == "T", "stopped")
    with pytest.raises(FreezeError, match=f"process {child} .* is stopped"):
        trees.freeze()
    assert not (trees.folder / "dumped-0").exists()
    os.kill(child, signal.SIGCONT)
    refuse_stopped(trees.processes)


def test_all_trees_are_restored_before_one_runs(frozen: Trees) -> None:
    """The caller learns of them before they run."""
    seen: list[set[str]] = []
    found = thaw_image(
        frozen.criu,
        frozen.location,
        "image-1",
        before_start=lambda trees: seen.append({state(tree.pid) for tree in trees}),
    )
    assert [tree.pid for tree in found] == frozen.restored()
    assert seen == [{"T"}]
    wait_for(lambda: frozen.are_running(frozen.restored()), "all run")
    assert frozen.is_clean()


@pytest.mark.parametrize("what", ["fail", "die"])
@pytest.mark.parametrize("part", [0, 1])
def test_if_one_tree_cannot_be_restored_none_runs(
    frozen: Trees, monkeypatch: pytest.MonkeyPatch, part: int, what: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", f"restore {part} {what}")
    with pytest.raises(FreezeError, match="nothing was restored"):
        thaw_image(frozen.criu, frozen.location, "image-1")
    other = int((frozen.folder / f"restored-{1 - part}").read_text())
    wait_for(lambda: state(other) in {"X", "Z"}, "the other tree is ended")
    assert frozen.is_clean()


def test_if_the_caller_refuses_the_restored_trees_they_are_ended(frozen: Trees) -> None:
    def refuse(_: Any) -> None:
        raise SafepointError("no")

    with pytest.raises(SafepointError, match="no"):
        thaw_image(frozen.criu, frozen.location, "image-1", before_start=refuse)
    wait_for(lambda: {state(pid) for pid in frozen.restored()} <= {"X", "Z"}, "ended")
    assert frozen.is_clean()


@pytest.mark.parametrize("moment", ["restore", "before_start"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_if_safepoint_is_killed_in_a_restore_none_runs(
    frozen: Trees, monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals
) -> None:
    """Nor are raw pages left."""
    call = "thaw_image(criu, location, 'image-1')"
    if moment == "restore":
        monkeypatch.setenv("STAND_IN_FAULT", "restore 1 wait")
    else:
        call = "thaw_image(criu, location, 'image-1', before_start=note)"
    process = frozen.start(call)
    frozen.has_reached("restored-1" if moment == "restore" else "noted")
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
    (frozen.folder / "release").touch()
    process.wait()
    wait_for(lambda: {state(pid) for pid in frozen.restored()} <= {"X", "Z"}, "ended")
    wait_for(lambda: not list(frozen.folder.glob("images/.safepoint/images/safepoint-image-*")), "no raw pages")


def test_temporary_folders_are_carried_along(trees: Trees) -> None:
    """They are restored where they were, if they were deleted meanwhile."""
    folder = trees.folder / "temporary"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("content")
    folder.chmod(0o750)
    trees.freeze(carried={trees.roots[1]: [folder]})
    trees.reap()
    (folder / "below" / "file").unlink()
    (folder / "below").rmdir()
    folder.rmdir()
    thaw_image(trees.criu, trees.location, "image-1")
    assert (folder / "below" / "file").read_text() == "content"
    assert folder.stat().st_mode & 0o777 == 0o750


def test_processes_that_do_not_stop_run_on(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message that names one; those that have stopped run on, too."""
    last, is_at_rest = trees.processes[-1], stopping_module._is_at_rest
    monkeypatch.setattr(stopping_module, "_is_at_rest", lambda pid: pid != last and is_at_rest(pid))
    stopping: list[int] = []
    with (
        pytest.raises(FreezeError, match=rf"process {last} .*did not stop"),
        stopped_trees(trees.roots, stopping=stopping.append, within_s=1.0),
    ):
        pass
    wait_for(trees.are_running, "all run")
    assert set(stopping) == set(trees.processes)


def test_a_tree_that_starts_processes_all_the_time_is_stopped(trees: Trees) -> None:
    """A process that starts a program stops only when the new process has executed it: parents are stopped first."""
    code = "while :; do /bin/true; done"
    with subprocess.Popen(["/bin/sh", "-c", code], start_new_session=True) as process:
        try:
            for _ in range(20):
                with stopped_trees([process.pid], stopping=lambda _: None) as stopped:
                    assert {state(pid) for pid in stopped} <= {"T", "Z", "X"}
                    send(signal.SIGCONT, stopped.values())
        finally:
            process.kill()
