"""How long the end of a training retries uploads to an object store that fails."""

from safepoint.errors import SafepointError, TransientError

LONGEST_PATIENCE_S = 600.0
"""For a store that does not answer."""
_PATIENCE_WITH_REFUSALS_S = 30.0
"""For a store that refuses requests."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The pause between two tries doubles from the first value up to the second."""


def patience_s(error: SafepointError) -> float:
    """How long to retry, counted from the last byte that reached the store.

    Args:
        error: why the last try has failed.
    """
    return LONGEST_PATIENCE_S if isinstance(error, TransientError) else _PATIENCE_WITH_REFUSALS_S
