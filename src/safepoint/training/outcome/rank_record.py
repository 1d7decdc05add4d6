"""How a rank ended, reported to its launcher in one small file per rank.

An exit code alone cannot say whether a 75 is Safepoint's or the user's own, nor whether a killed rank had
already committed. Without a launcher there is no file, and nothing is lost but that.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safepoint.errors import ExitCode, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import EVENTS_NAME, append_lines
from safepoint.foundation.files import write_atomic
from safepoint.foundation.units import printable

_STREAM = "stream"
_MOST_LETTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank says about itself.

    Args:
        rank: who.
        pid: its process.
        has_stepped: whether it got as far as one optimizer step.
        exit_code: Safepoint's own verdict; None while it runs, or when the user's program decides.
        lost_peer: whether it ended because another rank was gone.
        ended_s: when it knew that it ends, by the machine's monotonic clock; None while it runs, or when it was
            killed.
        message: why it ends, one sentence.
    """

    rank: int
    pid: int
    has_stepped: bool = False
    exit_code: int | None = None
    lost_peer: bool = False
    ended_s: float | None = None
    message: str = ""


class RankRecordWriter:
    """Writes the record of this rank.

    Args:
        folder: the launcher's folder for this start of the ranks, or None without a launcher.
        place: this rank.
    """

    def __init__(self, folder: str | None, place: Place) -> None:
        self._path = Path(folder) / str(place.restart) / f"rank-{place.rank}.json" if folder else None
        self._record = RankRecord(rank=place.rank, pid=os.getpid())
        self._write()

    @property
    def message(self) -> str:
        """Why it ends, as far as it has been said."""
        return self._record.message

    def stepped(self) -> None:
        """Remember that an optimizer step was done; cheap to call again."""
        if not self._record.has_stepped:
            self._update(has_stepped=True)

    def ended(self, exit_code: int, message: str) -> None:
        """Remember Safepoint's verdict. The first one stands: what follows is only the way out."""
        if self._record.exit_code is None:
            self._update(exit_code=exit_code, message=message, ended_s=self._record.ended_s or clock.monotonic_s())

    def failed(self, *, lost_peer: bool, message: str = "") -> None:
        """Record an error that is not Safepoint's own decision: the ranks may be restarted."""
        if self._record.ended_s is None:
            self._update(lost_peer=lost_peer, ended_s=clock.monotonic_s(), message=message)

    def _update(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            # The launcher may be gone and its folder with it; that must not change how the rank ends.
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                write_atomic(self._path, json.dumps(asdict(self._record)).encode(), durable=False)


def read_records(folder: Path, restart: int) -> dict[int, RankRecord]:
    """The records of one start of the ranks, by rank; unreadable ones are left out."""
    records: dict[int, RankRecord] = {}
    for path in (folder / str(restart)).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = RankRecord(**json.loads(path.read_bytes()))
            records[record.rank] = record
    return records


def in_a_sentence(error: BaseException) -> str:
    """An error for a record: its kind and the first line of what it says."""
    text = next(iter(str(error).splitlines()), "")
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)[:_MOST_LETTERS]


def exit_code_after(error: BaseException) -> int:
    """The exit code of a program with an uncaught error; for Safepoint's own errors, plain `python` exits with 1."""
    if isinstance(error, SafepointError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.FAILED if error.code else ExitCode.OK
    return ExitCode.FAILED


def name_stream(folder: str | None, stream: Path) -> None:
    """Tell the launcher where the run's events go; its own belong there, too."""
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomic(Path(folder) / _STREAM, str(stream.absolute()).encode(), durable=False)


def find_stream(folder: Path) -> Path | None:
    """Where the run's events go, if a rank has said so."""
    with contextlib.suppress(OSError, ValueError):
        return Path((folder / _STREAM).read_text(encoding="utf-8"))
    return None


def passed_on(signal_name: str) -> str:
    """The file in the launcher's folder that says: it was the launcher who sent the ranks this signal."""
    return f"passed-on-{signal_name}"


def waiting_events(folder: Path) -> Path:
    """What the launcher has to say before it knows where."""
    return folder / EVENTS_NAME


def deliver_events(folder: Path, stream: Path) -> None:
    """Take what waits over into the stream, once."""
    taken = folder / f"{EVENTS_NAME}.taken"
    with contextlib.suppress(OSError):
        waiting_events(folder).rename(taken)
        append_lines(stream, taken.read_bytes())
