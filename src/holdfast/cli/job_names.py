"""The names of jobs, for shells that complete them."""

import contextlib

from holdfast.errors import HoldfastError


def complete_job(incomplete: str) -> list[str]:
    """The jobs whose names begin so; none where the history cannot be read, because nobody sees a message here."""
    from holdfast.jobs.history import History
    from holdfast.jobs.places import history_file

    if not history_file().exists():  # looking makes it
        return []
    with contextlib.suppress(HoldfastError), History() as history:
        return [job.name for job in history.summaries() if job.name.startswith(incomplete)]
    return []


__all__ = ["complete_job"]
