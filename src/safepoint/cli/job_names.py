"""The names of jobs, for shells that complete them."""

import contextlib
import logging

from safepoint.errors import SafepointError


def complete_job(incomplete: str) -> list[str]:
    """The jobs whose names begin so; none where the history cannot be read."""
    from safepoint.jobs.local.history import History
    from safepoint.jobs.local.paths import history_file

    logging.disable()  # a shell shows what is written in the middle of its line
    try:
        with contextlib.suppress(SafepointError, OSError):
            if not history_file().exists():  # looking makes it
                return []
            with History() as history:
                return [job.name for job in history.summaries() if job.name.startswith(incomplete)]
        return []
    finally:
        logging.disable(logging.NOTSET)
