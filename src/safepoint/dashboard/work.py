"""Actions that take longer than a request. Each action runs on a thread, and a page of its own shows the result.

Promises: an action that has begun continues if the browser is closed. If the dashboard ends, its threads end. But a
request that an action has made to a job of this machine stays in effect, because the job's supervisor carries it out.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from safepoint.errors import SafepointError
from safepoint.foundation import clock

_MOST = 200
_FIRST_NUMBERS = 1 << 48
_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an action.

    Args:
        sentence: the result in a sentence, for people.
        document: the result as JSON values, for programs.
        facts: names and values that the page lists below the sentence: after a suspension, what was saved and
            checked; after a check, the damaged files with their faults; after an export, the files.
        heading: the result in a few words. The page shows it above the sentence.
    """

    sentence: str
    document: dict[str, Any]
    facts: tuple[tuple[str, str], ...] = ()
    heading: str = "Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One action.

    Args:
        number: identifies the action.
        title: what is done, such as `suspend tiny`.
        back: the path of the page from which the action was requested.
        by: who requested the action.
        begun: when the action began, RFC 3339 UTC.
        ended: when the action ended, RFC 3339 UTC; None while it runs.
        outcome: the result of the action; None while the action runs, and if it failed.
        failure: why it failed; empty if it did not fail.
        hint: what the visitor can do about the failure.
    """

    number: int
    title: str
    back: str
    by: str
    begun: str
    ended: str | None = None
    outcome: Outcome | None = None
    failure: str = ""
    hint: str = ""

    @property
    def state(self) -> str:
        """`running`, `done` or `failed`."""
        return "running" if self.ended is None else "failed" if self.failure else "done"

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "number": self.number,
            "title": self.title,
            "state": self.state,
            "by": self.by,
            "begun": self.begun,
            "ended": self.ended,
            "sentence": self.outcome.sentence if self.outcome is not None else "",
            "result": self.outcome.document if self.outcome is not None else None,
            "failure": self.failure,
            "hint": self.hint,
        }


class Works:
    """The actions of this dashboard, newest last. The oldest ended actions are dropped.

    Args:
        changed: called with `actions/<number>` when an action has ended, on the thread of the action.
    """

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        # If the dashboard is restarted, a page that is still open refers to an action of the earlier dashboard by its
        # number. The page must not show another action in its place. So the first number is random.
        self._numbers = itertools.count(secrets.randbelow(_FIRST_NUMBERS) + 1)
        self._works: dict[int, Work] = {}
        self._lock = threading.Lock()

    def begin(self, title: str, act: Callable[[], Outcome], *, back: str, by: str) -> Work:
        """Run an action on a new thread."""
        with self._lock:
            work = Work(number=next(self._numbers), title=title, back=back, by=by, begun=clock.utc_now())
            self._works[work.number] = work
            for old in [one.number for one in self._works.values() if one.ended is not None][:-_MOST]:
                del self._works[old]
        name = f"safepoint-action-{work.number}"
        threading.Thread(target=self._run, args=(work, act), name=name, daemon=True).start()
        return work

    def get(self, number: int) -> Work | None:
        """The action with this number; None if it does not exist, or was dropped."""
        return self._works.get(number)

    def running(self, back: str) -> list[Work]:
        """The actions of a page that have not ended."""
        return [work for work in list(self._works.values()) if work.back == back and work.ended is None]

    def done(self, back: str) -> list[Work]:
        """The actions of a page that have ended and were not dropped, oldest first."""
        return [work for work in list(self._works.values()) if work.back == back and work.ended is not None]

    def _run(self, work: Work, act: Callable[[], Outcome]) -> None:
        try:
            done = replace(work, outcome=act())
        except SafepointError as error:
            done = replace(work, failure=error.message, hint=error.hint or "")
        except Exception as error:  # noqa: BLE001  the page must not show the action as running forever
            _log.exception("%s failed", work.title)
            hint = "this is a bug in Safepoint; report it with the lines on the terminal"
            done = replace(work, failure=f"{type(error).__name__}: {error}", hint=hint)
        with self._lock:
            self._works[work.number] = replace(done, ended=clock.utc_now())
        self._changed(f"actions/{work.number}")
