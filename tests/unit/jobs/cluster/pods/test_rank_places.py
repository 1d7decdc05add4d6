"""Tests of safepoint.jobs.cluster.pods.rank_places."""

from typing import Any

import pytest

from safepoint.errors import NotFoundError, UsageError
from safepoint.jobs.cluster.pods.rank_places import place_of_rank

IN_POD = {"spec": {"containers": [{"name": "node", "env": [{"name": "PET_NPROC_PER_NODE", "value": "4"}]}]}}


def place(rank: int, *pods: Any, in_job: Any = None, recorded: int | None = None, num_nodes: int = 2) -> int:
    job = {"spec": {"trainer": {"numProcPerNode": in_job}}}
    return place_of_rank(rank, job, pods, num_nodes=num_nodes, recorded=recorded)


def test_a_rank_runs_on_a_node() -> None:
    assert [place(rank, in_job=2) for rank in range(4)] == [0, 0, 1, 1]
    assert (place(1, recorded=1), place(5, IN_POD, in_job="auto"), place(7, num_nodes=1)) == (1, 1, 0)


def test_a_rank_that_does_not_exist_or_cannot_be_found() -> None:
    with pytest.raises(NotFoundError, match="there is no rank 4: the job has 4 ranks"):
        place(4, in_job=2)
    with pytest.raises(UsageError, match="not known how many ranks each pod has"):
        place(1, in_job="auto")
