"""A checkpoint in which the files of two ranks contradict each other about the work that is due.

One rank would begin an evaluation, or end the training, and the others would train on: the ranks would wait for each
other until a time limit, in each start, and no message would name the checkpoint.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState
from tests.support.ranks import ThreadPeers, run_ranks

_LOSS = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)
_STATE = RankState(loss=_LOSS, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0)


def check(*states: RankState | None) -> list[Any]:
    def one(peers: ThreadPeers) -> None:
        resume = object.__new__(TrainerResume)
        resume._point = SimpleNamespace(path=Path("checkpoint-2"))  # pyright: ignore
        resume._state = states[peers.place.rank]
        resume.check_ranks(peers)  # pyright: ignore

    return run_ranks(len(states), one)


@pytest.mark.parametrize(
    "other",
    [
        *(replace(_STATE, pending=DeferredWork(**{name: True})) for name in ("evaluate", "save", "epoch_end")),
        replace(_STATE, pending=DeferredWork(complete=True)),
        replace(_STATE, asked_accumulation=7), replace(_STATE, is_irregular=True), None,
    ],
)  # fmt: skip
def test_they_contradict_each_other(other: RankState | None) -> None:
    """All ranks end with the same error."""
    found = check(_STATE, other, _STATE)
    assert [type(one) for one in found] == [CheckpointError] * 3
    assert all("checkpoint-2 was not loaded" in str(one) for one in found)


def test_they_may_differ_in_all_else() -> None:
    work = DeferredWork(evaluate=True, grad_norm=1.5, learning_rate=0.1)
    states = [
        replace(
            _STATE, pending=replace(work, grad_norm=number), elapsed_s=number, loss=replace(_LOSS, since_log=number)
        )
        for number in (1.0, 2.0)
    ]
    assert check(*states) == [None, None]
    assert check(None, None) == [None, None]
