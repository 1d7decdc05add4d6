"""What a job's ranks have reported, read from their events."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.local.attempt.rank_reports import EVENTS, step_not_stored


def _saved(step: int) -> dict[str, Any]:
    return {"event": "saved", "step": step}


def _uploaded(step: int, name: str | None = None) -> dict[str, Any]:
    return {"event": "uploaded", "step": step, "location": f"s3://bucket/{name or f'checkpoint-{step}'}"}


@pytest.mark.parametrize(
    ("reported", "step"),
    [
        ([], None),
        ([_saved(4), _uploaded(4)], None),
        ([_saved(4), _uploaded(4), _saved(8)], 8),
        ([_saved(8), {"event": "interrupted", "step": 9, "saved": True}, _uploaded(8)], 9),
        ([_saved(8), _uploaded(8), {"event": "upload_unfinished"}], None),
        ([_saved(8), _uploaded(8, "final")], 8),
        ([_saved(8), {"event": "attempt_started"}, {"event": "resumed", "step": 8}], 8),
        ([{"event": "resumed", "step": 8}], None),
        ([_saved(8), {"event": "set_aside"}, _saved(2), _uploaded(2)], None),
    ],
)
def test_what_did_not_arrive(reported: list[dict[str, Any]], step: int | None, tmp_path: Path) -> None:
    """Over all attempts: what one has left behind, the next may bring."""
    (tmp_path / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in reported))
    assert step_not_stored(tmp_path) == step
