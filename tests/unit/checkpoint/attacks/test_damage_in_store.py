"""Damage in an object store: found before training begins, and the older checkpoint is used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import NothingValidError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location, Scheme
from safepoint.storage.opening import open_store
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared

NUM_WINDOWS = 256


class Scene:
    """A store with the checkpoints of steps 10 and 20, and a node without any."""

    def __init__(self, root: Path) -> None:
        bucket = prepared(root / "bucket")
        for step in (10, 20):
            commit(bucket, step)
        self.bucket = bucket.root
        self.output: OutputFolder = prepared(root / "local")
        self.events: list[Event] = []
        peers, store = Peers(Place(), timeout_s=1), open_store(Location(scheme=Scheme.FILE, path=str(self.bucket)))
        first = FirstStart(peers, self.output, store, RunSettings())
        self._chooser = CheckpointChooser(
            peers, self.output, Folders(), store, RunSettings(), first, self.events.append
        )

    def fetched_step(self) -> int:
        """The step that a start on the empty node goes on from."""
        self.events.clear()
        point = self._chooser.choose()
        assert point is not None
        assert verify(point.path).is_valid
        for path in self.output.root.glob("checkpoint-*"):
            path.rename(self.output.trash / f"{path.name}-{len(list(self.output.trash.iterdir()))}")
        return point.manifest.step

    def forget_the_older(self) -> None:
        """So that nothing is fetched in its place, hundreds of times."""
        shutil.rmtree(self.bucket / "checkpoint-10")

    def refuses(self) -> bool:
        """Whether the only checkpoint is rejected, and nothing of it is left on the node."""
        self.events.clear()
        with pytest.raises(NothingValidError):
            self._chooser.choose()
        return len(self.rejected) == 1 and not list(self.output.work.iterdir())

    @property
    def rejected(self) -> list[str]:
        return [event.path for event in self.events if isinstance(event, CheckpointRejected)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_every_flipped_byte_of_a_manifest_is_found(scene: Scene) -> None:
    """Whichever it is, the checkpoint is rejected."""
    path = scene.bucket / "checkpoint-20" / MANIFEST_NAME
    good = path.read_bytes()
    assert scene.fetched_step() == 20
    scene.forget_the_older()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
        assert scene.refuses(), index


def test_a_flip_in_every_window_of_every_file_is_found(scene: Scene) -> None:
    """One bit in each of 256 windows of each file."""
    folder = scene.bucket / "checkpoint-20"
    scene.forget_the_older()
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name == MANIFEST_NAME:
            continue
        good = path.read_bytes()
        for window in range(min(NUM_WINDOWS, len(good))):
            index = window * len(good) // NUM_WINDOWS if len(good) >= NUM_WINDOWS else window
            path.write_bytes(good[:index] + bytes([good[index] ^ 16]) + good[index + 1 :])
            assert scene.refuses(), (path, window)
        path.write_bytes(good)
    assert scene.fetched_step() == 20


def _cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def _remove(path: Path, other: Path) -> None:
    path.unlink()


def _swap(path: Path, other: Path) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize("change", [_cut, _empty, _remove, _swap])
def test_every_file_cut_removed_or_swapped_is_found(change: Callable[[Path, Path], None], scene: Scene) -> None:
    """The manifest too, with every neighbour."""
    folder = scene.bucket / "checkpoint-20"
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    goods = {path: path.read_bytes() for path in paths}
    for path, other in zip(paths, [*paths[1:], paths[0]], strict=True):
        change(path, other)
        assert scene.fetched_step() == 10, path
        for each, good in goods.items():
            each.write_bytes(good)
    assert scene.fetched_step() == 20


def test_nothing_valid_is_never_silently_from_scratch(scene: Scene) -> None:
    """All damaged, or none written by Safepoint: an error."""
    for step in (10, 20):
        (scene.bucket / checkpoint_name(step) / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(NothingValidError):
        scene.fetched_step()
    for step in (10, 20):
        (scene.bucket / checkpoint_name(step) / MANIFEST_NAME).unlink()
    with pytest.raises(NothingValidError):
        scene.fetched_step()
