"""Events about process images (docs/progress.md)."""

from safepoint.errors import printable
from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration


class Frozen(Event, is_warning=True):
    """The ranks could not save before the deadline. They are in a process image, and their processes have ended."""

    path: str
    size_bytes: int
    frozen_s: float

    def _sentence(self) -> str:
        return (
            f"the ranks did not save before the deadline: they are frozen in the process image "
            f"{printable(self.path)} ({format_bytes(self.size_bytes)}, made in {format_duration(self.frozen_s)}); to "
            "restore them, run the same command again"
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
        after = "they run on" if self.is_running else "they have ended, and the next start of the job restores them"
        size = format_bytes(self.size_bytes)
        return f"the ranks were frozen in the process image {printable(self.path)} ({size}); {after}"


class ThawedWithoutProgress(Event, is_warning=True):
    """The restored ranks made no progress. They were ended, and the run continues from its newest checkpoint."""

    limit_s: float

    def _sentence(self) -> str:
        return (
            f"the restored ranks made no progress within {format_duration(self.limit_s)}: they were ended, and the "
            "run continues from its newest checkpoint"
        )
