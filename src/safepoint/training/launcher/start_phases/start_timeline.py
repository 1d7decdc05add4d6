"""Measures the phases of each start of a node's ranks, and reports them in one event after the ranks' first step.

All times are read from the machine's monotonic clock, which all processes of the machine share. The launcher notes
its own phases here. The ranks write their phases into their records (`safepoint.training.outcome.rank_record`), and
this module reads the records.
"""

from collections.abc import Callable
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.events.start_events import Moment, Phase, PhaseEnd, StartTimed
from safepoint.training.outcome.rank_record import RankRecord, read_records


class StartTimeline:
    """The phases of the newest start of the ranks of one node. The first start begins now.

    Args:
        folder: the launcher's folder, with the records of the ranks.
        node: this node's number, from 0.
        report: receives one event for each start.
    """

    def __init__(self, folder: Path, node: int, report: Callable[[StartTimed], None]) -> None:
        self._folder = folder
        self._node = node
        self._report = report
        self._restart = 0
        self._num_ranks = 0
        self._begun_s = clock.monotonic_s()
        self._own: list[Moment] = []
        self._is_reported = False

    def passed(self, phase: Phase) -> None:
        """Record that the launcher has passed a phase."""
        self._own.append(Moment(phase=phase, at_s=clock.monotonic_s()))

    def ranks_born(self, restart: int, num_ranks: int) -> None:
        """Record that the processes of the ranks exist.

        Args:
            restart: how often the ranks have been restarted; 0 for the first start.
            num_ranks: ranks of this node.
        """
        self._restart, self._num_ranks = restart, num_ranks
        self.passed(Phase.RANKS_BORN)

    def has_passed(self, phase: Phase) -> bool:
        """Whether the launcher, or every rank of this node, has passed a phase of the newest start."""
        own = {moment.phase for moment in tuple(self._own)}
        if phase in own or not self._num_ranks:
            return phase in own
        records = read_records(self._folder, self._restart)
        passed = [record for record in records.values() if phase in {moment.phase for moment in record.moments}]
        return len(passed) == self._num_ranks

    def failure_noticed(self, at_s: float) -> None:
        """Begin the next start, because a rank has failed. First report the last start, unless it is reported.

        Args:
            at_s: when the failure was noticed, on the machine's monotonic clock.
        """
        self.ends()
        self._begun_s, self._num_ranks, self._is_reported = at_s, 0, False
        self._own = [Moment(phase=Phase.NOTICED, at_s=at_s)]

    def look(self) -> bool:
        """Report the start if all ranks have done their first step. Call this again and again while the ranks run.

        Returns:
            Whether the start is reported, by this call or an earlier one.
        """
        if not self._is_reported and self._num_ranks:
            records = read_records(self._folder, self._restart)
            if len(records) == self._num_ranks and all(record.has_stepped for record in records.values()):
                self._send(records)
        return self._is_reported

    def ends(self) -> None:
        """Report how far the start came, unless it is reported. Call this when the ranks have ended."""
        if not self._is_reported and self._num_ranks:
            self._send(read_records(self._folder, self._restart))

    def _send(self, records: dict[int, RankRecord]) -> None:
        self._is_reported = True
        last: dict[Phase, PhaseEnd] = {}
        moments = [(None, moment) for moment in self._own]
        moments += [(rank, moment) for rank, record in records.items() for moment in record.moments]
        for rank, moment in sorted(moments, key=lambda pair: pair[1].at_s):
            at_s = round(moment.at_s - self._begun_s, 4)
            last[moment.phase] = PhaseEnd(phase=moment.phase, at_s=at_s, rank=rank)
        phases = tuple(sorted(last.values(), key=lambda end: end.at_s))
        self._report(StartTimed(restart=self._restart, node=self._node, num_ranks=self._num_ranks, phases=phases))
