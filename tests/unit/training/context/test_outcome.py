"""How a rank's run ends: exit codes, and what is reported."""

from pathlib import Path

import pytest

from safepoint.errors import ExitCode, Interrupted, StorageError
from safepoint.foundation.events import run_events
from safepoint.foundation.events.stream import Event
from safepoint.training.outcome.launcher_folder import note_stop_signal, reserve
from safepoint.training.outcome.rank_record import read_records
from tests.support.contexts import rank_context


@pytest.mark.parametrize(
    ("is_saved", "uploads_failed", "code"),
    [
        (True, False, ExitCode.INTERRUPTED_SAVED),
        (False, False, ExitCode.TERMINATED_UNSAVED),
        (True, True, ExitCode.STORAGE),
    ],
)
def test_an_interruption_is_recorded_and_reported(
    is_saved: bool, uploads_failed: bool, code: ExitCode, tmp_path: Path
) -> None:
    """Once, with the exit code; a program that continues is stopped with it."""
    reported: list[Event] = []
    outcome = rank_context(reported=reported, record_folder=str(tmp_path)).outcome
    outcome.check_not_interrupted()
    outcome.training_begins(3, is_saved=True)
    outcome.step_done(4)
    interrupted = outcome.interrupt(is_saved=is_saved, reason="the save failed", uploads_failed=uploads_failed)
    assert interrupted.exit_code == code
    assert reported == [run_events.Interrupted(step=4, saved=is_saved, reason="" if is_saved else "the save failed")]
    record = read_records(tmp_path, 0)[0]
    assert (record.exit_code, record.has_stepped) == (code, True)
    with pytest.raises(Interrupted):
        outcome.check_not_interrupted()


def test_an_end_that_is_not_saved_is_an_error() -> None:
    """At the first check only: a program may catch the error and train again."""
    outcome = rank_context().outcome
    outcome.training_begins(0, is_saved=False)
    outcome.saved(5)
    outcome.training_ended(5)
    outcome.require_saved_end()
    outcome.training_ended(6)
    assert "step 6" in outcome.unsaved_end
    with pytest.raises(StorageError, match="step 6"):
        outcome.require_saved_end()
    outcome.require_saved_end()


def test_a_rank_that_will_be_frozen_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a training with nothing saved, if its launcher was asked to stop. It ends at the deadline."""
    outcome = rank_context(record_folder=str(tmp_path)).outcome
    codes: list[int] = []
    monkeypatch.setattr(outcome, "end_now", codes.append)
    reserve(tmp_path, 3.0)
    note_stop_signal(tmp_path, 15)
    outcome.end_outside_training()
    assert codes == []
    outcome.end_at_deadline()
    assert codes == [ExitCode.TERMINATED_UNSAVED]


def test_a_rank_that_will_not_be_frozen_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has failed: the launcher was not asked to stop. Or its state is saved."""
    outcome = rank_context(record_folder=str(tmp_path)).outcome
    codes: list[int] = []
    monkeypatch.setattr(outcome, "end_now", codes.append)
    reserve(tmp_path, 3.0)
    outcome.end_outside_training()
    assert codes == [ExitCode.TERMINATED_UNSAVED]
    saved = rank_context(record_folder=str(tmp_path)).outcome
    monkeypatch.setattr(saved, "end_now", codes.append)
    note_stop_signal(tmp_path, 15)
    saved.training_begins(4, is_saved=True)
    saved.end_outside_training()
    assert codes == [ExitCode.TERMINATED_UNSAVED, ExitCode.INTERRUPTED_SAVED]
