"""Work that ranks do apart and answer for together: what goes wrong anywhere is heard everywhere."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from safepoint.errors import CheckpointError, SafepointError, StorageError
from safepoint.training.collective.peers import Peers

_MEET_EVERY_S = 20.0
_T = TypeVar("_T")


def agree(peers: Peers, work: Callable[[], _T]) -> list[_T]:
    """Do a short piece of work on every rank; a collective call.

    Returns:
        What it returned, by rank.

    Raises:
        SafepointError: whatever refused it anywhere, the same on every rank.
    """
    outcomes = peers.gather(attempt(work, peers.place.rank))
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, SafepointError):
            raise outcome if rank == 0 else type(outcome)(f"{outcome.message} (on rank {rank})", hint=outcome.hint)
    return outcomes  # pyright: ignore[reportReturnType]


def attempt(work: Callable[[], _T], rank: int) -> _T | SafepointError:
    """What `work` returns, or why it could not."""
    try:
        return work()
    except SafepointError as error:
        return error
    except OSError as error:
        return StorageError(f"rank {rank} cannot use its output folder: {error}; training was not started")


def work_apart(peers: Peers, work: Callable[[], _T]) -> list[_T]:
    """The same for work that may take longer than ranks wait for each other: so they meet while it is under way.

    Raises:
        SafepointError: what went wrong anywhere, a damaged checkpoint first; the same on every rank.
        PeerError: a rank is gone; the work is left to itself, because this rank ends.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="safepoint-apart")
    try:
        under_way = thread.submit(attempt, work, peers.place.rank)
        while not all(peers.gather(_is_done_within(under_way, _MEET_EVERY_S))):
            pass
        outcomes = peers.gather(under_way.result())
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, SafepointError)]
    if problems:
        raise min(problems, key=lambda problem: not isinstance(problem, CheckpointError))
    return outcomes  # pyright: ignore[reportReturnType]


def _is_done_within(future: "Future[Any]", seconds: float) -> bool:
    wait([future], timeout=seconds)
    return future.done()
