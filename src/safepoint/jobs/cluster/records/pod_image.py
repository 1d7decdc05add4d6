"""The process image that a pod has made, as the pod reports it and as an annotation keeps it.

This module sends no requests. A person who may change TrainJobs can change the annotation, so commands only show it.
The pod reads its images itself when it starts.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from safepoint.foundation import clock
from safepoint.jobs.cluster.objects import at, items
from safepoint.jobs.cluster.spec import DOMAIN

IMAGE = f"{DOMAIN}/image"
"""The annotation of a TrainJob with the newest image since the job was last resumed: a command has requested it, or
the pod made it at its deadline while `safepoint suspend` waited."""
_FOLDER = "images"
_KINDS = {
    **dict.fromkeys(("name", "created", "program"), str),
    **dict.fromkeys(("num_processes", "size_bytes", "memory_bytes", "num_pages", "num_stored"), int),
}
"""The values that a pod reports about an image, and their types."""
_MOST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PodImage:
    """A process image, as a pod describes it. The pod has made and checked the image.

    Args:
        name: its name.
        path: its location.
        created: when it was made (RFC 3339 UTC).
        program: the name of the root process.
        num_processes: how many processes it has.
        size_bytes: the size of its files.
        memory_bytes: the memory of its processes.
        num_pages: how many pages of memory it has.
        num_stored: how many of these pages are stored in this image, and not in older images.
        needs: the older images whose pages it uses.
        safe_step: the step of the newest checkpoint when the image was made; None if there was no checkpoint.
    """

    name: str
    path: str
    created: str
    program: str
    num_processes: int
    size_bytes: int
    memory_bytes: int
    num_pages: int
    num_stored: int
    needs: tuple[str, ...]
    safe_step: int | None = None

    def is_newer_than(self, safe_step: int | None) -> bool:
        """Whether the image is newer than the newest checkpoint that is known. `safe_step` is the step of that
        checkpoint; None if no checkpoint is known."""
        return safe_step is None or (self.safe_step is not None and safe_step <= self.safe_step)

    def facts(self, safe_step: int | None) -> dict[str, Any]:
        """What commands show of the image, as JSON values. For `safe_step`, see `is_newer_than`."""
        shown = ("name", "path", "created", "size_bytes", "memory_bytes")
        return {**{name: getattr(self, name) for name in shown}, "is_newest": self.is_newer_than(safe_step)}

    def to_annotation(self) -> str:
        """The value of the annotation."""
        return json.dumps(asdict(self), sort_keys=True)


def image_of(document: Any, output: str | None) -> PodImage | None:
    """The image in the answer of a pod; None if the answer describes none.

    Args:
        document: the answer.
        output: the output location of the job.
    """
    path = f"{(output or '').rstrip('/')}/{_FOLDER}/{at(document, 'name')}"
    return _read(document, path)


def read_image(text: str | None) -> PodImage | None:
    """The image in the text of the annotation; None if there is no text, or if the text describes no image."""
    if text is None or len(text) > _MOST_BYTES:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        document: Any = json.loads(text)
        path = at(document, "path")
        return _read(document, path) if isinstance(path, str) else None
    return None


def _read(document: Any, path: str) -> PodImage | None:
    values: dict[str, Any] = {name: at(document, name) for name in _KINDS}
    step = at(document, "safe_step")
    if any(type(value) is not _KINDS[name] for name, value in values.items()) or type(step) not in {int, type(None)}:
        return None
    with contextlib.suppress(ValueError):
        clock.parse_utc(values["created"])
        return PodImage(path=path, needs=tuple(map(str, items(document, "needs"))), safe_step=step, **values)
    return None
