"""Long work of some ranks while all keep in touch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from holdfast.errors import CheckpointError, HoldfastError, StorageError
from holdfast.training.peers import Peers

_MEET_EVERY_S = 20.0
_T = TypeVar("_T")


def work_apart(peers: Peers, work: Callable[[], _T]) -> tuple[list[_T | None], list[HoldfastError]]:
    """Do `work` on every rank, and hear how it went everywhere; a collective call.

    Ranks do not wait for each other for ever, and such work may take longer: so they meet while it is under way.

    Returns:
        What it returned, by rank, None where it failed; and what went wrong, damaged checkpoints first.

    Raises:
        PeerError: a rank is gone.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-apart") as thread:
        under_way = thread.submit(_try, work, peers.place.rank)
        while not all(peers.gather(_is_done_within(under_way, _MEET_EVERY_S))):
            pass
    outcomes = peers.gather(under_way.result())
    problems = [problem for _, problem in outcomes if problem is not None]
    problems.sort(key=lambda problem: not isinstance(problem, CheckpointError))
    return [value for value, _ in outcomes], problems


def _try(work: Callable[[], _T], rank: int) -> tuple[_T | None, HoldfastError | None]:
    try:
        return work(), None
    except HoldfastError as error:
        return None, error
    except OSError as error:
        return None, StorageError(f"rank {rank} cannot write its folder: {error}")


def _is_done_within(future: "Future[Any]", seconds: float) -> bool:
    wait([future], timeout=seconds)
    return future.done()


__all__ = ["work_apart"]
