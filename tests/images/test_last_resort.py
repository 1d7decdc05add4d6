"""Trainings that cannot be saved within the grace period: frozen instead, restored later, and equal to others."""

from pathlib import Path

import pytest

from safepoint.jobs.model.states import JobState
from tests.images.places import assert_equal, marks
from tests.support.commands import safepoint
from tests.support.jobs_local import Place

pytestmark = pytest.mark.timeout(300)
LATE = {"freeze_as_last_resort": True, "grace_s": 8.0}


def release(output: Path) -> None:
    """Let the step end in which a rank waits."""
    (output / "go").touch()


SHAPES = [
    pytest.param({"ranks_per_node": 2}, id="one launcher with two ranks"),
    pytest.param({"num_nodes": 2}, id="two launchers as two nodes"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_that_cannot_save_is_frozen(place: Place, reference: Place, shape: dict[str, int]) -> None:
    """A rank does not end its step. After `thaw`, it does. Then the job is saved, starts again, and loses nothing."""
    place.jobs.submit(place.training("late", "--step-ms", "0", "--wait-at", "5", **shape, settings=LATE))
    place.wait_for_mark("late", 5)
    outcome = safepoint("suspend", "late", "--yes")
    assert outcome.code == 3, outcome.stderr + place.story("late")
    job = place.jobs.job("late")
    assert job.state is JobState.SUSPENDED
    assert job.image is not None
    assert f"frozen in {job.image}" in outcome.stdout
    assert safepoint("thaw", "late").code == 0, place.story("late")
    release(place.output("late"))
    assert place.complete("late").attempt == 2
    for rank in range(2):
        assert marks(place, "late", rank) == [f"train {step}" for step in range(18)]
    assert_equal(place.output("late"), reference.output("pair"), 2)
