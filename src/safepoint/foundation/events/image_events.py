"""Events about process images (docs/progress.md)."""

from safepoint.errors import printable
from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration


class Frozen(Event, is_warning=True):
    """The ranks could not save before the deadline. A process image of them was made, and then they have ended."""

    path: str
    size_bytes: int
    frozen_s: float

    def _sentence(self) -> str:
        size = format_bytes(self.size_bytes)
        return (
            "the ranks did not save before the deadline. A process image of the ranks was made: "
            f"{printable(self.path)} ({size}; frozen for {format_duration(self.frozen_s)}); to restore them, run the "
            "same command again"
        )


class NotFrozen(Event, is_warning=True, cause="reason"):
    """The ranks could not save before the deadline, and could not be frozen either."""

    reason: str

    def _sentence(self) -> str:
        return f"the ranks did not save before the deadline, and could not be frozen: {self.reason}"


class Thawed(Event):
    """The ranks were restored from a process image, and go on in the middle of a step."""

    path: str
    reason: str

    def _sentence(self) -> str:
        return f"the ranks go on from {printable(self.path)}: {self.reason}"


class FrozenOnRequest(Event):
    """`safepoint freeze` requested a process image of the ranks. The image was made, read and checked."""

    path: str
    size_bytes: int
    is_running: bool

    def _sentence(self) -> str:
        size = format_bytes(self.size_bytes)
        after = "continue to run" if self.is_running else "have ended, and the next start of the job restores them"
        return f"a process image of the ranks was made: {printable(self.path)} ({size}); the ranks {after}"


class ThawedWithoutProgress(Event, is_warning=True):
    """The restored ranks made no progress. They were ended, and the run continues from its newest checkpoint."""

    limit_s: float

    def _sentence(self) -> str:
        return (
            f"the restored ranks made no progress within {format_duration(self.limit_s)}: they were ended, and the "
            "run continues from its newest checkpoint"
        )
