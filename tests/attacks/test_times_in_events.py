"""The events in an output folder state times that no clock had: a stranger has written them, or a clock was wrong.

With `--save-every auto`, a run estimates from them how long it trains without a loss. It must not stop to save.
"""

import json
from pathlib import Path

import pytest

from safepoint.training.engine.save_clock import SaveClock, read_losses


def interval_s(folder: Path, *records: tuple[str, str]) -> float:
    events = folder / "events.jsonl"
    events.write_text("".join(json.dumps({"event": event, "time": time}) + "\n" for event, time in records))
    save_clock = SaveClock("auto", lambda: read_losses(events))
    save_clock.is_due()
    return save_clock.interval_s


@pytest.mark.parametrize(
    "times", [("0002-01-01", "9998-01-01"), ("2026-11-25", "2038-01-19")], ids=lambda times: times[1]
)
@pytest.mark.parametrize("count", [1, 1000])
def test_the_run_saves_every_hour(times: tuple[str, str], count: int, tmp_path: Path) -> None:
    begin, end = (f"{day}T00:00:00.000Z" for day in times)
    records = [("attempt_started", begin), ("finished", end)] * count
    found_s = interval_s(tmp_path, *records, ("attempt_started", begin))
    assert found_s < 3600


def test_a_run_of_a_month_is_believed(tmp_path: Path) -> None:
    """It has lost nothing, so it saves less often than a run without a history."""
    begin, end = "2026-10-01T00:00:00.000Z", "2026-10-29T00:00:00.000Z"
    month_s = interval_s(tmp_path, ("attempt_started", begin), ("finished", end), ("attempt_started", end))
    assert month_s == pytest.approx(interval_s(tmp_path) * (28 * 6 + 1) ** 0.5, rel=0.01)
