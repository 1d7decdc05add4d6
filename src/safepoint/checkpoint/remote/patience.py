"""How long the end of a training waits for an object store."""

from safepoint.errors import SafepointError, TransientError

LONGEST_PATIENCE_S = 600.0
"""With a store from which nothing comes."""
_PATIENCE_WITH_REFUSALS_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Between one try and the next, which doubles up to the longest."""


def patience_s(error: SafepointError) -> float:
    """How long after the last byte has arrived trying again makes sense.

    Args:
        error: why the last try has failed; a store from which nothing comes may come back, one that refuses rarely
            changes its mind.
    """
    return LONGEST_PATIENCE_S if isinstance(error, TransientError) else _PATIENCE_WITH_REFUSALS_S
