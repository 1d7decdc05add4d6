"""What a job's ranks have reported, read from their events."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.local.attempt.rank_reports import EVENTS, newest_step


def _saved(step: int) -> dict[str, Any]:
    return {"event": "saved", "step": step}


def _uploaded(step: int, name: str | None = None) -> dict[str, Any]:
    return {"event": "uploaded", "step": step, "location": f"s3://bucket/{name or f'checkpoint-{step}'}"}


@pytest.mark.parametrize(
    ("reported", "newest"),
    [
        ([], (None, False)),
        ([_saved(4), _uploaded(4)], (4, False)),
        ([_saved(4), _uploaded(4), _saved(8)], (8, True)),
        ([_saved(8), {"event": "interrupted", "step": 9, "saved": True}, _uploaded(8)], (9, True)),
        ([_saved(8), _uploaded(8), {"event": "upload_unfinished"}], (8, False)),
        ([_saved(8), _uploaded(8, "final")], (8, True)),
        ([_saved(8), {"event": "attempt_started"}, {"event": "resumed", "step": 8}], (8, True)),
        ([{"event": "resumed", "step": 8}], (8, False)),
        ([_saved(8), {"event": "set_aside"}, _saved(2), _uploaded(2)], (2, False)),
        ([_saved(8), {"event": "set_aside"}], (None, False)),
    ],
)
def test_the_newest_step_and_whether_it_was_uploaded(
    reported: list[dict[str, Any]], newest: tuple[int | None, bool], tmp_path: Path
) -> None:
    """Over all attempts: a later one may upload what an earlier one has saved."""
    (tmp_path / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in reported))
    assert newest_step(tmp_path) == newest
