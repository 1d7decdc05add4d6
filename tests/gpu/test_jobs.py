"""Jobs whose ranks share a device: frozen in the middle of a step, thawed, and equal to an undisturbed job."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.transparent.criu.program import VARIABLE
from tests.images.places import assert_equal, marks
from tests.support.commands import safepoint
from tests.support.criu import environment, unavailable
from tests.support.jobs_local import Place, jobs_in

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if reason := unavailable():
        pytest.skip(reason)
    criu = environment().get(VARIABLE)
    with jobs_in(tmp_path) as place:
        if criu is not None:
            os.environ[VARIABLE] = criu
        yield place


def _two_ranks(place: Place, name: str, *arguments: str, is_copied: bool) -> JobSpec:
    """Over gloo, since NCCL refuses to share a device. Snapshots are on, so that the ranks have pinned memory."""
    return place.training(
        name,
        *("--device", "cuda", "--save-steps", "2", *arguments),
        ranks_per_node=2,
        settings={"preload": is_copied},
        env={"CUDA_VISIBLE_DEVICES": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )


@pytest.mark.parametrize("is_copied", [False, True], ids=["new processes", "copied from a template"])
def test_a_job_goes_on_in_the_middle_of_a_step(place: Place, *, is_copied: bool) -> None:
    """DDP, frozen twice. Each step begins once: nothing is repeated. The results are equal, bit for bit."""
    place.jobs.submit(_two_ranks(place, "reference", "--step-ms", "0", is_copied=is_copied))
    place.complete("reference")
    place.jobs.submit(_two_ranks(place, "frozen", "--step-ms", "500", is_copied=is_copied))
    for step in (3, 8):
        place.wait_for_mark("frozen", step)
        outcome = safepoint("freeze", "frozen", "--json")
        assert outcome.code == 0, outcome.stderr + place.story("frozen")
        print("FIGURES frozen:", outcome.document)
        assert place.jobs.job("frozen").state is JobState.SUSPENDED
        assert len(marks(place, "frozen")) < 18
        outcome = safepoint("thaw", "frozen", "--json")
        assert outcome.code == 0, outcome.stderr + place.story("frozen")
    assert place.complete("frozen").attempt == 1
    for rank in range(2):
        assert marks(place, "frozen", rank) == [f"train {step}" for step in range(18)]
    assert_equal(place.output("frozen"), place.output("reference"), 2)
