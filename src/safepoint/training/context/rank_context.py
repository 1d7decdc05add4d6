"""What one rank knows of its run: immutable itself, with references to the few services whose state changes.

There is one context per process. Integrations get it from `current_context`; each class below them receives the
context, or only the service that it needs.
"""

import functools
import logging
from dataclasses import dataclass

from safepoint.foundation.environment import Place
from safepoint.foundation.events import console
from safepoint.foundation.service_links import forget_service_links
from safepoint.progress.tracker import ProgressTracker
from safepoint.settings.run_settings import RunSettings
from safepoint.training.context.keeper_connection import KeeperConnection
from safepoint.training.context.outcome import Outcome
from safepoint.training.context.outputs import Outputs
from safepoint.training.context.reporter import Reporter
from safepoint.training.context.termination import Termination
from safepoint.training.context.uploads import Uploads
from safepoint.training.outcome.rank_record import RankRecordWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank under Safepoint.

    Args:
        settings: what the run was asked to do.
        place: this rank among its peers.
        log: for messages to people that are no events.
        reporter: writes events.
        progress: how far the training is.
        record: how this rank ends, for its launcher.
        termination: signals and the deadline.
        uploads: what is on its way to the object store.
        outcome: what is saved, and how this rank ends.
        keeper: the connection to the node's keeper.
        outputs: the folders that this process trains into.
    """

    settings: RunSettings
    place: Place
    log: logging.Logger
    reporter: Reporter
    progress: ProgressTracker
    record: RankRecordWriter
    termination: Termination
    uploads: Uploads
    outcome: Outcome
    keeper: KeeperConnection
    outputs: Outputs


def make_context(settings: RunSettings, place: Place) -> RankContext:
    """Connect the services of one rank; no signal handler is installed and no process is started."""
    log = logging.getLogger("safepoint")
    reporter = Reporter(settings, place)
    record = RankRecordWriter(settings.record_folder, place)
    termination = Termination(within_s=settings.grace_s - settings.margin_s)
    progress = ProgressTracker(
        places=settings.progress_places,
        is_first=place.is_first,
        restart=place.restart,
        world_size=place.world_size,
        grace_s=settings.grace_s,
    )
    uploads = Uploads(settings, reporter, termination)
    outcome = Outcome(
        settings,
        place,
        reporter=reporter,
        progress=progress,
        record=record,
        termination=termination,
        uploads=uploads,
    )
    return RankContext(
        settings=settings,
        place=place,
        log=log,
        reporter=reporter,
        progress=progress,
        record=record,
        termination=termination,
        uploads=uploads,
        outcome=outcome,
        keeper=KeeperConnection(settings, place, outcome.end_with_snapshot),
        outputs=Outputs(),
    )


@functools.cache
def current_context() -> RankContext:
    """The context of this process.

    The first call creates it and installs the signal handlers, so it must be made on the main thread, and before
    torch is imported: that takes seconds.

    Raises:
        UsageError: a SAFEPOINT_* variable is invalid.
        ValueError: RANK or WORLD_SIZE is invalid.
    """
    forget_service_links()
    settings, place = RunSettings.from_environment(), Place.from_environment()
    console.set_up(settings.verbosity)
    context = make_context(settings, place)
    context.termination.install(
        on_signal=context.reporter.report_signal,
        on_stop_outside_training=context.outcome.end_outside_training,
        on_deadline=context.outcome.end_at_deadline,
    )
    return context
