"""Retention: pure, composable, and it never bites."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import (
    Candidate,
    CheckpointFolder,
    KeepBest,
    KeepEvery,
    KeepNewest,
    KeepYounger,
    Policy,
    parse_policies,
    prune,
    select_superseded,
)
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.foundation import files
from safepoint.foundation.events.run_events import Pruned, PruneFailed
from safepoint.foundation.events.stream import Event
from safepoint.foundation.shared_folders.leases import reading
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

NOW_S = 1000.0
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        step=st.integers(0, 50),
        created_s=st.floats(0, NOW_S) | st.just(float("inf")),
        metrics=st.dictionaries(st.sampled_from(["eval_loss", "eval_accuracy"]), st.floats(-5, 5)),
        is_valid=st.booleans(),
        is_in_use=st.booleans(),
    ),
    unique_by=lambda candidate: candidate.step,
    max_size=12,
)
POLICIES = st.lists(
    st.builds(KeepNewest, st.integers(1, 4))
    | st.builds(KeepEvery, st.integers(1, 10))
    | st.builds(KeepBest, st.integers(1, 3), st.just("eval_loss"), st.booleans())
    | st.builds(KeepYounger, st.floats(0, NOW_S)),
    max_size=4,
)


def kept(candidates: Sequence[Candidate], *policies: Policy, protected: Sequence[int] = ()) -> list[int]:
    gone = select_superseded(candidates, policies, now_s=NOW_S, protected=protected)
    return sorted({candidate.step for candidate in candidates} - set(gone))


def numbered(*steps: int) -> list[Candidate]:
    return [Candidate(step=step) for step in steps]


@given(candidates=CANDIDATES, policies=POLICIES, protected=st.sets(st.integers(0, 50), max_size=3))
def test_what_must_stay_stays(candidates: list[Candidate], policies: list[Policy], protected: set[int]) -> None:
    """The newest, the newest valid, what is in use and what is protected, whatever the policies."""
    gone = set(select_superseded(candidates, policies, now_s=NOW_S, protected=sorted(protected)))
    steps = {candidate.step for candidate in candidates}
    assert gone <= steps - protected
    assert not steps or max(steps) not in gone
    valid = {candidate.step for candidate in candidates if candidate.is_valid}
    assert not valid or max(valid) not in gone
    assert not gone & {candidate.step for candidate in candidates if candidate.is_in_use}


@given(candidates=CANDIDATES, policies=POLICIES, more=POLICIES)
def test_another_policy_never_deletes_more(
    candidates: list[Candidate], policies: list[Policy], more: list[Policy]
) -> None:
    """Once there is a limit, what is added to it only keeps."""
    if any(policy.is_limit for policy in policies):
        assert set(kept(candidates, *policies)) <= set(kept(candidates, *policies, *more))


@given(steps=st.lists(st.integers(0, 1000), unique=True, max_size=20), count=st.integers(1, 5), data=st.data())
def test_the_newest_are_counted_as_the_trainer_counts(steps: list[int], count: int, data: st.DataObject) -> None:
    """At most the limit remains, except for what is protected."""
    protected = data.draw(st.lists(st.sampled_from(steps), max_size=3)) if steps else []
    left = kept(numbered(*steps), KeepNewest(count), protected=protected)
    assert len(left) <= max(count, len({*protected, *sorted(steps)[-1:]}))
    assert len(left) >= min(count, len(steps))


def test_each_policy_alone() -> None:
    """What each keeps of the same checkpoints."""
    losses = {10: 0.5, 20: 0.3, 30: 0.4, 40: 0.3}
    measured = [
        Candidate(step=step, metrics={"eval_loss": loss}, created_s=10 * step) for step, loss in losses.items()
    ]
    measured.append(Candidate(step=50, created_s=990))
    assert kept(measured, KeepNewest(2)) == [40, 50]
    assert kept(measured, KeepEvery(20)) == [20, 40, 50]
    assert kept(measured, KeepBest(1, "eval_loss")) == [40, 50], "of equals the newer"
    assert kept(measured, KeepBest(2, "eval_loss")) == [20, 40, 50]
    assert kept(measured, KeepBest(1, "eval_loss", larger_is_better=True)) == [10, 50]
    assert kept(measured, KeepBest(2, "unknown")) == [50]
    assert kept(measured, KeepNewest(1), KeepEvery(30)) == [30, 50]
    assert kept(measured, KeepNewest(1), KeepYounger(650)) == [40, 50]


def test_damaged_ones_do_not_take_the_place_of_valid_ones() -> None:
    """And they stay: they are evidence, and may hold parts that can be saved."""
    candidates = [Candidate(step=step, is_valid=step in {10, 20, 30}) for step in (10, 20, 30, 40, 50)]
    assert kept(candidates, KeepNewest(2)) == [20, 30, 40, 50]


def test_age_alone_deletes_nothing() -> None:
    """However old all of them are."""
    assert kept([Candidate(step=step, created_s=0) for step in (1, 2)], KeepYounger(1)) == [1, 2]
    assert kept(numbered(1, 2)) == [1, 2]


def test_policies_are_read() -> None:
    """In any order, with spaces, and none."""
    assert parse_policies("newest=2, every=1000,best=3:eval_loss,best=1:eval_acc:max,younger=1.5h") == (
        KeepNewest(2),
        KeepEvery(1000),
        KeepBest(3, "eval_loss"),
        KeepBest(1, "eval_acc", larger_is_better=True),
        KeepYounger(5400),
    )
    assert parse_policies(None) == parse_policies("") == ()


@pytest.mark.parametrize(
    "text",
    ["newest", "newest=0", "newest=x", "every=-1", "best=2", "best=2:loss:up", "younger=3", "younger=3w", "oldest=2"],
)
def test_what_cannot_be_meant_is_named(text: str) -> None:
    """With the forms that can."""
    with pytest.raises(ValueError, match="newest=N, every=STEPS") as error:
        parse_policies(f"newest=1,{text}")
    assert repr(text) in str(error.value)


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = prepared(tmp_path / "out")
    for step in (10, 20, 30, 40):
        commit(output, step)
    return output


@pytest.mark.parametrize("is_store", [False, True])
def test_what_no_policy_keeps_is_deleted_and_reported(output: OutputFolder, is_store: bool) -> None:
    """Protected steps stay; each deletion is one event, with its place."""
    remote = RemoteFolder(FaultyStore(output.root))
    remote.note_commit(40)
    folder: CheckpointFolder = remote if is_store else output
    events: list[Event] = []
    prune(folder, [KeepNewest(2)], events.append, protected=[20])
    assert folder.steps() == [40, 20]
    assert [(event.step, event.path) for event in events if isinstance(event, Pruned)] == [
        (step, folder.where(f"checkpoint-{step}")) for step in (10, 30)
    ]
    assert len(events) == 2


def test_a_disk_that_refuses_is_reported(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception; the next call tries again, and skips what a process is reading."""
    events: list[Event] = []

    def refuse(path: Path, *, trash: Path) -> None:
        raise OSError("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(files, "discard", refuse)
        prune(output, [KeepNewest(2)], events.append)
    assert [event.step for event in events if isinstance(event, PruneFailed)] == [10, 20]
    assert output.steps() == [40, 30, 20, 10]
    with reading(output.root / "checkpoint-10" / MANIFEST_NAME):
        prune(output, [KeepNewest(2)], events.append)
    assert output.steps() == [40, 30, 10]


def test_a_disk_that_fails_altogether_is_reported(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception either when the folder cannot be listed: it would end one rank while the others wait for it."""
    events: list[Event] = []

    def fail(*_: object) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "manifests", fail)
        prune(output, [KeepNewest(2)], events.append)
    assert [event.step for event in events if isinstance(event, PruneFailed)] == [None]
    assert output.steps() == [40, 30, 20, 10]
