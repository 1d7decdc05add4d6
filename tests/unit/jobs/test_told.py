"""What a job's ranks have told, read from their events."""

import json
from pathlib import Path

import pytest

from holdfast.jobs.told import EVENTS, missing_in

_BEGUN, _SAVED, _ARRIVED = ({"event": name} for name in ("attempt_started", "saved", "uploaded"))
_MISSING = {"event": "upload_unfinished", "location": "s3://bucket/run"}


@pytest.mark.parametrize(
    ("told", "location"),
    [
        ([], ""),
        ([_BEGUN, _SAVED, _ARRIVED], ""),
        ([_BEGUN, _SAVED, _MISSING], "s3://bucket/run"),
        ([_BEGUN, _SAVED, _MISSING, _BEGUN, _SAVED, _ARRIVED], ""),
        ([_BEGUN, _ARRIVED, _SAVED, {"event": "upload_unfinished"}], "the object store"),
    ],
)
def test_what_did_not_arrive(told: list[dict[str, str]], location: str, tmp_path: Path) -> None:
    """Of the last attempt only."""
    (tmp_path / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in told))
    assert missing_in(tmp_path) == location
