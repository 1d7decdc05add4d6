"""What can happen between a folder and an object store, as typed records (docs/progress.md)."""

from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration


class Uploaded(Event):
    """A checkpoint is committed in the object store too."""

    step: int
    location: str
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return f"uploaded {self.location}, {_pace(self.size_bytes, self.duration_s)}"


class UploadFailed(Event, is_warning=True, cause="reason"):
    """A checkpoint could not be uploaded; the upload is repeated while the run lasts."""

    step: int
    name_in_store: str
    reason: str

    def _sentence(self) -> str:
        where = "" if self.name_in_store == "final" else "it is saved locally; "
        return f"{self.name_in_store} is not uploaded yet: {self.reason}; {where}the upload is repeated"


class UploadSuperseded(Event):
    """A checkpoint is not uploaded, because a newer one replaced it."""

    step: int

    def _sentence(self) -> str:
        return f"step {self.step} is not uploaded: a newer checkpoint replaced it"


class UploadUnfinished(Event, is_warning=True):
    """The run has ended, and its newest checkpoint is not in the object store."""

    location: str
    folder: str

    def _sentence(self) -> str:
        return (
            f"the newest checkpoint was not uploaded to {self.location} in time; it is in {self.folder}, and the "
            "same command on this machine resumes from it and uploads it"
        )


class FinalMissing(Event, is_warning=True):
    """The finished model is not in the object store; a checkpoint has the same weights."""

    step: int
    location: str
    reason: str
    checkpoint: str | None

    def _sentence(self) -> str:
        again = "run the same command again"
        if self.checkpoint is not None:
            again = f"create it with `safepoint checkpoints export {self.checkpoint} {self.location}`, or {again}"
        return f"the final model is not in {self.location}: {self.reason}; step {self.step} is saved; {again}"


class Fetched(Event):
    """A checkpoint was fetched from the object store."""

    step: int
    location: str
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        return f"fetched {self.location}, {_pace(self.size_bytes, self.duration_s)}"


def _pace(size_bytes: int, duration_s: float) -> str:
    rate = format_bytes(round(size_bytes / max(duration_s, 1e-3)))
    return f"{format_bytes(size_bytes)} in {format_duration(duration_s)}, {rate}/s"
