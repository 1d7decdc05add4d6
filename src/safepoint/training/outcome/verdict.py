"""Decides the exit code of a node from how its ranks ended.

When one rank ends, the other ranks end too: ranks that wait for it fail, and torch elastic sends SIGTERM to the rest.
For this reason, the rank that ended first determines the exit code of the node. After a stop request, the exit codes
in the ranks' records determine it instead.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.errors import ExitCode
from safepoint.training.outcome.rank_record import RankRecord

_REFUSALS = (ExitCode.NOTHING_VALID, ExitCode.CONFLICT, ExitCode.STORAGE, ExitCode.USAGE, ExitCode.FAILED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the node ended.

    Args:
        exit_code: the exit code of the launcher's process.
        message: the reason, in one sentence; empty when Safepoint or the program has already reported the reason.
    """

    exit_code: int
    message: str = ""


def first_failure(exit_codes: Mapping[int, int], records: Mapping[int, RankRecord]) -> int | None:
    """The rank whose end made the other ranks end, or None when no rank failed.

    Args:
        exit_codes: rank → exit code, negative for a signal; 0 for ranks that were still running.
        records: the ranks' records. If the record of a rank has no end, the rank was killed, and is treated as the
            first rank that ended. A rank that lost a peer is treated as the last rank that ended.
    """

    def order(rank: int) -> tuple[bool, float, int]:
        record = records.get(rank)
        if record is None or record.ended_s is None:
            return False, float("-inf"), rank
        return record.lost_peer, record.ended_s, rank

    return min((rank for rank, code in exit_codes.items() if code), key=order, default=None)


def reach_verdict(
    exit_codes: Mapping[int, int], records: Mapping[int, RankRecord], *, stop_signal: int, killed: bool
) -> Verdict:
    """Decide the exit code of the node.

    Args:
        exit_codes: see `first_failure`.
        records: see `first_failure`.
        stop_signal: the signal that stopped this node, or 0.
        killed: whether the launcher killed ranks that still ran near the end of the grace period.
    """
    if exit_codes and not any(exit_codes.values()):
        return Verdict(ExitCode.OK)
    if stop_signal:
        return _after_stop(exit_codes, records, stop_signal, killed=killed)
    rank = first_failure(exit_codes, records)
    if rank is None:
        return Verdict(ExitCode.FAILED, "no rank was started")
    return _of_rank(rank, exit_codes[rank], records)


def _of_rank(rank: int, code: int, records: Mapping[int, RankRecord]) -> Verdict:
    record = records.get(rank)
    if record is not None and record.exit_code is not None:
        return Verdict(record.exit_code, _unprinted(record, records))
    if code in {ExitCode.TERMINATED_UNSAVED, -signal.SIGTERM}:
        return Verdict(ExitCode.TERMINATED_UNSAVED)
    return Verdict(128 - code if code < 0 else code, describe_end(rank, code, record))


def _unprinted(record: RankRecord, records: Mapping[int, RankRecord]) -> str:
    """Why Safepoint has ended a rank; empty if the reason was printed.

    Usually all ranks end with the same error, and only the first rank of a node prints the error. The error was not
    printed if the first rank has ended for another reason, such as a lost connection to this rank.
    """
    first = records[min(records)]
    if record.exit_code not in _REFUSALS or record.exit_code == ExitCode.USAGE or first.exit_code is not None:
        return ""
    return f"rank {record.rank} ended first: {record.message}"


def describe_end(rank: int, code: int, record: RankRecord | None) -> str:
    """How a rank ended, as the beginning of a sentence."""
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    if record is not None and record.lost_peer:
        return f"rank {rank} lost the connection to a rank on another node; see that node's output"
    return f"rank {rank} exited with code {code}; its own output has the reason"


def _after_stop(
    exit_codes: Mapping[int, int], records: Mapping[int, RankRecord], stop_signal: int, *, killed: bool
) -> Verdict:
    verdicts = {record.exit_code for record in records.values()}
    if ExitCode.INTERRUPTED_SAVED in verdicts and ExitCode.STORAGE not in verdicts:
        return Verdict(ExitCode.INTERRUPTED_SAVED)
    for code in _REFUSALS:
        if code in verdicts:
            return Verdict(code)
    message = ""
    if killed:
        message = "ranks that did not end within the grace period were killed; they saved nothing"
    elif exit_codes and min(exit_codes) not in records:  # the rank that prints how a run ends had not begun
        name = signal.Signals(stop_signal).name
        message = f"stopped by {name} while the ranks imported their packages; nothing was saved"
    return Verdict(exit_code_of(stop_signal), message)


def exit_code_of(stop_signal: int) -> ExitCode:
    """The exit code of a process that `stop_signal` ended before it could save."""
    return ExitCode.SIGINT if stop_signal == signal.SIGINT else ExitCode.TERMINATED_UNSAVED
