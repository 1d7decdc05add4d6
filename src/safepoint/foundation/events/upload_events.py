"""Events of copies to and from the object store of a job."""

from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import format_bytes, format_duration, plural


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
    """A checkpoint is not uploaded, because a newer checkpoint replaced it."""

    step: int

    def _sentence(self) -> str:
        return f"step {self.step} is not uploaded: a newer checkpoint replaced it"


class ExtraFilesUploaded(Event):
    """The files that the program has left in the output folder are in the object store too."""

    num_files: int
    location: str
    size_bytes: int
    duration_s: float

    def _sentence(self) -> str:
        what = plural(self.num_files, "other file")
        return f"uploaded {what} of the output folder to {self.location}, {_pace(self.size_bytes, self.duration_s)}"


class ExtraFilesLeftOut(Event, is_warning=True, cause="reason"):
    """Files that the program has left in the output folder are not in the object store."""

    num_files: int
    example: str
    folder: str
    location: str
    reason: str

    def _sentence(self) -> str:
        are = "is" if self.num_files == 1 else "are"
        what = f"{plural(self.num_files, 'file')} in {self.folder}, such as {self.example}, {are}"
        return f"{what} not uploaded to {self.location}: {self.reason}"


class UploadUnfinished(Event, is_warning=True):
    """The run has ended, and some of the files that it had to upload are not in the object store.

    If `newest_only`, the run had to upload only the newest checkpoint. If not, it had to upload the newest
    checkpoint, older checkpoints that are not periodic, the final model and the other files of the output folder.
    """

    location: str
    folder: str
    newest_only: bool

    def _sentence(self) -> str:
        if self.newest_only:
            return (
                f"the newest checkpoint was not uploaded to {self.location} in time; it is in {self.folder}, and the "
                "same command on this machine resumes from it and uploads it"
            )
        return (
            f"a checkpoint, the final model or another file was not uploaded to {self.location}; {self.folder} has "
            "it, and the same command on this machine uploads it"
        )


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
