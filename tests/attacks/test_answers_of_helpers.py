"""What a pod answers that runs a command: a person who may change the namespace decides what it prints.

No answer ends in a traceback, changes what a terminal shows elsewhere, or goes on for ever.
"""

import base64
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.cli.claims.from_outside import print_part
from safepoint.errors import SafepointError, StorageError
from safepoint.foundation.events.answer_frames import Ending, FrameWriter, Part
from safepoint.jobs.cluster.helper import helper, job_storage
from safepoint.jobs.cluster.helper.helper import HelperError
from safepoint.jobs.cluster.helper.job_storage import JobStorage, list_in_pod, remove_checkpoints
from safepoint.storage.location import parse_location
from tests.support.cluster.saving_jobs import SavingJob

_OUTPUT = "pvc://claim/run"


class Api:
    """A cluster in which a pod has written these lines."""

    namespace = "ns"

    def __init__(self, lines: Iterable[str], job: SavingJob | None = None) -> None:
        self.lines = lines
        self._job = job

    def log(self, *arguments: Any, **options: Any) -> Iterator[str]:
        return iter(self.lines)

    def patch(self, *arguments: Any) -> None:
        """Accept every change."""

    def find(self, kind: str, *arguments: Any) -> Any:
        return self._job.config_map if self._job is not None and kind == "configmaps" else None

    def objects(self, *arguments: Any, **options: Any) -> list[Any]:
        return []


def frame(number: object, part: str, text: str) -> str:
    return f"safepoint-answer {number} {part} {base64.b64encode(text.encode()).decode()}"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every pod print a text on stdout, and end without an error."""

    def print_answer(text: str) -> None:
        monkeypatch.setattr(job_storage, "run_helper", lambda api, request, receive: receive(Part.STDOUT, text))

    return print_answer


NO_NUMBERS = [
    *("", "{}", "[1]", '"x"', "3", "null", "[" * 100_000, '{"deleted": 1e999}', '{"deleted": "\u0663"}'),
    *('{"deleted": -5}', '{"deleted": true}', '{"deleted": 1.5}', '{"deleted": 1, "deleted": 2}', '{"deleted": NaN}'),
    '{"deleted": ' + "9" * 100 + "}",
]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_the_number_of_deleted_checkpoints(text: str, answers: Callable[[str], None]) -> None:
    answers(text)
    job = SavingJob(output=_OUTPUT)
    api: Any = Api([], job)
    with pytest.raises(HelperError, match="cannot be understood"):
        remove_checkpoints(api, job.trainjob)


GOOD = {
    "name": "checkpoint-1",
    "where": "pvc://claim/run/checkpoint-1",
    "step": 1,
    "trigger": "final",
    "created_s": 1.5,
    "kind": "checkpoint",
    "files": 1,
    "bytes": 2,
    "faults": [],
}


@pytest.mark.parametrize(
    "listed",
    [*NO_NUMBERS, "[[]]", "[{}]", *(json.dumps([{**GOOD, name: {"x": []}}]) for name in GOOD)],
)
def test_a_list_of_checkpoints(listed: str, answers: Callable[[str], None]) -> None:
    answers(listed)
    api: Any = Api([])
    with pytest.raises(HelperError, match="cannot be understood"):
        list_in_pod(api, JobStorage(output=_OUTPUT), parse_location(_OUTPUT))
    answers(json.dumps([GOOD]))
    assert list_in_pod(api, JobStorage(output=_OUTPUT), parse_location(_OUTPUT)) == [GOOD]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "line",
    ["x" * 1000, "x", frame(5, "stdout", "x"), frame(0, "stdout", ""), frame(0, "end", "no ending"), "\n"],
    ids=["no frames", "short lines", "the same number", "an empty frame", "no ending", "blank lines"],
)
def test_a_pod_that_prints_for_ever(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_MOST_LOG_CHARACTERS", 1 << 20, raising=False)
    printed = 0

    def lines() -> Iterator[str]:
        nonlocal printed
        while printed < 1 << 19:
            printed += 1
            yield line

    api: Any = Api(lines())
    with pytest.raises(StorageError, match="has printed more than"):
        helper._answer(api, {"metadata": {"name": "j"}}, {"metadata": {"name": "p"}}, lambda part, text: None, "2Gi")
    assert printed < 1 << 19


@pytest.mark.parametrize("code", ["true", "-1", "256", "1e400", '"3"', "9" * 5000])
def test_codes(code: str) -> None:
    api: Any = Api([frame(0, "end", f'{{"code": {code}}}')])
    with pytest.raises(SafepointError):
        helper._answer(api, {"metadata": {"name": "j"}}, {"metadata": {"name": "p"}}, lambda part, text: None, "2Gi")


class SplitLog(io.StringIO):
    """The log of a container whose runtime splits lines that are longer than 16 KiB, as containerd does."""

    def lines(self) -> list[str]:
        """The lines as a reader receives them."""
        size = 16 << 10
        data = [line.encode() for line in self.getvalue().split("\n")]
        split = [line[begin : begin + size] for line in data for begin in range(0, len(line) + 1, size)]
        return [piece.decode(errors="replace") for piece in split if piece]


@pytest.mark.parametrize("letter", ["x", "€", "\N{GRINNING FACE}"])
def test_a_long_answer_of_any_letters(letter: str) -> None:
    """The output, the message and the hint arrive complete."""
    log = SplitLog()
    writer = FrameWriter(log, {})
    text, message, hint = letter * 50_000, letter * 16_000, f"{letter * 16_000}?"
    writer.stream(Part.STDOUT).write(text)
    writer.end(Ending(code=11, message=message, hint=hint))
    api: Any = Api(log.lines())
    received: list[tuple[Part, str]] = []
    job, pod = {"metadata": {"name": "j"}}, {"metadata": {"name": "p"}}
    ending = helper._answer(api, job, pod, lambda part, text: received.append((part, text)), "2Gi")
    assert {part for part, _ in received} == {Part.STDOUT}
    assert "".join(text for _, text in received) == text
    with pytest.raises(HelperError) as caught:
        helper.code_of(ending)
    assert (caught.value.exit_code, caught.value.message, caught.value.hint) == (11, message, hint)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_text_that_the_output_cannot_have(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a checkpoint may have any name; stdout is a file, or a terminal with an older encoding."""
    for part, name in ((Part.STDOUT, "stdout"), (Part.STDERR, "stderr")):
        written = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding=encoding))
        print_part(part, b"\xff".decode(errors="surrogateescape") + "\ud800€ end\n")
        assert written.getvalue().endswith(b" end\n")


@pytest.mark.parametrize("text", ["all good\rno checkpoint is damaged", "\r\x1b[1Aover", "a\r\rb", "\x9b2J\x07"])
def test_a_line_does_not_overwrite_itself(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stdout no character moves the cursor. A line of progress on stderr erases all of what it overwrites."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    for part in (Part.STDOUT, Part.STDERR):
        print_part(part, text)
    assert sys.stdout.getvalue().isprintable()  # type: ignore[attr-defined]
    assert sys.stderr.getvalue().replace("\r\x1b[K", "").isprintable()  # type: ignore[attr-defined]


def test_a_colour_ends_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the pod could hide what this machine prints next."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_part(Part.STDOUT, "\x1b[8mhidden")
    assert sys.stdout.getvalue().endswith("\x1b[0m")  # type: ignore[attr-defined]
