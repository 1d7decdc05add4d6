"""Collective calls that do work on every rank, or only on the first rank. An error on one rank is raised on all."""

from collections.abc import Callable
from typing import TypeVar, cast

from safepoint.errors import CheckpointError, SafepointError, StorageError
from safepoint.foundation.bounded import Work
from safepoint.training.collective.peers import Peers

_EXCHANGE_EVERY_S = 20.0
_T = TypeVar("_T")


def on_all_ranks(peers: Peers, work: Callable[[], _T]) -> list[_T]:
    """Do a short piece of work on every rank; a collective call.

    Returns:
        What the work returned on each rank, in the order of the ranks.

    Raises:
        SafepointError: the work failed on a rank. Every rank raises the same error. If the work failed on several
            ranks, the first `CheckpointError` in the order of the ranks is raised. If there is no `CheckpointError`,
            the first error is raised.
    """
    return _results(peers.gather(_result_or_error(work, peers.place.rank)))


def long_on_all_ranks(peers: Peers, work: Callable[[], _T]) -> list[_T]:
    """Like `on_all_ranks`, for work that may take longer than the ranks' timeout.

    The work runs on a thread of its own. Until all ranks have finished, the ranks exchange a value every 20 s. So no
    rank waits for another rank longer than the timeout.

    Raises:
        SafepointError: as for `on_all_ranks`.
        PeerError: a rank has ended or does not answer. Then this rank ends too, so the call does not wait for the
            thread.
    """
    running = Work(lambda: _result_or_error(work, peers.place.rank))
    while not all(peers.gather(running.is_done(_EXCHANGE_EVERY_S))):
        pass
    return _results(peers.gather(cast("_T | SafepointError", running.result(0.0))))


def on_first_rank(peers: Peers, work: Callable[[], _T]) -> _T:
    """Do a short piece of work on the first rank; a collective call.

    Returns:
        What the work returned on the first rank; every rank returns the same value.

    Raises:
        SafepointError: the error of the work, on every rank.
    """
    outcome = peers.from_first(_result_or_error(work, 0) if peers.place.is_first else None)
    if isinstance(outcome, SafepointError):
        raise outcome
    return outcome  # pyright: ignore[reportReturnType]


def _result_or_error(work: Callable[[], _T], rank: int) -> _T | SafepointError:
    try:
        return work()
    except SafepointError as error:
        return error
    except OSError as error:
        return StorageError(f"rank {rank} cannot use its output folder: {error}; the run ends")


def _results(outcomes: list[_T | SafepointError]) -> list[_T]:
    errors = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, SafepointError)]
    if errors:
        rank, error = min(errors, key=lambda pair: not isinstance(pair[1], CheckpointError))
        raise error if rank == 0 else error.with_message(f"{error.message} (on rank {rank})", hint=error.hint)
    return outcomes  # pyright: ignore[reportReturnType]
