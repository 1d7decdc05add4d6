"""Whether a save fits into the grace period, from what the folder tells."""

import json
from pathlib import Path

import pytest

from safepoint.doctor.deadline import History, judge_grace, look_at_history
from safepoint.doctor.finding import Status
from tests.support.checkpoints import FILES, commit, prepared


def moment(second: int) -> str:
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z"


def saved(second: int, step: int, duration_s: float = 1.0) -> dict[str, object]:
    return {"time": moment(second), "event": "saved", "step": step, "duration_s": duration_s}


def test_a_folder_tells_of_its_run(tmp_path: Path) -> None:
    """The newest checkpoint's size, the longest of the last saves, the pace of the last attempt."""
    assert look_at_history(tmp_path / "nowhere") == History()
    output = prepared(tmp_path)
    commit(output, 10)
    events = [
        saved(0, 10, 99.0),
        *[saved(10 + step, step, 2.0) for step in range(20, 25)],
        saved(300, 30, 3.0),
        saved(340, 40, 1.5),
    ]
    output.events.write_text("".join(f"{json.dumps(event)}\n" for event in events) + "torn li")
    output.progress.write_text(json.dumps({"time": moment(420), "step": 60, "step_s": 3.5, "pause_s": 0.5}))
    size_bytes = sum(len(content) for files in FILES.values() for content in files.values())
    assert look_at_history(tmp_path) == History(state_bytes=size_bytes, save_s=3.0, step_s=4.0)


@pytest.mark.parametrize("text", ["", "[]", "null\n3\n", '{"event": "saved", "duration_s": "x", "time": 3}'])
def test_a_damaged_record_tells_nothing(text: str, tmp_path: Path) -> None:
    output = prepared(tmp_path)
    output.events.write_text(text)
    output.progress.write_text(text)
    assert look_at_history(tmp_path) == History()


@pytest.mark.parametrize(
    ("history", "status", "words"),
    [
        (History(save_s=5.0), Status.OK, ["the last saves took up to 5.00 s"]),
        (History(save_s=5.0, step_s=21.0), Status.OK, ["a step about 21 s"]),
        (History(save_s=5.0, step_s=23.0), Status.WARNING, ["--snapshot-steps 1"]),
        (History(save_s=28.0, step_s=2.0), Status.FAILURE, ["at least 33 s"]),
        (History(state_bytes=10**9), Status.OK, ["1.0 GB takes about 11 s"]),
        (History(state_bytes=4 * 10**9), Status.FAILURE, ["at least 44 s"]),
        (History(state_bytes=4 * 10**9, save_s=2.0), Status.OK, []),
    ],
)
def test_measured_saves_count_before_estimated_ones(history: History, status: Status, words: list[str]) -> None:
    """30 s of which 27 can be used, on a disk of 100 MB/s."""
    finding = judge_grace(history, grace_s=30.0, margin_s=3.0, bytes_per_s=1e8)
    assert finding is not None
    assert finding.status is status
    for word in words:
        assert word in f"{finding.found} {finding.fix}"


def test_nothing_known_is_no_verdict() -> None:
    assert judge_grace(History(), grace_s=30.0, margin_s=3.0, bytes_per_s=1e8) is None
    assert judge_grace(History(state_bytes=1), grace_s=30.0, margin_s=3.0, bytes_per_s=None) is None
