"""Events about the free space for checkpoints, as records (docs/progress.md)."""

from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration, plural


class SpaceLow(Event, is_warning=True):
    """A folder has no room for a save, or will soon have no room.

    `place` says which folder it is: the output folder, the local folder or the temporary folder. `limit` is what
    limits the free space: `disk`, `inodes`, `eviction` (the node's threshold) or `size_limit` (of a volume).
    `saves_left` is the number of saves that still fit; None if this number is unlimited or not known. `remaining_s`
    is the time until a save does not fit any more; None if no such time is known. `num_deletable` is the number of
    checkpoints that can be deleted if a save does not fit.
    """

    place: str
    path: str
    limit: str
    free_bytes: int
    needed_bytes: int
    free_inodes: int | None
    needed_inodes: int
    growth_bytes_per_s: float
    saves_left: int | None
    remaining_s: float | None
    num_deletable: int

    def _sentence(self) -> str:
        return f"the {self.place} {self.path} {self._when}: {self._room}; {self._advice}"

    @property
    def _when(self) -> str:
        if self.saves_left == 0:
            lacks_inodes = self.free_inodes is not None and self.free_inodes < self.needed_inodes
            is_short = self.free_bytes < self.needed_bytes or lacks_inodes
            return f"{'has' if is_short else 'will have'} no room for the next save"
        about = "" if self.remaining_s is None else f"about {format_duration(self.remaining_s)}"
        if self.saves_left is None:
            return f"will be full in {about}" if about else "is nearly full"
        return f"will be full in {plural(self.saves_left, 'save')}" + (f", {about}" if about else "")

    @property
    def _room(self) -> str:
        if self.limit == "inodes":
            found = plural(self.free_inodes or 0, "inode")
            return f"{found} are free for files and folders, and a save needs {self.needed_inodes}"
        limit = {
            "eviction": " before the node evicts the pod",
            "size_limit": " within the size limit of the volume",
        }.get(self.limit, "")
        growth = ""
        if self.growth_bytes_per_s >= 1:
            growth = f", and other files grow by {format_bytes(round(self.growth_bytes_per_s))}/s"
        needs = f"a save needs {format_bytes(self.needed_bytes)}"
        return f"{format_bytes(self.free_bytes)} are free{limit}, {needs}{growth}"

    @property
    def _advice(self) -> str:
        if self.place == "temporary folder":
            return "if it is full, training waits for saves; make it larger, or set TMPDIR to another folder"
        if self.num_deletable:
            found = plural(self.num_deletable, "older checkpoint")
            advice = "to keep them, free some space"
            return f"when a save does not fit, up to {found} will be deleted, oldest first; {advice}"
        advice = "free some space, or use --keep newest=N"
        return f"no checkpoint can be deleted for a save now, so saves may fail; {advice}"


class SpaceRegained(Event):
    """A folder has room for saves again. The event is reported only after one minute without low space."""

    place: str
    path: str
    free_bytes: int

    def _sentence(self) -> str:
        return f"the {self.place} {self.path} has room for saves again: {format_bytes(self.free_bytes)} are free"


class SpaceUnknown(Event, is_warning=True, cause="reason"):
    """The free space of a folder cannot be read. The launcher tries again later, but reports this event only once."""

    place: str
    path: str
    reason: str

    def _sentence(self) -> str:
        return (
            f"the free space of the {self.place} {self.path} is not known: {self.reason}; training continues, but a "
            "save fails if there is no room for it; watch the free space yourself"
        )


class Thinned(Event, is_warning=True, cause="reason"):
    """A checkpoint was deleted because a save did not fit. Retention would have kept this checkpoint."""

    step: int
    path: str
    reason: str

    def _sentence(self) -> str:
        return (
            f"deleted {self.path}, because {self.reason}; to keep more checkpoints, free some space, or use a larger "
            "disk"
        )
