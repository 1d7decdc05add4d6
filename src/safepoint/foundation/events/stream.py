"""The stream of events: JSON lines for programs, sentences for people.

One line per event, with RFC 3339 UTC times. Later releases may add fields, but remove none. If a write fails, as on a
full disk, the event is lost and the training continues. Values that change every step are in
`safepoint.progress.record`.
"""

import contextlib
import dataclasses
import json
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from safepoint.errors import without_credentials
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import MAX_BYTES, parse_object
from safepoint.foundation.shared_folders.opening import open_file, open_regular

EVENTS_NAME = "events.jsonl"
_MOST_VALUES = 10_000
"""The limit of the values in one event."""
_MOST_VALUES_READ = 1 << 22


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event(ABC):
    """Base of every event; the class name in snake case is the event's name in JSON. Subclasses become dataclasses.

    Args:
        is_warning: whether the console shows the event as a warning.
        is_quiet: whether the console shows the event only with `-v`. The stream has it in any case.
        cause: the name of the field that is also written under the key `cause`: the trigger, the signal or the
            reason.
    """

    is_warning: ClassVar[bool]
    is_quiet: ClassVar[bool]
    _cause_field: ClassVar[str]

    def __init_subclass__(cls, *, is_warning: bool = False, is_quiet: bool = False, cause: str = "") -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.is_warning, cls.is_quiet, cls._cause_field = is_warning, is_quiet, cause

    @property
    def name(self) -> str:
        """The event's name in JSON: `AttemptStarted` → `attempt_started`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def line(self) -> str:
        """One line for a person."""
        return self._sentence()

    @property
    def cause(self) -> str:
        """Why the event happened; empty if the event has no field for the cause."""
        return str(getattr(self, self._cause_field)) if self._cause_field else ""

    @abstractmethod
    def _sentence(self) -> str: ...


class EventLog:
    """Appends events as JSON lines to files; several processes may append to the same file.

    Args:
        paths: the files. A path that is None is left out.
        actor: who writes: `rank 3`, `launcher`, `keeper`, `uploader`.
    """

    def __init__(self, *paths: Path | None, actor: str = "") -> None:
        self._paths = [path for path in paths if path is not None]
        self._actor = actor

    def write(self, event: Event) -> None:
        """Append one line in one write, so that lines of several writers do not mix."""
        if not self._paths:
            return
        record: dict[str, Any] = {"time": clock.utc_now(), "event": event.name}
        if self._actor:
            record["actor"] = self._actor
        if event.cause:
            record["cause"] = event.cause
        line = without_credentials(json.dumps(record | vars(event), default=dataclasses.asdict)) + "\n"
        for path in self._paths:
            append_lines(path, line.encode())


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The records in a stream of events, oldest first. A line that is not a record with a string `event` is left out.

    If the stream cannot be read, there are no records.

    Args:
        path: the stream.
        last_bytes: read only this many bytes at its end. A stream in an output folder may be of any size.
    """
    return (record for _, record in _lines(path, last_bytes))


def newest_events(path: Path, *, last_bytes: int) -> list[dict[str, Any]]:
    """The newest records that `read_events` returns, oldest first: as many as have 4,194,304 values together.

    A stream that someone else has written may have many empty objects. Each takes 2 bytes there, and 64 in memory.
    """
    kept: deque[tuple[int, dict[str, Any]]] = deque()
    num_values = 0
    for line, record in _lines(path, last_bytes):
        count = sum(map(line.count, (b",", b"[", b"{")))
        kept.append((count, record))
        num_values += count
        while num_values > _MOST_VALUES_READ:
            num_values -= kept.popleft()[0]
    return [record for _, record in kept]


def _lines(path: Path, last_bytes: int | None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a stream that are valid, with their records."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        if last_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        while line := file.readline(MAX_BYTES):
            if line.endswith(b"\n"):  # skip a line without an end: it is too long, or a crash has cut it off
                with contextlib.suppress(ValueError):
                    record = parse_object(line, max_values=_MOST_VALUES)
                    if isinstance(record.get("event"), str):
                        yield line, record


def append_lines(path: Path, lines: bytes) -> None:
    """Append to a stream of events; a failed write loses the lines."""
    # An event that cannot be written must not end the run.
    with contextlib.suppress(OSError):
        descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, lines)
        finally:
            os.close(descriptor)
