"""The context of one rank: its settings, its position among the ranks, and the services that all its code shares.

There is one context per process. Integrations get it from `current_context`. An integration passes the context to
other classes, or only the service that a class needs.
"""

import functools
import logging
from pathlib import Path
from typing import Final

from safepoint.foundation.environment import Place, forget_service_links, is_launched
from safepoint.foundation.events import console
from safepoint.progress.record import SPACE_NAME
from safepoint.progress.tracker import ProgressTracker
from safepoint.settings.run_settings import RunSettings
from safepoint.settings.wording import use_wording
from safepoint.training.context.keeper_connection import KeeperConnection
from safepoint.training.context.outcome import Outcome
from safepoint.training.context.outputs import Outputs
from safepoint.training.context.reporter import Reporter
from safepoint.training.context.termination import Termination
from safepoint.training.context.uploads import Uploads
from safepoint.training.outcome.launcher_folder import reserved_s, stop_signal_of, was_frozen
from safepoint.training.outcome.rank_record import RankRecordWriter


class RankContext:
    """The objects that all code of one rank shares. No attribute is ever replaced.

    Creating a context installs no signal handlers.

    Args:
        settings: the options of the run.
        place: the position of this rank.
    """

    def __init__(self, settings: RunSettings, place: Place) -> None:
        self.settings: Final = settings
        self.place: Final = place
        self.log: Final = logging.getLogger("safepoint")
        """For log lines that are not events."""
        self.reporter: Final = Reporter(settings, place)
        """Writes events."""
        self.progress: Final = ProgressTracker(
            places=settings.progress_places,
            is_first=place.is_first,
            restart=place.restart,
            world_size=place.world_size,
            grace_s=settings.grace_s,
            space=None if settings.record_folder is None else Path(settings.record_folder) / SPACE_NAME,
        )
        """Publishes how far the training is."""
        self.record: Final = RankRecordWriter(settings.record_folder, place)
        """Reports to the launcher how this rank ends."""
        folder = None if settings.record_folder is None else Path(settings.record_folder)
        self.termination: Final = Termination(
            within_s=settings.grace_s - settings.margin_s,
            original=functools.partial(stop_signal_of, folder),
            reserved=functools.partial(reserved_s, folder),
            was_frozen=functools.partial(was_frozen, folder),
        )
        """Receives signals, and has the deadline."""
        self.uploads: Final = Uploads(settings, self.reporter, self.termination)
        """The uploads to the object store."""
        self.outcome: Final = Outcome(
            settings,
            place,
            reporter=self.reporter,
            progress=self.progress,
            record=self.record,
            termination=self.termination,
            uploads=self.uploads,
        )
        """Records which step is saved, and how this rank ends."""
        self.keeper: Final = KeeperConnection(settings, place, self.outcome.end_with_snapshot)
        """The connection to the node's keeper, the process that writes snapshots to disk."""
        self.outputs: Final = Outputs()
        """The output folders of this process's trainings."""


@functools.cache
def current_context() -> RankContext:
    """The context of this process.

    The first call creates the context and installs the signal handlers. Make the first call on the main thread, and
    before torch is imported. The import takes seconds, and a signal in this time must be handled.

    Raises:
        UsageError: a SAFEPOINT_* variable is invalid.
        ValueError: RANK or WORLD_SIZE is invalid.
    """
    forget_service_links()
    settings, place = RunSettings.from_environment(), Place.from_environment()
    console.set_up(settings.verbosity)
    use_wording(settings.wording, job_dir=settings.job_dir)
    context = RankContext(settings, place)
    context.termination.install(
        on_signal=context.reporter.report_signal,
        on_stop_outside_training=context.outcome.end_outside_training,
        on_deadline=context.outcome.end_at_deadline,
    )
    if place.is_first and place.restart == 0 and settings.launcher_pid is None and is_launched(place):
        context.log.warning(
            "these ranks were not started by `safepoint run`: torch's rendezvous store listens on all addresses and "
            "answers every client, and a client can run code in the training; start them with `safepoint run`, "
            "or let only the pods of the job reach each other with a NetworkPolicy (docs/security.md)"
        )
    return context
