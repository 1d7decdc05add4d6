"""Tests of safepoint.jobs.local.images.image_request: a request, and the answers to it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ConflictError, ExitCode, FreezeError, NotFoundError, SafepointError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.jobs.local.images import image_request
from safepoint.jobs.local.images.image_request import ImageRequest, failure_of, main, request_image, take_request


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only launcher."""
    monkeypatch.setattr(image_request, "running_launchers", lambda: [(tmp_path, 1)])
    return tmp_path


def answered(folder: Path, answer: Callable[[ImageRequest], dict[str, Any]]) -> threading.Thread:
    """Answer the next request in another thread."""

    def run() -> None:
        while (request := take_request([folder])) is None:
            clock.sleep(0.01)
        request.reply(answer(request))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ask(folder: Path, **options: Any) -> dict[str, Any]:
    return request_image(**{"is_running_after": True, "within_s": 60.0, "sign": lambda _: None, **options})


def test_the_answer_names_the_image(folder: Path) -> None:
    """The request is gone from the folder, which is frozen with the processes."""
    seen: list[bool] = []

    def answer(request: ImageRequest) -> dict[str, Any]:
        seen.append(request.is_running_after)
        return {"name": "image-1"}

    thread = answered(folder, answer)
    assert ask(folder) == {"name": "image-1"}
    thread.join()
    assert seen == [True]
    assert not list(folder.iterdir())


def test_a_failure_is_an_error_with_its_hint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered(folder, lambda _: failure_of(FreezeError("a pipe; the processes run on", hint="close it")))
    assert main(["60", "hold"]) == ExitCode.FAILED
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"error": "a pipe; the processes run on", "hint": "close it"}


def test_a_request_without_an_answer_is_withdrawn(folder: Path) -> None:
    """No image is made for a command that does not wait any more."""
    signs: list[str] = []
    with pytest.raises(WaitTimeoutError):
        ask(folder, within_s=0.0, sign=signs.append)
    assert take_request([folder]) is None


@pytest.mark.parametrize("content", ["", "[]", '{"answer": "x"}', '{"is_running_after": 1, "other": 2}'])
def test_what_is_no_request_is_ignored(folder: Path, content: str) -> None:
    (folder / "image-request").write_text(content)
    assert take_request([folder]) is None


def test_an_answer_to_a_requester_that_has_ended(folder: Path) -> None:
    """The processes must not stay stopped for it."""
    with pytest.raises(OSError, match="gone"):
        ImageRequest(answer=str(folder / "gone" / "answer.json"), is_running_after=False).reply({})


@pytest.mark.parametrize(("number", "kind"), [(0, NotFoundError), (2, ConflictError)])
def test_there_is_not_exactly_one_run(
    number: int, kind: type[SafepointError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_request, "running_launchers", lambda: [(tmp_path, 1)] * number)
    with pytest.raises(kind):
        ask(tmp_path)
