"""The pace of an attempt: arithmetic on the times of its steps.

Between two steps lies a boundary, in which evaluations and saves happen. The time of a step begins when the boundary
before the step ends, so this time includes neither evaluations nor saves. Evaluations and saves are measured
separately, as pauses. The first pause is left out: `pause_s` is the mean over the steps after the first pause.
"""

from collections import deque

_MOST_STEPS = 64
"""The mean is taken over this many steps: enough for a steady value, few enough to follow a change."""
_SHARE = 0.2
"""A boundary that takes at most this part of a step (log lines, callbacks) is counted as part of the step."""


class Pace:
    """The pace of one attempt; all times are of one monotonic clock, in seconds.

    One thread calls the methods. Other threads may read the properties, whose values may be one step old.
    """

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_MOST_STEPS)
        self._mean_s: float | None = None
        self._num_steps = 0
        self._first_s = 0.0
        self._mark_s: float | None = None
        self._small_s = 0.0
        self._first_pause: int | None = None
        self._last_pause = 0
        self._paused_s = 0.0

    def begins(self, now_s: float) -> None:
        """Record that the loop begins."""
        self._mark_s = now_s

    def step_ends(self, now_s: float) -> None:
        """Record that the optimizer has stepped."""
        if self._mark_s is None:
            return
        took_s = now_s - self._mark_s + self._small_s
        self._mark_s, self._small_s = now_s, 0.0
        self._num_steps += 1
        # The mean does not include the first step, in which workers start, and kernels are chosen or compiled.
        if self._num_steps > 1:
            self._steps_s.append(took_s)
            self._mean_s = sum(self._steps_s) / len(self._steps_s)
        else:
            self._first_s = took_s

    def boundary_ends(self, now_s: float) -> None:
        """Record that a log line, evaluation or save after a step is done. Several of them may follow one step."""
        if self._mark_s is None:
            return
        took_s = now_s - self._mark_s
        self._mark_s = now_s
        if not self._num_steps:
            return  # a boundary before the first step of this attempt is not counted
        if took_s <= _SHARE * (self.step_s or self._first_s):
            self._small_s += took_s
        elif self._first_pause is None:
            self._first_pause = self._last_pause = self._num_steps
        elif self._num_steps > self._first_pause:
            self._last_pause = self._num_steps
            self._paused_s += took_s

    @property
    def step_s(self) -> float | None:
        """Seconds that a step takes, as the mean of the last steps; None until two steps were measured."""
        return self._mean_s

    @property
    def pause_s(self) -> float:
        """Seconds that pauses add to each step on average; 0 until there were two pauses."""
        num_steps = 0 if self._first_pause is None else self._last_pause - self._first_pause
        return self._paused_s / num_steps if num_steps else 0.0
