"""Repeats requests that failed in transit: exponential backoff with jitter, never past the caller's deadline."""

import random
from collections.abc import Callable
from typing import TypeVar

from safepoint.errors import TransientError
from safepoint.foundation import clock

DEFAULT_WITHIN_S = 120.0
"""How long an operation without a deadline is tried."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LEAST_TRY_S = 0.05
_T = TypeVar("_T")


def retry(
    attempt: Callable[[float], _T], *, deadline_s: float | None, try_s: float, most_tries: int | None = None
) -> _T:
    """Call `attempt` until it does not raise TransientError.

    Args:
        attempt: called with the number of seconds that this try may last.
        deadline_s: when to give up; None for DEFAULT_WITHIN_S from now.
        try_s: how many seconds one try may last.
        most_tries: how many attempts there may be; None if only the deadline limits them.

    Raises:
        TransientError: the error of the last attempt, when the deadline has come or `most_tries` attempts were made;
            or there was no time for the first attempt.
    """
    if deadline_s is None:
        deadline_s = clock.monotonic_s() + DEFAULT_WITHIN_S
    pause_s = _FIRST_PAUSE_S
    num_tries = 0
    while True:
        num_tries += 1
        left_s = deadline_s - clock.monotonic_s()
        if left_s < _LEAST_TRY_S and num_tries == 1:
            raise TransientError("there was no time left for the request")
        try:
            return attempt(max(_LEAST_TRY_S, min(try_s, left_s)))
        except TransientError as error:
            # Jitter, so that ranks that failed at the same time do not retry at the same time.
            wait_s = pause_s * random.uniform(0.5, 1.0)
            if num_tries == most_tries or clock.monotonic_s() + wait_s + _LEAST_TRY_S > deadline_s:
                message = f"{error.message} (tried {num_tries} times)" if num_tries > 1 else error.message
                raise TransientError(message, hint=error.hint) from error
            clock.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
