"""Saves of a plain loop with a real keeper: what is saved is loaded, whatever stops, dies or has no space."""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ConflictError, SaveError
from safepoint.snapshot.checkpointer import Checkpointer
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.protocol.channel import names_of
from tests.support.keepers import commands_with
from tests.support.memory import shared_files
from tests.support.snapshots import LARGE_STATE_ELEMENTS, same

TIMEOUT_S = 50


class Training:
    """A model, an optimizer and something to note."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.notes: dict[str, Any] = {"step": 0, "seen": [1, 2]}

    def step(self) -> int:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 256)).square().mean().backward()
        self.optimizer.step()
        self.notes["step"] += 1
        return self.notes["step"]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "notes": self.notes}

    def values(self) -> Any:
        """All that is to come back, copied."""
        copy = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in self.state.items()}
        return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, copy)


def is_loaded(folder: Path, expected: Any) -> bool:
    found = newest_valid(folder, rejected=lambda *_: None)
    assert found is not None
    return all(
        same(dict(torch.load(found[0] / f"{key}.pt", weights_only=True)), dict(value))
        for key, value in expected.items()
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = OutputFolder(folder).events.read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rsplit("-", 1)[1]) for path, _ in OutputFolder(folder).manifests())


def keeper_pid(checkpointer: Checkpointer) -> int:
    """The pid of the keeper, which has started."""
    checkpointer._ensure_keeper()
    return checkpointer._host.pid


def keeper_of(checkpointer: Checkpointer) -> KeeperClient:
    return checkpointer._snapshotter.keeper


def wait_for_death(pid: int, descriptor: int) -> None:
    """Until the process with this pidfd has ended."""
    ended, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
    assert ended, f"process {pid} goes on"
    os.close(descriptor)


def kill_keeper(checkpointer: Checkpointer) -> int:
    """SIGKILL; returns when this process has noticed."""
    pid, keeper = keeper_pid(checkpointer), keeper_of(checkpointer)
    os.kill(pid, signal.SIGKILL)
    with keeper._changed:
        assert keeper._changed.wait_for(lambda: not keeper.is_alive, TIMEOUT_S)
    checkpointer._host._process.wait(TIMEOUT_S)
    return pid


@pytest.fixture
def training() -> Training:
    torch.manual_seed(5)
    return Training()


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(tmp_path / "out")
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def test_save_and_load(checkpointer: Checkpointer, training: Training, tmp_path: Path) -> None:
    """Step by step, also while the state goes on changing; loaded into another model."""
    checkpointer.prepare(training.state, is_waiting=True)
    for step in (1, 2, 3):
        training.step()
        expected = training.values()
        saving = checkpointer.save(training.state, step)
        training.step()
        training.notes["seen"].append(step)
        assert saving.wait(TIMEOUT_S) == tmp_path / "out" / f"checkpoint-{step}"
        assert saving.is_durable
        assert verify(saving.path).is_valid
        assert is_loaded(tmp_path / "out", expected)
    assert [event["step"] for event in events(tmp_path / "out", "saved")] == [1, 2, 3]
    other = Training()
    assert checkpointer.load(other.state) == 3
    assert other.notes["step"] == expected["notes"]["step"]
    assert same(other.values(), expected)


def test_nothing_of_a_save_stays(checkpointer: Checkpointer, training: Training, tmp_path: Path) -> None:
    """A tensor that was made for a save is freed after it, and the next one goes well without it."""
    training.step()
    made = torch.arange(1 << 20)
    storage = StorageWeakRef(made.untyped_storage())
    checkpointer.save({**training.state, "made": {"here": made}}, 1).wait(TIMEOUT_S)
    assert torch.equal(torch.load(tmp_path / "out" / "checkpoint-1" / "made.pt")["here"], made)
    del made
    deadline_s = time.monotonic() + TIMEOUT_S
    while not storage.expired():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    training.step()
    checkpointer.save(training.state, 2).wait(TIMEOUT_S)
    assert is_loaded(tmp_path / "out", training.values())


def test_nothing_to_load(checkpointer: Checkpointer, training: Training) -> None:
    """And names that cannot be files' are refused."""
    assert checkpointer.load(training.state) is None
    for name in ("", "a/b", "../x", "ü", "-x"):
        with pytest.raises(ValueError, match="is not a valid file name"):
            checkpointer.save({name: training.model}, 1)


def test_the_same_step_twice(checkpointer: Checkpointer, training: Training, tmp_path: Path) -> None:
    """The second content is what remains, also when the first is still being written."""
    for _ in range(5):
        training.step()
        checkpointer.save(training.state, 7)
    expected = training.values()
    checkpointer.save(training.state, 7).wait(TIMEOUT_S)
    assert is_loaded(tmp_path / "out", expected)


def test_saves_faster_than_the_disk(checkpointer: Checkpointer, training: Training, tmp_path: Path) -> None:
    """The newest arrives; whatever was passed over is said, to who waits and in the events."""
    os.kill(keeper_pid(checkpointer), signal.SIGSTOP)
    savings = []
    for _ in range(3):
        step = training.step()
        savings.append(checkpointer.save(training.state, step))
        savings[-1].wait_staged()
    expected = training.values()
    with pytest.raises(SaveError, match="the save takes longer than the wait"):
        savings[0].wait(0)
    os.kill(keeper_pid(checkpointer), signal.SIGCONT)
    savings[-1].wait(TIMEOUT_S)
    assert is_loaded(tmp_path / "out", expected)
    lost = []
    for saving in savings[:-1]:
        try:
            saving.wait(TIMEOUT_S)
        except SaveError as error:
            lost.append(saving.step)
            assert "superseded by step" in str(error)  # noqa: PT017
    # Which of the two depends on whether the keeper began to write before the next one reached it.
    superseded = events(tmp_path / "out", "save_superseded")
    assert sorted(event["step"] for event in superseded) == lost
    assert steps(tmp_path / "out") == sorted({1, 2, 3} - set(lost))


def test_many_saves_in_a_row(tmp_path: Path) -> None:
    """Whatever was committed is whole: no file holds parts of two steps."""
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step in range(1, 16):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            checkpointer.save({"model": model, "optimizer": optimizer, "notes": {"step": step}}, step)
    assert 15 in steps(tmp_path / "out")
    for path, _ in OutputFolder(tmp_path / "out").manifests():
        assert verify(path).is_valid
        step = torch.load(path / "notes.pt")["step"]
        assert path.name == f"checkpoint-{step}"
        assert all(bool((tensor == step).all()) for tensor in torch.load(path / "model.pt").values())


def test_retention(tmp_path: Path, training: Training) -> None:
    """Policies prune after each commit, also by a keeper that replaces a killed one."""
    with Checkpointer(tmp_path / "out", keep="newest=2,every=3") as checkpointer:
        for _ in range(5):
            checkpointer.save(training.state, training.step()).wait(TIMEOUT_S)
        assert steps(tmp_path / "out") == [3, 4, 5]
        kill_keeper(checkpointer)
        checkpointer.save(training.state, 6).wait(TIMEOUT_S)
        assert steps(tmp_path / "out") == [3, 5, 6]
    assert [event["step"] for event in events(tmp_path / "out", "pruned")][:2] == [1, 2]
    with pytest.raises(ValueError, match="newest=N"):
        Checkpointer(tmp_path / "out", keep="oldest=1")


@pytest.mark.parametrize("when", ["idle", "writing"])
def test_a_keeper_that_is_killed(
    checkpointer: Checkpointer,
    training: Training,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """What it had not written is not durable, and that is reported; a new keeper writes the next save."""
    checkpointer.save(training.state, training.step()).wait(TIMEOUT_S)
    if when == "writing":
        os.kill(keeper_pid(checkpointer), signal.SIGSTOP)
        lost = checkpointer.save(training.state, training.step())
        lost.wait_staged()
    dead = kill_keeper(checkpointer)
    if when == "writing":
        with pytest.raises(SaveError, match="the keeper ended"):
            lost.wait(TIMEOUT_S)
        assert steps(tmp_path / "out") == [1]
    step = training.step()
    checkpointer.save(training.state, step).wait(TIMEOUT_S)
    assert "the keeper died" in capfd.readouterr().err
    assert keeper_pid(checkpointer) != dead
    assert is_loaded(tmp_path / "out", training.values())
    assert not list(OutputFolder(tmp_path / "out").trash.iterdir())


def test_a_keeper_that_is_killed_while_it_starts(
    checkpointer: Checkpointer, training: Training, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(checkpointer._host.pid, signal.SIGKILL)
    checkpointer.save(training.state, training.step()).wait(TIMEOUT_S)
    assert "the keeper died" in capfd.readouterr().err
    assert is_loaded(tmp_path / "out", training.values())


def fails_then_works(checkpointer: Checkpointer, training: Training, folder: Path, give_space: Any) -> str:
    """A save that fails, and one after there is space again; what was said of the first."""
    first = training.values()
    checkpointer.save(training.state, 1).wait(TIMEOUT_S)
    training.step()
    reason = give_space(False)
    with pytest.raises(SaveError, match=reason):
        checkpointer.save(training.state, 2).wait(TIMEOUT_S)
    assert steps(folder) == [1]
    assert is_loaded(folder, first)
    [failed] = events(folder, "save_failed")
    assert failed["step"] == 2
    give_space(True)
    training.step()
    checkpointer.save(training.state, 3).wait(TIMEOUT_S)
    assert is_loaded(folder, training.values())
    return str(failed["reason"])


def test_a_keeper_that_cannot_start_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program can try again, and so can another run."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        with pytest.raises(OSError, match="no more processes"):
            Checkpointer(tmp_path)
    Checkpointer(tmp_path).close()


def test_a_file_that_may_not_grow(checkpointer: Checkpointer, training: Training, tmp_path: Path) -> None:
    """The keeper's limit is hit: the save fails and is said, and the next one works without the limit."""

    def give_space(is_there: bool) -> str:
        limit = resource.RLIM_INFINITY if is_there else 100_000
        resource.prlimit(keeper_pid(checkpointer), resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return "File too large"

    training.step()
    assert "File too large" in fails_then_works(checkpointer, training, tmp_path / "out", give_space)


def test_a_full_disk(training: Training, tmp_path: Path) -> None:
    """No space is left: the save fails and is said, nothing of it stays, and the next one finds space again."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:

        def give_space(is_there: bool) -> str:
            if is_there:
                (place / "filler").unlink()
            else:
                free = os.statvfs(place)
                (place / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 100_000))
            return "No space left"

        training.step()
        with Checkpointer(place / "out", keep="newest=1") as checkpointer:
            assert "No space left" in fails_then_works(checkpointer, training, place / "out", give_space)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_parameters_that_change_elsewhere(
    checkpointer: Checkpointer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That snapshot is lost, and said; the ones after it are copied before `save` returns, and hold."""
    model = torch.nn.Linear(512, 512)
    training = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    checkpointer.save(training, 1).wait(TIMEOUT_S)
    stager = checkpointer._snapshotter._stager
    copy = stager._copy

    def changing(*arguments: Any) -> None:
        with torch.no_grad():
            model.weight.add_(1.0)
        copy(*arguments)

    stager._copy = changing  # type: ignore[method-assign]
    torn = checkpointer.save(training, 2)
    with pytest.raises(SaveError, match="changed outside"):
        torn.wait(TIMEOUT_S)
    stager._copy = copy  # type: ignore[method-assign]
    assert [event["step"] for event in events(tmp_path / "out", "save_failed")] == [2]
    assert "saves wait for the copy" in capfd.readouterr().err
    expected = model.weight.detach().clone()
    saving = checkpointer.save(training, 3)
    with torch.no_grad():
        model.weight.zero_()
    saving.wait(TIMEOUT_S)
    assert torch.equal(torch.load(saving.path / "model.pt")["weight"], expected)
    assert steps(tmp_path / "out") == [1, 3]


def test_one_writer(checkpointer: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a job are not for this class."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConflictError, match="one of 2 ranks"):
        Checkpointer(tmp_path / "other")


def test_nothing_is_left_after_close(tmp_path: Path, training: Training) -> None:
    """No process, no descriptor, no mapping, no name."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    shared = shared_files()
    with Checkpointer(tmp_path / "out") as checkpointer:
        key, pid = checkpointer._host.key, checkpointer._host.pid
        checkpointer.save(training.state, training.step())
    assert steps(tmp_path / "out") == [1], "closing waits for what was begun"
    assert not Path(f"/proc/{pid}").exists()
    assert not any(name in Path("/proc/net/unix").read_text() for name in names_of(key))
    assert shared_files() <= shared
    del checkpointer
    gc.collect()
    assert "memfd:safepoint" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the process that saves is killed ---------------------------------------------------------------------------


class Killed:
    """A process that has saved, was killed, and left its keeper."""

    def __init__(self, folder: Path, said: dict[str, Any]) -> None:
        self.folder = folder / said["how"]
        self.keeper, self.child, self.names = said["keeper"], said["child"], names_of(said["key"])
        self._keeper = os.pidfd_open(self.keeper)
        os.kill(said["pid"], signal.SIGKILL)

    def wait_for_keeper(self) -> None:
        """It ends by itself, and leaves nothing."""
        with contextlib.suppress(ProcessLookupError):  # not all of them were stopped
            os.kill(self.keeper, signal.SIGCONT)
        wait_for_death(self.keeper, self._keeper)
        assert not any(name in Path("/proc/net/unix").read_text() for name in self.names)
        assert not any(commands_with(name) for name in self.names)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Killed]]:
    folder = tmp_path_factory.mktemp("killed")
    shared = shared_files()
    with subprocess.Popen([sys.executable, "-m", "tests.programs.saving", folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        killed = {one["how"]: Killed(folder, one) for one in said}
    yield killed
    for one in killed.values():
        for pid in (one.child, one.keeper):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert shared_files() <= shared


def test_killed_after_staging(killed: dict[str, Killed]) -> None:
    """The keeper commits what was staged, whole, and ends."""
    killed["staged"].wait_for_keeper()
    folder = killed["staged"].folder
    assert steps(folder) == [1, 2]
    found = newest_valid(folder, rejected=lambda *_: None)
    assert found is not None
    assert torch.equal(torch.load(found[0] / "model.pt")["weight"], torch.full((LARGE_STATE_ELEMENTS,), 2.0))
    assert torch.load(found[0] / "notes.pt") == {"step": 2}
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.load({"notes": {}}) == 2


def test_killed_while_staging(killed: dict[str, Killed]) -> None:
    """The one before is there, and nothing half."""
    killed["half"].wait_for_keeper()
    folder = killed["half"].folder
    assert steps(folder) == [1]
    assert [path for path in OutputFolder(folder).work.rglob("*") if path.is_file()] == []
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.load({"notes": {}}) == 1


def test_killed_beside_a_child_that_lives_on(killed: dict[str, Killed]) -> None:
    """A data loader's worker has all its parent's descriptors; the keeper does not wait for it."""
    killed["forked"].wait_for_keeper()
    assert Path(f"/proc/{killed['forked'].child}").exists()
    assert steps(killed["forked"].folder) == [1, 2]
