"""The exit code of a node, from how its ranks ended."""

import signal
from dataclasses import replace

import pytest

from safepoint.training.outcome.rank_record import RankRecord
from safepoint.training.outcome.verdict import first_failure, reach_verdict


def _record(rank: int, code: int | None = None, *, at: float | None = None, lost_peer: bool = False) -> RankRecord:
    return RankRecord(rank=rank, pid=1, exit_code=code, ended_s=at, lost_peer=lost_peer)


@pytest.mark.parametrize(
    ("exit_codes", "records", "code"),
    [
        # All is well.
        ({0: 0, 1: 0}, [], 0),
        # A crash; torch elastic then stopped the sibling, whose last step was committed.
        ({0: 0, 1: 3}, [_record(0, 75, at=2.0), _record(1, at=1.0)], 3),
        # The same, seen in one look.
        ({0: 75, 1: 3}, [_record(0, 75, at=2.0), _record(1, at=1.0)], 3),
        # A rank was killed while both loaded a checkpoint.
        ({0: 75, 1: -9}, [_record(0, 75, at=2.0), _record(1)], 137),
        # A rank that lost a peer noticed before that peer had noted anything, or before anything else.
        ({0: 1, 1: 3}, [_record(0, at=1.0, lost_peer=True), _record(1, at=2.0)], 3),
        ({0: 1, 1: 0}, [_record(0, at=1.0, lost_peer=True), _record(1)], 1),
        # SIGTERM to one rank before the first step: it left, the other lost it.
        ({0: 143, 1: 1}, [_record(0, 143, at=1.0), _record(1, at=1.5, lost_peer=True)], 143),
        ({0: -15, 1: 1}, [_record(1, at=1.5, lost_peer=True)], 143),
        # All agreed.
        ({0: 75, 1: 75}, [_record(0, 75, at=1.0), _record(1, 75, at=1.1)], 75),
        ({0: 14, 1: 14}, [_record(0, 14, at=1.0), _record(1, 14, at=1.1)], 14),
        # The program's own codes.
        ({0: 75}, [_record(0, at=1.0)], 75),
        ({0: 200, 1: 5}, [_record(0, at=2.0), _record(1, at=1.0)], 5),
        ({}, [], 1),
    ],
)
def test_the_rank_that_ended_first_decides(exit_codes: dict[int, int], records: list[RankRecord], code: int) -> None:
    """Without a request to stop."""
    verdict = reach_verdict(exit_codes, {record.rank: record for record in records}, stop_signal=0, killed=False)
    assert verdict.exit_code == code


@pytest.mark.parametrize(
    ("codes", "stop_signal", "expected"),
    [
        ([75, 75], signal.SIGTERM, 75),
        ([75, None], signal.SIGTERM, 75),
        ([75, 13], signal.SIGTERM, 13),
        ([143, None], signal.SIGTERM, 143),
        ([None, None], signal.SIGTERM, 143),
        ([None, None], signal.SIGHUP, 143),
        ([None, None], signal.SIGINT, 130),
        ([14, 14], signal.SIGTERM, 14),
    ],
)
def test_a_node_that_was_asked_to_stop_ends_with_the_code_of_its_ranks(
    codes: list[int | None], stop_signal: int, expected: int
) -> None:
    """75 only when the checkpoint is committed and nothing about storage went wrong."""
    records = {rank: _record(rank, code, at=1.0) for rank, code in enumerate(codes)}
    verdict = reach_verdict({0: 1, 1: 1}, records, stop_signal=stop_signal, killed=False)
    assert verdict.exit_code == expected


def test_ranks_that_were_killed_are_mentioned() -> None:
    """People read that the grace period was too short."""
    assert "grace" in reach_verdict({0: -9}, {}, stop_signal=signal.SIGTERM, killed=True).message
    assert "SIGSEGV" in reach_verdict({0: -11}, {}, stop_signal=0, killed=False).message
    assert reach_verdict({0: -11}, {}, stop_signal=0, killed=False).exit_code == 139


def test_no_rank_failed() -> None:
    """Ranks that run, or ended well, are no failure."""
    assert first_failure({0: 0}, {}) is None
    assert first_failure({}, {}) is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        # All ranks have the same error, and the first one prints it.
        ([_record(0, 14, at=1.1), _record(1, 14, at=1.0)], ""),
        # The first rank lost the connection to the other.
        ([_record(0, at=1.1), _record(1, 14, at=1.0)], "rank 1 ended first: why"),
        # Every rank prints that an argument is invalid; a stop needs no reason.
        ([_record(0, at=1.1), _record(1, 2, at=1.0)], ""),
        ([_record(0, at=1.1), _record(1, 75, at=1.0)], ""),
    ],
)
def test_the_reason_of_a_rank_that_prints_nothing(records: list[RankRecord], message: str) -> None:
    """Otherwise the output would only have the errors that followed from it."""
    found = {record.rank: replace(record, message="why") for record in records}
    codes = {rank: record.exit_code or 1 for rank, record in found.items()}
    assert reach_verdict(codes, found, stop_signal=0, killed=False).message == message


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "stopped by SIGINT while the ranks imported their packages; nothing was saved"),
        ([_record(1, 143)], "stopped by SIGINT while the ranks imported their packages; nothing was saved"),
        ([_record(0, 143)], ""),
        ([_record(0)], ""),
    ],
)
def test_a_stop_before_the_first_rank_could_report_it_is_reported(records: list[RankRecord], message: str) -> None:
    """The signal has ended a process that had not begun to handle signals, so no rank has printed anything."""
    known = {record.rank: record for record in records}
    verdict = reach_verdict({0: -15, 1: 143}, known, stop_signal=signal.SIGINT, killed=False)
    assert verdict.message == message
