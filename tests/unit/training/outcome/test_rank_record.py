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
