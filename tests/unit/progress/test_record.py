"""The record of progress: its arithmetic, its JSON form, and what is not one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.progress.record import (
    Progress,
    SaveStatistics,
    SpaceRecord,
    State,
    read_progress,
    read_space,
    state_after,
)

TIME = "2026-03-01T12:00:00.000Z"
FULL = Progress(
    time=TIME,
    state=State.SAVING,
    step=120,
    max_steps=500,
    epoch=1.25,
    num_epochs=3.0,
    loss=0.5,
    train_metrics={"grad_norm": 1.5, "reward": None},
    eval_metrics={"eval_loss": 0.75},
    step_s=0.5,
    pause_s=0.25,
    samples_per_step=64,
    world_size=8,
    run_id="a" * 32,
    attempt=2,
    restart=1,
    started=TIME,
    resumed_step=100,
    output_dir="/out",
    location="s3://bucket/run",
    safe_step=100,
    safe_time=TIME,
    snapshot_step=119,
    saves=SaveStatistics(
        count=3,
        unsaved=1,
        last_stall_s=0.25,
        mean_stall_s=0.5,
        last_durable_s=4.0,
        last_bytes=10**9,
        expected_s=4.0,
        is_measured=True,
    ),
    space=(
        SpaceRecord(
            place="output folder",
            path="/out",
            limit="inodes",
            free_bytes=10**10,
            needed_bytes=10**9,
            free_inodes=30,
            needed_inodes=25,
            saves_left=0,
            remaining_s=60.0,
            num_deletable=2,
            is_low=True,
            size_bytes=10**11,
        ),
    ),
    grace_s=30.0,
    message="why",
)


def test_the_arithmetic() -> None:
    """Percent, time left, throughput, and how long a save on demand takes."""
    assert FULL.percent == 24.0
    assert FULL.remaining_s == pytest.approx(380 * 0.75)
    assert FULL.steps_per_s == pytest.approx(2.0)
    assert FULL.samples_per_s == pytest.approx(128.0)
    assert FULL.save_needed_s == pytest.approx(4.5)


def test_what_nobody_knows_is_none() -> None:
    """No total, no pace, no size: no figures that look like knowledge. At step 0 nothing is done of whatever is."""
    unknown = Progress(time=TIME, state=State.TRAINING, step=7)
    assert (unknown.percent, unknown.remaining_s, unknown.samples_per_s, unknown.save_needed_s) == (None,) * 4
    assert Progress(time=TIME, state=State.STARTING).percent == 0.0


@pytest.mark.parametrize("state", State)
def test_only_a_finished_training_is_at_100(state: State) -> None:
    """Also when it was interrupted behind its last step."""
    last = Progress(time=TIME, state=state, step=500, max_steps=500, step_s=1.0)
    assert last.percent is not None
    assert (last.percent == 100.0) == (state is State.FINISHED)
    early = Progress(time=TIME, state=state, step=400, max_steps=500, step_s=1.0)
    assert early.percent == 80.0
    assert early.remaining_s == (0.0 if state is State.FINISHED else 100.0)


def test_a_training_that_stopped_early() -> None:
    """It stays where it stopped, and says so; not if all epochs are done, whatever number of steps was expected."""
    early = Progress(time=TIME, state=State.FINISHED, step=50, max_steps=100, epoch=1.0, num_epochs=2.0)
    assert (early.percent, early.remaining_s) == (50.0, 0.0)
    assert early.early_end == "training stopped early, at step 50 of 100"
    for whole in (
        replace(early, step=100),
        replace(early, epoch=2.0),
        replace(early, max_steps=0),
        replace(early, step=0),
    ):
        assert (whole.early_end, whole.percent) == ("", 100.0)
    assert replace(early, state=State.INTERRUPTED).early_end == ""


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_percent_never_falls_with_a_step(step: int, max_steps: int) -> None:
    """And it stays in its bounds."""
    now, then = (
        Progress(time=TIME, state=State.TRAINING, step=n, max_steps=max_steps).percent for n in (step, step + 1)
    )
    assert now is not None
    assert then is not None
    assert 0 <= now <= then <= 99.9


def test_the_record_survives_json() -> None:
    """Everything arrives; the names that readers know are at the top."""
    assert Progress.from_bytes(FULL.to_bytes()) == FULL
    record = json.loads(FULL.to_bytes())
    assert record["version"] == 1
    assert {name: record[name] for name in ("step", "max_steps", "epoch", "loss", "time")} == {
        "step": 120,
        "max_steps": 500,
        "epoch": 1.25,
        "loss": 0.5,
        "time": TIME,
    }
    assert (record["percent"], record["remaining_s"], record["save_needed_s"]) == (24.0, 285.0, 4.5)


def test_earlier_and_later_releases_are_read() -> None:
    """What the first release wrote, and what later ones add."""
    old = Progress.from_bytes(b'{"time": "t", "step": 3, "max_steps": 9, "epoch": 0.5, "loss": null}')
    assert (old.step, old.max_steps, old.loss, old.state) == (3, 9, None, State.TRAINING)
    later = json.loads(FULL.to_bytes()) | {"new": [1], "state": "resting"}
    later["saves"]["new"] = 1
    read = Progress.from_bytes(json.dumps(later).encode())
    assert (read.step, read.saves, read.state) == (120, FULL.saves, State.TRAINING)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "[" * 100_000,
        '{"step": "3"}',
        '{"step": -1}',
        '{"step": 1.5}',
        '{"step": true}',
        '{"epoch": NaN}',
        '{"grace_s": 1e999}',
        '{"time": 3}',
        '{"train_metrics": [1]}',
        '{"train_metrics": {"loss": "low"}}',
        '{"saves": 3}',
        '{"saves": {"count": "many"}}',
        '{"output_dir": ["/"]}',
    ],
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    """With a reason that names the field; a reader of the file gets none."""
    with pytest.raises(ValueError):
        Progress.from_bytes(text.encode())
    path = tmp_path / "progress.json"
    path.write_text(text)
    assert read_progress(path) is None
    assert read_progress(tmp_path / "missing") is None


def test_a_number_that_is_none_is_read_as_such() -> None:
    """Other writers of JSON put NaN there."""
    record: dict[str, Any] = json.loads(FULL.to_bytes())
    text = json.dumps(record | {"loss": float("nan"), "train_metrics": {"x": float("inf")}})
    read = Progress.from_bytes(text.encode())
    assert read.loss is None
    assert read.train_metrics == {"x": None}


def test_the_state_after_an_exit_code() -> None:
    """As docs/exit-codes.md has them."""
    assert [state_after(code) for code in (0, 75, 143, 130, 1, 14, 137)] == [
        State.FINISHED,
        *[State.INTERRUPTED] * 3,
        *[State.FAILED] * 3,
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"space": 3}', '{"space": [3]}', '{"space": [{"free_bytes": -1}]}', "{}"]
)
def test_a_record_of_folders_that_is_none(text: str, tmp_path: Path) -> None:
    """It is as if there were no record; the progress does not depend on it."""
    path = tmp_path / "space.json"
    assert read_space(path) == ()
    path.write_text(text)
    assert read_space(path) == ()
