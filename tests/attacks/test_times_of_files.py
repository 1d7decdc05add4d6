"""Files and documents whose times are no dates: a file system may store any 64-bit number of seconds."""

import dataclasses
import os
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest

from safepoint.checkpoint.foreign.describe import describe
from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.adopt import adopt
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.errors import CheckpointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.sdk.values import checkpoint_in, checkpoint_of
from safepoint.settings.run_settings import RunSettings
from safepoint.storage import local_folder
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import StoredObject
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import prepared
from tests.support.foreign import write_foreign

TIMES_S = [2.0**40, -(2.0**41), 1e300, float("inf"), float("-inf"), float("nan")]


def start(output: OutputFolder) -> tuple[ResumePoint | None, list[str]]:
    events: list[Event] = []
    peers, settings = Peers(Place(), timeout_s=1), RunSettings()
    first = FirstStart(peers, output, None, settings)
    chooser = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append, reads_foreign=True)
    return chooser.choose(), [event.name for event in events]


@pytest.fixture(params=[2**40, -(2**41)])
def strange(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with two checkpoints of another program. The newer one has a file of the year 36812, or of a
    year long before the first one. Not every file system stores these times, so the store reports them."""
    for step in (4, 6):
        write_foreign(tmp_path, step)
    far = os.stat(tmp_path / "checkpoint-6" / "trainer_state.json").st_ino
    real: Callable[[str, os.stat_result], StoredObject] = getattr(local_folder, "_object")  # noqa: B009  private

    def stated(key: str, status: os.stat_result) -> StoredObject:
        found = real(key, status)
        return dataclasses.replace(found, modified_s=float(request.param)) if status.st_ino == far else found

    monkeypatch.setattr(local_folder, "_object", stated)
    return tmp_path


@pytest.mark.parametrize("time_s", TIMES_S)
def test_any_time_is_a_date(time_s: float) -> None:
    """Out of range, it is the first or last one; and each date can be read again, in any time zone."""
    assert clock.date_of(time_s).tzinfo is UTC
    assert clock.date_of(time_s).astimezone() == clock.date_of(time_s)
    clock.parse_utc(clock.as_utc(time_s))


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00"])
def test_a_time_in_a_document_is_read_or_refused(text: str) -> None:
    """With one kind of exception, whatever it is."""
    try:
        clock.parse_utc(text)
    except ValueError:
        return


def test_a_start_examines_the_checkpoint(strange: Path) -> None:
    """It is described as any other, and the start does not end."""
    output = prepared(strange)
    point, _ = start(output)
    assert point is not None
    assert point.manifest.step == 6
    clock.parse_utc(point.manifest.created)


def test_it_is_listed_and_adopted(strange: Path) -> None:
    """By the command and by the SDK."""
    inventory, _ = open_inventory(str(strange))
    items = inventory.items()
    assert [checkpoint_of(item).name for item in items] == ["checkpoint-6", "checkpoint-4"]
    done = adopt(inventory, items, accumulation=1, dry_run=False, progress=lambda *_: None)
    assert not [fault for one in done for fault in one.faults]
    assert [item.stated is not None for item in inventory.items()] == [True, True]


@pytest.mark.parametrize("time_s", TIMES_S)
def test_a_list_from_a_cluster(time_s: float) -> None:
    """A pod has made it, so its numbers may be anything."""
    document = {
        "name": "checkpoint-1",
        "step": 1,
        "where": "pvc://claim",
        "trigger": "jit",
        "created_s": time_s,
        "bytes": 1,
        "files": 1,
        "kind": "checkpoint",
        "faults": [],
    }
    assert checkpoint_in(document).created.tzinfo is not None


@pytest.mark.parametrize("error", [ValueError, OverflowError])
def test_a_value_that_no_manifest_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It is a fault of its checkpoint, and the older one is used."""
    output = prepared(tmp_path)
    for step in (4, 6):
        write_foreign(tmp_path, step)

    def date(time_s: float) -> str:
        if not rejected:
            rejected.append("once")
            raise error("year 36812 is out of range")
        return clock.utc_now()

    rejected: list[str] = []
    monkeypatch.setattr(clock, "as_utc", date)
    point, events = start(output)
    assert point is not None
    assert point.manifest.step == 4
    assert "checkpoint_rejected" in events


def test_a_file_that_cannot_be_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error in a folder is a fault of this checkpoint, and no end of the start."""
    write_foreign(tmp_path, 6)
    store = open_store(Location.of_folder(tmp_path))
    found = examine(store, "checkpoint-6")
    assert not found.faults

    def fail(*_: object, **__: object) -> None:
        raise StorageError("Input/output error")

    monkeypatch.setattr(store, "stream", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        describe(store, found)
