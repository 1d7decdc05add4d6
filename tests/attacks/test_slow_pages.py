"""A stranger writes texts in which the search for passwords takes long: pages with them delay no other visitor.

Such texts are the output of a pod, messages of a cluster and events. A page shows a part of a long text.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.dashboard import rendering
from safepoint.dashboard.pages import job as page
from safepoint.jobs.model.job_place import LogLine
from safepoint.presentation.rendering import make_environment
from tests.support.patience import PATIENCE

_SLOW = "a:/" * 1300 + "@"


@pytest.mark.parametrize("wants_json", [False, True])
def test_other_requests_are_answered_meanwhile(wants_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page waits on a thread; the thread of all requests goes on."""
    others, is_free = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> str:
        others.set()
        assert is_free.wait(10 * PATIENCE)
        return "shown"

    monkeypatch.setattr(rendering, "without_credentials" if wants_json else "render", slow)
    request: Any = SimpleNamespace(state=SimpleNamespace(wants_json=wants_json), url=SimpleNamespace(path="/"))

    async def visit() -> bytes:
        answer = asyncio.create_task(rendering.respond(request, "jobs.html", {}))
        while not others.is_set():
            await asyncio.sleep(0.01)
        is_free.set()  # what another request does
        return bytes((await answer).body)

    assert asyncio.run(visit()) == b"shown"


def test_a_long_text_on_a_page() -> None:
    """What was left out is stated. Escapes of control characters are longer than the text."""
    template = make_environment("safepoint.dashboard").from_string("{{ text }}")
    for text in (_SLOW * 300, "\x1b" * (1 << 20)):
        shown = template.render(text=text)
        assert len(shown) < 1 << 17
        assert f"({len(text) - 16_384:,} more characters)" in shown


def test_many_long_lines_on_a_page() -> None:
    """The newest lines are shown."""

    class Reader:
        @contextmanager
        def open_jobs(self, actor: str) -> Iterator[Any]:
            yield self

        def logs(self, name: str, **_: object) -> Iterator[LogLine]:
            return (LogLine(source="node 0", text=f"{number} {_SLOW}") for number in range(3000))

    tail: Callable[..., tuple[list[LogLine], bool]] = getattr(page, "_tail")  # noqa: B009  private
    lines, is_cut = tail(Reader(), "a", None, None, "", 2000)
    assert lines[-1].text.startswith("2999 ")
    assert 1 << 17 < sum(len(line.text) for line in lines) <= 1 << 18
    assert is_cut
