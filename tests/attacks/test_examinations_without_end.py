"""Checkpoints of other programs whose examination costs much more than their size: it ends.

A start does not examine a checkpoint that it does not use.
"""

import io
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from safepoint.checkpoint.foreign import contents
from safepoint.checkpoint.foreign.examine import examine, faults_of_names
from safepoint.checkpoint.pickles import bounded_pickle
from safepoint.checkpoint.weights import budget
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import NewerForeign
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign

_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
_KEYS = [f"w{number}" for number in range(50)]


def _archive(pickled: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
    return content.getvalue()


def _write_values(folder: Path, content: bytes, places: dict[str, tuple[int, int]]) -> None:
    """Folders of DCP with values that are no tensors, at `places` in one file."""
    for name in _FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(content)
        metadata = Metadata(
            state_dict_metadata={key: BytesStorageMetadata() for key in places},
            storage_data={MetadataIndex(key): _StorageInfo("__0_0.distcp", *place) for key, place in places.items()},
        )
        (folder / name / ".metadata").write_bytes(pickle.dumps(metadata))


def _faults(folder: Path) -> dict[str, str]:
    found = examine(open_store(Location.of_folder(folder.parent)), folder.name).faults
    return {fault.file: fault.reason for fault in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_foreign(tmp_path / "out", 4)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of torch.save that were read, in the order of reading."""
    found: list[str] = []

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def note(path: Any, **options: Any) -> Any:
            found.append(path.name)
            return read(path, **options)

        return note

    monkeypatch.setattr(contents, "read_torch_file", noting(contents.read_torch_file))
    return found


def test_one_archive_for_many_values(folder: Path, reads: list[str]) -> None:
    """It is not read again for each of them."""
    content = _archive(b"N0" * 1000 + b"N.")
    _write_values(folder, content, dict.fromkeys(_KEYS, (0, len(content))))
    found = _faults(folder)
    for name in _FOLDERS:
        assert "overlap at byte 0 of __0_0.distcp" in found[f"{name}/.metadata"]
    assert reads.count("__0_0.distcp") == 0


def test_archives_that_share_their_bytes(folder: Path, reads: list[str]) -> None:
    """A zip archive may have other bytes before it. So one archive begins at fifty places."""
    content = b"\0" * len(_KEYS) + _archive(b"N0" * 1000 + b"N.")
    places = {key: (number, len(content) - number) for number, key in enumerate(_KEYS)}
    _write_values(folder, content, places)
    assert "overlap" in _faults(folder)[f"{_FOLDERS[0]}/.metadata"]
    assert reads.count("__0_0.distcp") == 0


def test_values_side_by_side(folder: Path, reads: list[str]) -> None:
    """As torch writes them, also without a length: each is read once."""
    content = _archive(b"N.")
    places = {key: (number * len(content), len(content)) for number, key in enumerate(_KEYS)}
    _write_values(folder, content * len(_KEYS), places)
    assert _faults(folder) == {}
    assert reads.count("__0_0.distcp") == 2 * len(_KEYS)


class _IndexOfTuples:
    """Pickled as the index of a value whose key is 80 tuples, which have 2**80 parts."""

    def __reduce__(self) -> Any:
        key: Any = 1
        for _ in range(80):
            key = key, key
        return MetadataIndex, ("w",), {"fqn": key, "offset": None}


_EXAMINE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
from pathlib import Path
from safepoint.checkpoint.foreign.examine import examine
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
folder = Path(sys.argv[1])
print(*examine(open_store(Location.of_folder(folder.parent)), folder.name).faults)
"""


@pytest.mark.timeout(90)
def test_a_key_of_tuples(folder: Path) -> None:
    """It is neither hashed nor printed. Python could not interrupt that, so it happens in a process of its own."""
    content = _archive(b"N.")
    _write_values(folder, content, {"w": (0, len(content))})
    metadata: Any = Metadata(
        state_dict_metadata={"w": BytesStorageMetadata()},
        storage_data={_IndexOfTuples(): _StorageInfo("__0_0.distcp", 0, len(content))},
    )
    (folder / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(metadata))
    done = subprocess.run([sys.executable, "-c", _EXAMINE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "it has names that are not strings" in done.stdout


def test_many_files_with_many_instructions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a checkpoint count together."""
    num_instructions = 0
    count = bounded_pickle.InstructionLimits.count

    def counting(self: bounded_pickle.InstructionLimits, code: int) -> None:
        nonlocal num_instructions
        num_instructions += 1
        count(self, code)

    monkeypatch.setattr(bounded_pickle.InstructionLimits, "count", counting)
    monkeypatch.setitem(budget._MOST, budget.Cost.STEPS, 50_000)
    (folder / "rng_state.pth").unlink()
    for rank in range(100):
        (folder / f"rng_state_{rank}.pth").write_bytes(_archive(b"N0" * 5000 + b"N."))
    found = _faults(folder)
    assert "rng_state_0.pth" not in found
    assert "instructions of pickles and records of archives" in found["rng_state_99.pth"]
    assert num_instructions < 60_000


def test_a_start_does_not_examine_what_it_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a checkpoint of the run itself. The newer one of another program is mentioned, and not opened."""
    output = prepared(tmp_path / "out")
    commit(output, 6)
    newer = write_foreign(output.root, 8)
    opened: list[str] = []
    for name in ("read_torch_file", "parse_object"):
        monkeypatch.setattr(contents, name, lambda path, *_, **__: opened.append(str(path)))
    events: list[Event] = []
    peers = Peers(Place(restart=0), timeout_s=1)
    settings = RunSettings()
    chooser = CheckpointChooser(
        peers,
        output,
        Folders(),
        None,
        settings,
        FirstStart(peers, output, None, settings),
        events.append,
        reads_foreign=True,
    )
    point = chooser.choose()
    assert point is not None
    assert point.manifest.step == 6
    (mentioned,) = [event for event in events if isinstance(event, NewerForeign)]
    assert (mentioned.step, mentioned.path, mentioned.fault) == (8, str(newer), "")
    assert "Its files were not read" in mentioned.line
    assert opened == []


@pytest.mark.parametrize("lacking", ["trainer_state.json", "optimizer.pt", "rng_state.pth"])
def test_names_show_what_is_missing(lacking: str, folder: Path) -> None:
    """A missing file and an unfinished save are found without a look into a file."""
    store = open_store(Location.of_folder(folder.parent))
    assert faults_of_names(store, folder.name) == ()
    (folder / lacking).unlink()
    assert [fault.file for fault in faults_of_names(store, folder.name)] == [lacking]
    (folder / "checkpoint-is-incomplete.txt").touch()
    assert "did not finish" in faults_of_names(store, folder.name)[0].reason
