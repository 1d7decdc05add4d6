"""A start where another program has left checkpoints: which one is used, and what happens to the others."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import CheckpointError, NothingValidError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected, NewerForeign, ResumedFromForeign
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.store import Store
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import Examine, ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from safepoint.training.start.foreign import check_best
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import contents, write_foreign
from tests.support.stores import FaultyStore, flip


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = prepared(tmp_path / "out")
    for step in (4, 8):
        write_foreign(folder.root, step)
    return folder


def start(
    output: OutputFolder,
    *,
    restart: int = 0,
    store: Store | None = None,
    trainer: bool = True,
    examine: Examine = lambda point: "",
    **options: object,
) -> tuple[ResumePoint | None, list[Event]]:
    events: list[Event] = []
    peers = Peers(Place(restart=restart), timeout_s=1)
    settings = RunSettings(**options)  # pyright: ignore[reportArgumentType]
    chooser = CheckpointChooser(
        peers,
        output,
        Folders(),
        store,
        settings,
        FirstStart(peers, output, store, settings),
        events.append,
        examine=examine,
        reads_foreign=trainer,
    )
    return chooser.choose(), events


def step_of(result: tuple[ResumePoint | None, list[Event]]) -> int:
    assert result[0] is not None
    assert verify(result[0].path).is_valid
    return result[0].manifest.step


def test_the_newest_is_used_and_stays(output: OutputFolder) -> None:
    """The Trainer gets a copy with a manifest; the original is not changed, also when the start is repeated."""
    before = contents(output.root)
    for restart in (0, 1):
        result = start(output, restart=restart)
        assert step_of(result) == 8
        assert result[0] is not None
        assert result[0].path.parent != output.root
        assert [event.path for event in result[1] if isinstance(event, ResumedFromForeign)] == [
            str(output.root / "checkpoint-8")
        ]
    assert contents(output.root) == before
    assert list(output.manifests()) == []


def test_a_damaged_one_means_the_older_one(output: OutputFolder) -> None:
    """Said with the reason; the damaged one stays where it is."""
    (output.root / "checkpoint-8" / "scheduler.pt").write_bytes(b"cut off")
    result = start(output)
    assert step_of(result) == 4
    assert [event.file for event in result[1] if isinstance(event, CheckpointRejected)] == ["scheduler.pt"]
    assert [path.name for path in list_checkpoints(output.root)] == ["checkpoint-8", "checkpoint-4"]


def copies_in(output: OutputFolder) -> list[str]:
    """The copies of checkpoints of other programs."""
    return [path.name for folder in output.work.glob("foreign*") for path in folder.iterdir()]


@pytest.mark.parametrize("is_in_store", [False, True])
def test_a_copy_that_is_rejected_is_deleted(output: OutputFolder, tmp_path: Path, is_in_store: bool) -> None:
    """Only the copy of the checkpoint from which the run resumes stays, until its first step."""
    store = FaultyStore(output.root) if is_in_store else None
    own = prepared(tmp_path / "own") if is_in_store else output
    tried: list[int] = []

    def examine(point: ResumePoint) -> str:
        tried.append(point.manifest.step)
        assert copies_in(own) == [point.path.name]
        return "its ranks differ" if point.manifest.step == 8 else ""

    before = contents(output.root)
    assert step_of(start(own, store=store, examine=examine)) == 4
    assert tried == [8, 4]
    assert copies_in(own) == ["checkpoint-4"]
    assert contents(output.root) == before


def test_a_copy_of_a_named_one_that_is_rejected_is_deleted(output: OutputFolder) -> None:
    """The start ends, and the copy would stay until the next start."""
    named = str(output.root / "checkpoint-8")
    with pytest.raises(CheckpointError, match="its ranks differ"):
        start(output, resume=named, examine=lambda point: "its ranks differ")
    assert copies_in(output) == []


def test_none_can_be_used(output: OutputFolder) -> None:
    """Exit code 14, and nothing moves."""
    for step in (4, 8):
        (output.root / f"checkpoint-{step}" / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(NothingValidError, match="2 checkpoints that Safepoint did not write, and no"):
        start(output)
    assert len(list_checkpoints(output.root)) == 2


def test_other_loops_cannot_use_them(output: OutputFolder) -> None:
    """A loop without a Trainer says why it does not begin at step 0."""
    with pytest.raises(NothingValidError, match="Only the Trainer"):
        start(output, trainer=False)


def test_safepoints_own_come_first(output: OutputFolder) -> None:
    """A newer foreign one is named, with the option that chooses it, and is still there after a restart."""
    commit(output, 6)
    result = start(output)
    assert step_of(result) == 6
    (newer,) = [event for event in result[1] if isinstance(event, NewerForeign)]
    assert (newer.step, newer.fault) == (8, "")
    chosen = start(output, resume=newer.path)
    assert step_of(chosen) == 8
    assert step_of(start(output, restart=1, resume=newer.path)) == 8
    commit(output, 9)
    assert step_of(start(output, restart=1, resume=newer.path)) == 9
    assert step_of(start(output)) == 9


def test_own_ones_that_are_damaged(output: OutputFolder) -> None:
    """The newest good one is used, also if another program wrote it."""
    flip(commit(output, 6) / "model.safetensors")
    assert step_of(start(output)) == 8


def test_a_named_one_that_cannot_be_used(output: OutputFolder) -> None:
    """It is an error, because the user chose it."""
    (output.root / "checkpoint-8" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: it is missing"):
        start(output, resume=str(output.root / "checkpoint-8"))


def test_a_named_one_from_elsewhere(output: OutputFolder, tmp_path: Path) -> None:
    """Safepoint's own checkpoints are those of another run, and move aside; a restart resumes from the named one."""
    other = prepared(tmp_path / "other")
    commit(other, 10)
    for restart in (0, 1):
        assert step_of(start(other, restart=restart, resume=str(output.root / "checkpoint-4"))) == 4
    assert list_checkpoints(other.root) == []


@pytest.mark.parametrize("options", [{"resume": "never"}, {"from_scratch": True}])
def test_from_scratch(output: OutputFolder, options: dict[str, object]) -> None:
    """They are moved aside, so that a restart does not resume from them."""
    assert start(output, **options)[0] is None
    assert list_checkpoints(output.root) == []
    assert len(list(output.root.glob("set-aside-*/checkpoint-*"))) == 2


def test_in_a_store(output: OutputFolder, tmp_path: Path) -> None:
    """It is fetched and verified; an unfinished upload is passed over, and nothing in the store changes."""
    (output.root / "checkpoint-8" / "checkpoint-is-incomplete.txt.node-0-rank-0").touch()
    before = contents(output.root)
    local = prepared(tmp_path / "local")
    result = start(local, store=FaultyStore(output.root))
    assert step_of(result) == 4
    assert result[0] is not None
    assert result[0].path.is_relative_to(local.root)
    assert contents(output.root) == before
    assert list_checkpoints(local.root) == []


def test_the_best_one_may_be_foreign(output: OutputFolder) -> None:
    """It is checked before the Trainer loads it."""
    check_best(output.root / "checkpoint-4")
    (output.root / "checkpoint-4" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="model was not loaded"):
        check_best(output.root / "checkpoint-4")
