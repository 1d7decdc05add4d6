"""Someone puts a checkpoint with a higher step beside those of a run, and no run would resume from it.

Its files are missing or have other bytes, or another user has made it in a folder that everyone may write to. No
command takes it for the newest one: otherwise a person would export a stranger's model, lose the steps in a process
image, or delete the last checkpoint that is good.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.tools.inventory import Inventory, open_inventory
from safepoint.checkpoint.tools.removal import remove_all
from safepoint.dashboard.pages import checkpoint_actions
from safepoint.errors import ConflictError, ExitCode
from safepoint.jobs.local import newest_state
from safepoint.jobs.local.images import watched_run
from safepoint.jobs.local.newest_state import NewestState, newest_checkpoint
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.protection.keys import own_key
from tests.attacks.test_checkpoints_of_other_runs import as_root, change
from tests.support.checkpoints import commit, keep_final, prepared
from tests.support.commands import safepoint
from tests.support.criu_images import add_image, random_pages
from tests.support.foreign import write_foreign

_STRANGER = 65534
_OWN = {0: {"model.safetensors": b"own", "config.json": b"{}"}}
_OTHER = {0: {"model.safetensors": b"stranger's", "config.json": b"{}"}}
_NO_TIMES = ["", "yesterday", "0001-01-01T00:00:00", "10000-01-01T00:00:00Z", "\x1b[2J"]


def hollow(root: Path) -> None:
    """checkpoint-99 has no files."""
    folder = change(commit(prepared(root), 99, _OTHER), created="9999-12-31T23:59:59.999Z")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()


def give_away(folder: Path) -> None:
    """Make a folder in a sticky folder another user's."""
    os.chmod(folder.parent, 0o1777)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, _STRANGER, _STRANGER)


def of_stranger(root: Path) -> None:
    """checkpoint-99 is valid, and another user's."""
    give_away(change(commit(prepared(root), 99, _OTHER), created="9999-12-31T23:59:59.999Z"))


def with_other_bytes(root: Path) -> None:
    """checkpoint-99 has files of the right sizes."""
    (commit(prepared(root), 99, _OTHER) / "model.safetensors").write_bytes(b"stranger-s")


def of_other_run(root: Path) -> None:
    """checkpoint-99 is valid, and of another run."""
    change(commit(prepared(root), 99, _OTHER), run_id="other")


UNUSED = [hollow, pytest.param(of_stranger, marks=as_root)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An output folder with a checkpoint of step 10."""
    output = prepared(tmp_path / "out")
    commit(output, 10, _OWN)
    return output.root


def inventory_of(root: Path) -> Inventory:
    return open_inventory(str(root))[0]


@pytest.mark.parametrize("put", UNUSED)
def test_an_image_is_compared_with_the_newest_usable_one(
    put: Callable[[Path], None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job, and in `safepoint run --freeze-as-last-resort`."""
    put(root)
    found = newest_checkpoint(inventory_of(root))
    assert found is not None
    assert found.step == 10
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root.parent / "config"))
    compared: list[object] = []

    def choose(image: str, checkpoint: object) -> NewestState:
        compared.append(checkpoint)
        return NewestState(image=None, why="")

    monkeypatch.setattr(watched_run, "choose", choose)
    add_image(ImageLocation(root / "images", own_key()), root.parent / "dump", {7: random_pages(1, 2)})
    settings = RunSettings(output_dir=str(root))
    (root.parent / "train.py").touch()
    plan = LaunchPlan(program=(str(root.parent / "train.py"),))
    run = watched_run._WatchedRun(plan, settings, Criu(path="criu", version="4.2.1"))
    run._control = root / "images"
    assert not run._restore()
    assert [getattr(one, "step", None) for one in compared] == [10]


@pytest.mark.parametrize("text", _NO_TIMES)
def test_a_checkpoint_states_no_time(text: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try to resume the job would end with a traceback. The time of the files counts instead."""
    change(root / "checkpoint-10", created=text)
    monkeypatch.setattr(newest_state, "_examine", lambda image: "2999-01-01T00:00:00.000Z")
    found = newest_checkpoint(inventory_of(root))
    assert newest_state.choose("/images/image-1", found).image == "/images/image-1"
    monkeypatch.setattr(newest_state, "_examine", lambda image: "1999-01-01T00:00:00.000Z")
    assert newest_state.choose("/images/image-1", found).image is None


@pytest.mark.parametrize("put", UNUSED)
def test_the_model_of_a_location(put: Callable[[Path], None], root: Path, tmp_path: Path) -> None:
    """A warning names the checkpoint that is not used. Copies leave it out, too."""
    put(root)
    found = safepoint("checkpoints", "export", root, tmp_path / "model")
    assert found.code is ExitCode.OK
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"own"
    assert "newer ones are not used: checkpoint-99 (" in found.stderr
    assert safepoint("checkpoints", "copy", root, tmp_path / "copies").code is ExitCode.OK
    assert sorted(path.name for path in (tmp_path / "copies").glob("checkpoint-*")) == ["checkpoint-10"]


@as_root
def test_a_person_may_name_a_checkpoint_of_another_user(root: Path, tmp_path: Path) -> None:
    """The list says that it is another user's."""
    of_stranger(root)
    assert "other user" in safepoint("checkpoints", "list", root).stdout
    assert safepoint("checkpoints", "export", root / "checkpoint-99", tmp_path / "model").code is ExitCode.OK
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"stranger's"


@as_root
def test_a_final_model_of_another_user(root: Path, tmp_path: Path) -> None:
    """It is not exported in place of the newest checkpoint."""
    keep_final(prepared(root), model_safetensors=b"stranger's", config_json=b"{}").rename(root / "final")
    give_away(root / "final")
    assert safepoint("checkpoints", "export", root, tmp_path / "model").code is ExitCode.OK
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"own"


@as_root
def test_the_checkpoints_of_another_user_stay(root: Path) -> None:
    """A person deletes a job with its checkpoints."""
    of_stranger(root)
    assert remove_all([inventory_of(root)], str(root)) == 1
    assert (root / "checkpoint-99" / MANIFEST_NAME).is_file()
    assert not (root / "checkpoint-10").exists()


@as_root
def test_commands_for_all_checkpoints_leave_them_alone(root: Path) -> None:
    """`repair` moves no checkpoint of another user aside, and `adopt` writes no manifest into one."""
    of_stranger(root)
    (root / "checkpoint-99" / "model.safetensors").unlink()
    write_foreign(root, 98)
    give_away(root / "checkpoint-98")
    assert safepoint("checkpoints", "repair", root, "--drop-damaged").code is ExitCode.OK
    assert safepoint("checkpoints", "adopt", root).code is ExitCode.OK
    assert (root / "checkpoint-99" / MANIFEST_NAME).is_file()
    assert not (root / "checkpoint-98" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("put", [*UNUSED, with_other_bytes, of_other_run])
def test_the_last_good_one_stays(put: Callable[[Path], None], root: Path) -> None:
    """A person deletes it in the dashboard."""
    put(root)
    with pytest.raises(ConflictError, match="nothing was deleted"):
        checkpoint_actions._delete(inventory_of(root), "checkpoint-10")
    commit(prepared(root), 20, _OWN)
    checkpoint_actions._delete(inventory_of(root), "checkpoint-10")
    assert not (root / "checkpoint-10").exists()


def test_a_checkpoint_that_is_saved_while_an_image_is_stored(root: Path) -> None:
    """It is newer than the image, so the image does not have its step."""
    found = newest_checkpoint(inventory_of(root))
    assert found is not None
    assert newest_checkpoint(inventory_of(root), until_s=found.created_s) == found
    assert newest_checkpoint(inventory_of(root), until_s=found.created_s - 0.001) is None
