"""Where a run begins: the newest valid checkpoint, or a named one, and nothing good is lost on the way."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, prune
from safepoint.errors import CheckpointError, NothingValidError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.foundation.shared_folders.leases import Lease, lease_on
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint, lease
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = prepared(tmp_path / "out")
    for step in (4, 8, 12):
        commit(folder, step)
    return folder


def flip(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[7] ^= 1
    (path / "model.safetensors").write_bytes(content)


def start(output: OutputFolder, restart: int = 0, **options: object) -> tuple[ResumePoint | None, list[str]]:
    events: list[Event] = []
    peers = Peers(Place(restart=restart), timeout_s=1)
    settings = RunSettings(**options)  # type: ignore[arg-type]
    first = FirstStart(peers, output, None, settings)
    point = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append).choose()
    return point, [event.name for event in events]


def names(output: OutputFolder) -> list[str]:
    return [path.name for path in list_checkpoints(output.root)]


def test_the_newest_valid_one_is_chosen(output: OutputFolder) -> None:
    """Nothing is wrong: the highest step, one event, and nothing moves."""
    point, events = start(output)
    assert point is not None
    assert point.manifest.step == 12
    assert events == ["resumed"]
    assert names(output) == ["checkpoint-12", "checkpoint-8", "checkpoint-4"]


def test_an_empty_folder_means_step_0(tmp_path: Path) -> None:
    """Nothing there is nothing to report."""
    assert start(prepared(tmp_path / "out")) == (None, [])


def test_a_damaged_newest_one_never_costs_a_good_one(output: OutputFolder) -> None:
    """It is moved aside, so that retention, which reads manifests only, does not keep it in a good one's place."""
    flip(output.root / "checkpoint-12")
    point, events = start(output)
    assert point is not None
    assert point.manifest.step == 8
    assert events == ["checkpoint_rejected", "set_aside", "resumed"]
    saved = commit(output, 9)
    prune(output, [KeepNewest(1)], lambda event: None)
    assert list_checkpoints(output.root) == [saved]
    assert verify(saved).is_valid
    assert len(list(output.root.glob("set-aside-*/checkpoint-12"))) == 1


def test_restarted_ranks_resume_from_what_was_named(output: OutputFolder, tmp_path: Path) -> None:
    """Before the first save of a run that began from a checkpoint elsewhere, that checkpoint still counts."""
    elsewhere = prepared(tmp_path / "elsewhere")
    named = str(output.root / "checkpoint-8")
    for restart in (0, 1):
        point, _ = start(elsewhere, restart, resume=named)
        assert point is not None
        assert (point.path, point.manifest.step) == (Path(named), 8)
    commit(elsewhere, 9)
    point, _ = start(elsewhere, 1, resume=named)
    assert point is not None
    assert point.manifest.step == 9


def test_nothing_valid_moves_nothing(output: OutputFolder) -> None:
    """All are damaged: an error, and the folder is as it was."""
    for path in list_checkpoints(output.root):
        flip(path)
    with pytest.raises(NothingValidError, match="3 checkpoint"):
        start(output)
    assert len(names(output)) == 3


@pytest.mark.parametrize("options", [{"from_scratch": True}, {"resume": "never"}])
def test_from_scratch_moves_everything_and_deletes_nothing(output: OutputFolder, options: dict[str, object]) -> None:
    """The old run stays readable beside the new one."""
    point, events = start(output, **options)
    assert point is None
    assert events == ["set_aside"]
    assert names(output) == []
    assert all(verify(path).is_valid for path in output.root.glob("set-aside-*/*"))
    assert len(list(output.root.glob("set-aside-*/*"))) == 3


def test_from_scratch_means_the_first_start_only(output: OutputFolder) -> None:
    """Ranks that torch elastic restarted resume from what they saved since."""
    point, _ = start(output, restart=1, from_scratch=True)
    assert point is not None
    assert point.manifest.step == 12


@pytest.mark.parametrize("choice", ["from_scratch", "named", "elsewhere"])
def test_a_choice_of_a_job_applies_once(output: OutputFolder, tmp_path: Path, choice: str) -> None:
    """A cluster starts each pod with the same options. What was saved since the first start is not set aside."""
    elsewhere = str(commit(prepared(tmp_path / "other"), 6))
    options: dict[str, object] = {
        "from_scratch": {"from_scratch": True},
        "named": {"resume": str(output.root / "checkpoint-4")},
        "elsewhere": {"resume": elsewhere},
    }[choice]
    first, _ = start(output, first_start="a1", **options)
    assert (0 if first is None else first.manifest.step) == {"from_scratch": 0, "named": 4, "elsewhere": 6}[choice]
    commit(output, 9)
    for _ in range(2):
        point, events = start(output, first_start="a1", **options)
        assert point is not None
        assert point.manifest.step == 9
        assert events == ["resumed"]
    start(output, first_start="b2", **options)  # another job in the same folder
    assert "checkpoint-9" not in names(output)


def test_a_choice_of_a_job_in_an_object_store_applies_once(output: OutputFolder, tmp_path: Path) -> None:
    """The pods' own folders are gone at the next start."""
    store = FaultyStore(tmp_path / "store")
    peers = Peers(Place(), timeout_s=1)
    settings = RunSettings(from_scratch=True, first_start="a1")
    for expected in (True, False):
        first = FirstStart(peers, prepared(tmp_path / f"pod-{expected}"), store, settings)
        assert first.is_now() is expected
        first.leave_mark()


def test_a_named_one_sets_the_later_ones_aside(output: OutputFolder) -> None:
    """Going back to step 8 keeps 4 and 8, and moves 12 away; a restart takes the newest again."""
    point, events = start(output, resume=str(output.root / "checkpoint-8"))
    assert point is not None
    assert point.manifest.step == 8
    assert events == ["set_aside", "resumed"]
    assert names(output) == ["checkpoint-8", "checkpoint-4"]
    commit(output, 10)
    again, _ = start(output, restart=1, resume=str(output.root / "checkpoint-8"))
    assert again is not None
    assert again.manifest.step == 10


def test_a_named_one_from_elsewhere_sets_all_aside(output: OutputFolder, tmp_path: Path) -> None:
    """A checkpoint of another folder begins a course that none here belongs to."""
    other = commit(prepared(tmp_path / "other"), 6)
    point, _ = start(output, resume=str(other))
    assert point is not None
    assert point.path == other
    assert names(output) == []


def test_a_named_one_under_a_wrong_name_is_refused_and_stays(output: OutputFolder) -> None:
    """A renamed checkpoint is not moved aside from under the run that was to continue it."""
    renamed = (output.root / "checkpoint-8").rename(output.root / "checkpoint-99")
    with pytest.raises(CheckpointError, match=r"manifest says step 8.*name says 99"):
        start(output, resume=str(renamed))
    assert verify(renamed).is_valid


@pytest.mark.parametrize("damage", ["flipped", "missing", "link"])
def test_a_named_one_that_is_not_valid_is_refused(output: OutputFolder, damage: str) -> None:
    """Somebody asked for this one: no other is taken in its place, and nothing moves."""
    path = output.root / "checkpoint-8"
    if damage == "flipped":
        flip(path)
    elif damage == "missing":
        path = output.root / "checkpoint-7"
    else:
        (output.root / "linked").symlink_to(path)
        path = output.root / "linked"
    with pytest.raises(CheckpointError, match="not a valid checkpoint"):
        start(output, resume=str(path))
    assert len(names(output)) == 3


def test_a_lease_covers_the_checkpoint_that_is_read(output: OutputFolder) -> None:
    """While ranks read it no run prunes it, and without a checkpoint the lease is nothing."""
    point, _ = start(output)
    assert point is not None
    with lease(point):
        assert lease_on(point.path / MANIFEST_NAME) is Lease.READER
    assert lease_on(point.path / MANIFEST_NAME) is Lease.NONE
    with lease(None):
        pass


def test_a_jobs_next_launcher_is_no_first_start(output: OutputFolder, tmp_path: Path) -> None:
    """What was saved since the beginning counts; where nothing was, the checkpoint that was named."""
    point, events = start(output, has_begun=True, resume=str(output.root / "checkpoint-4"))
    assert point is not None
    assert (point.manifest.step, events) == (12, ["resumed"])
    point, events = start(output, has_begun=True, from_scratch=True)
    assert point is not None
    assert point.manifest.step == 12
    elsewhere = prepared(tmp_path / "new")
    point, _ = start(elsewhere, has_begun=True, resume=str(output.root / "checkpoint-8"))
    assert point is not None
    assert point.manifest.step == 8
