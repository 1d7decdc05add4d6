"""What the checkpoints of a run occupy, and how much further saves will add."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local import usage
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import Candidate, parse_policies
from safepoint.checkpoint.local.usage import Growth, Usage, UsageReader, growth_of
from safepoint.foundation.volumes.occupied import occupied
from tests.support.checkpoints import commit, prepared, written


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = prepared(tmp_path / "out")
    for step in (10, 20, 30):
        commit(output, step)
    return output


def test_the_usage_of_a_run(output: OutputFolder) -> None:
    """Unfinished saves count; other runs, other programs and damaged manifests do not."""
    reader = UsageReader(output, "run", ())
    before = reader.read()
    assert [candidate.step for candidate in before.checkpoints] == [30, 20, 10]
    assert before.steps_between == 10
    assert before.newest is not None
    assert before.newest.num_bytes == occupied(output.root / "checkpoint-30").num_bytes
    written(output, 40)
    (output.root / "checkpoint-50").mkdir()
    assert reader.read().total.num_bytes > before.total.num_bytes
    path = output.root / "checkpoint-10"
    (path / MANIFEST_NAME).write_bytes(replace(read_manifest(path), run_id="another").to_bytes())
    (output.root / "checkpoint-20" / MANIFEST_NAME).write_bytes(b"nonsense")
    assert [candidate.step for candidate in reader.read().checkpoints] == [30]


def test_each_checkpoint_is_read_once(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its manifest changes."""
    read: list[str] = []
    real = usage.read_manifest_of_any
    monkeypatch.setattr(usage, "read_manifest_of_any", lambda path: read.append(path.name) or real(path))
    reader = UsageReader(output, "run", ())
    for _ in range(3):
        reader.read()
    assert sorted(read) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    os.utime(output.root / "checkpoint-20" / MANIFEST_NAME)
    reader.read()
    assert len(read) == 4


def test_files_with_a_second_name_count_for_the_next_save(output: OutputFolder, tmp_path: Path) -> None:
    """Their deletion frees nothing, but the next save writes as much."""
    for path in (output.root / "checkpoint-30").rglob("*"):
        if path.is_file():
            os.link(path, tmp_path / path.name)
    newest = UsageReader(output, "run", ()).read().newest
    assert newest is not None
    assert newest.num_bytes >= read_manifest(output.root / "checkpoint-30").size_bytes


def used(*steps: int) -> Usage:
    return Usage(checkpoints=tuple(Candidate(step=step) for step in steps))


@pytest.mark.parametrize(
    ("keep", "found", "expected"),
    [
        (None, used(10), Growth(saves_until_limit=None, share_later=1.0)),
        ("younger=1h", used(10), Growth(saves_until_limit=None, share_later=1.0)),
        ("newest=3", used(), Growth(saves_until_limit=3)),
        ("newest=3", used(20, 10), Growth(saves_until_limit=1)),
        ("newest=3", used(50, 40, 30, 20, 10), Growth(saves_until_limit=0)),
        ("newest=3,best=2:eval_loss", used(20, 10), Growth(saves_until_limit=3)),
        ("newest=2,every=100", used(20, 10), Growth(saves_until_limit=0, share_later=0.1)),
        ("every=100", used(10), Growth(saves_until_limit=0, share_later=1.0)),
        ("newest=2,younger=10m", used(20, 10), Growth(saves_until_limit=10)),
    ],
)
def test_how_the_number_grows(keep: str | None, found: Usage, expected: Growth) -> None:
    """With a save every minute."""
    assert growth_of(found, parse_policies(keep), 60.0) == expected


def test_what_thinning_may_delete() -> None:
    assert used(50, 40, 30, 20, 10).num_deletable(parse_policies("newest=5,every=20")) == 2
    assert used(50, 40).num_deletable(()) == 0
