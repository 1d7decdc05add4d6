"""Compares jobs that were frozen with jobs that were not."""

from pathlib import Path

from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from tests.support.equality import finals, same
from tests.support.jobs_local import Place


def states(name: str) -> list[str]:
    """The states of the job, in order."""
    names = {str(state).lower() for state in JobState}
    with History() as history:
        return [event.name for event in history.events(name) if event.name in names]


def assert_equal(output: Path, reference: Path, num_ranks: int) -> None:
    ours, theirs = finals(output, num_ranks), finals(reference, num_ranks)
    for rank in range(num_ranks):
        assert same(ours[rank], theirs[rank]), f"rank {rank} differs"


def marks(place: Place, name: str, rank: int = 0) -> list[str]:
    return (place.output(name) / f"marks-{rank}").read_text().splitlines()
