"""How a rank ended: the record that its launcher reads."""

from pathlib import Path

from safepoint.foundation.environment import Place
from safepoint.training.outcome.rank_record import RankRecordWriter, read_records


def test_the_first_verdict_stands(tmp_path: Path) -> None:
    """What follows an ending is only the way out; steps and messages arrive as written."""
    record = RankRecordWriter(str(tmp_path), Place(rank=3, world_size=4, restart=1))
    assert not read_records(tmp_path, 1)[3].has_stepped
    record.stepped()
    record.ended(75, "saved")
    record.ended(1, "later")
    read = read_records(tmp_path, 1)[3]
    assert (read.has_stepped, read.exit_code, read.message) == (True, 75, "saved")
    assert read_records(tmp_path, 0) == {}


def test_unreadable_records_are_left_out(tmp_path: Path) -> None:
    """A torn, foreign or misnamed record does not affect the others."""
    RankRecordWriter(str(tmp_path), Place())
    texts = ["", "[]", "3", '{"rank": 1}', '{"unknown": 1}', '{"rank": [], "pid": 1}']
    moments = ["3", "[3]", '[{"phase": "no phase", "at_s": 1}]', '[{"at_s": 1}]']
    texts += [f'{{"rank": 1, "pid": 1, "moments": {text}}}' for text in moments]
    for rank, text in enumerate(texts, start=1):
        (tmp_path / f"start-0-rank-{rank}.json").write_text(text)
    assert list(read_records(tmp_path, 0)) == [0]


def test_without_a_launcher_nothing_is_written(tmp_path: Path) -> None:
    """No folder, or one that is gone with its launcher, changes nothing for the rank."""
    for folder in (None, str(tmp_path / "gone")):
        record = RankRecordWriter(folder, Place())
        record.stepped()
        record.ended(0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_be_killed_when_it_has_nothing_to_save(tmp_path: Path) -> None:
    """Only while it says so, and not when it ends for a reason of its own, of which it may still print the error."""
    record = RankRecordWriter(str(tmp_path), Place())

    def can_be_killed() -> tuple[bool, bool]:
        read = read_records(tmp_path, 0)[0]
        return read.can_be_killed(after_kill=True), read.can_be_killed(after_kill=False)

    assert can_be_killed() == (False, False)
    record.set_expendable(True)
    assert can_be_killed() == (True, True)
    record.set_expendable(False)  # it writes a checkpoint itself
    assert can_be_killed() == (False, False)
    record.set_expendable(True)
    record.failed(lost_peer=False, message="ValueError")
    assert can_be_killed() == (True, False), "after a kill of another rank, its error is a consequence"
    record.ended(75, "saved")
    assert can_be_killed() == (False, False)


def test_a_rank_that_has_lost_a_peer_may_be_killed(tmp_path: Path) -> None:
    """Its end has its cause in the other rank."""
    record = RankRecordWriter(str(tmp_path), Place())
    record.set_expendable(True)
    record.failed(lost_peer=True)
    assert read_records(tmp_path, 0)[0].can_be_killed(after_kill=False)
