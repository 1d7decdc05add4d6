"""Tests of safepoint.foundation.events.answer_frames."""

import io

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.events.answer_frames import Ending, EndingReader, Frame, FrameWriter, Part, read_frame

_MOST_LINE_BYTES = 16 << 10


def lines_of(log: io.StringIO) -> list[str]:
    """The lines in the log of a container: the runtime splits those that are longer than 16 KiB."""
    lines = log.getvalue().encode().split(b"\n")
    pieces = [
        line[begin : begin + _MOST_LINE_BYTES]
        for line in lines
        for begin in range(0, len(line) + 1, _MOST_LINE_BYTES)
    ]
    return [piece.decode(errors="replace") for piece in pieces if piece]


def frames_of(log: io.StringIO) -> list[Frame]:
    return [frame for line in lines_of(log) if (frame := read_frame(line)) is not None]


def ending_of(frames: list[Frame]) -> Ending | None:
    reader = EndingReader()
    found = [reader.read(frame) for frame in frames]
    assert found[:-1] == [None] * (len(frames) - 1)
    return found[-1]


def test_text_arrives_character_for_character_beside_lines_of_others() -> None:
    log = io.StringIO()
    writer = FrameWriter(log, {})
    texts = ["a\n", "ü \x1b[31m\r", "x" * 10_000, "\udcff", ""]
    for text in texts:
        writer.stream(Part.STDOUT).write(text)
        log.write("a library writes: this\n")
    writer.end(Ending(code=14, message="it is damaged", hint="see above"))
    frames = frames_of(log)
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert "".join(frame.text for frame in frames[:-1]) == "".join(texts)
    assert frames[-1].part is Part.END
    assert ending_of(frames) == Ending(code=14, message="it is damaged", hint="see above")


def test_folders_of_the_pod_are_shown_as_claims() -> None:
    log = io.StringIO()
    writer = FrameWriter(log, {"/mnt/safepoint/ckpt": "pvc://ckpt"})
    writer.write(Part.STDOUT, "/mnt/safepoint/ckpt/run/checkpoint-20")
    writer.end(Ending(code=1, message="in /mnt/safepoint/ckpt", hint="use /mnt/safepoint/ckpt/a"))
    first, last = map(read_frame, lines_of(log))
    assert first is not None
    assert last is not None
    assert first.text == "pvc://ckpt/run/checkpoint-20"
    assert ending_of([last]) == Ending(code=1, message="in pvc://ckpt", hint="use pvc://ckpt/a")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "safepoint-answer",
        "safepoint-answer x stdout YQ==",
        "safepoint-answer 0 stdin YQ==",
        "safepoint-answer 0 stdout ?",
        f"safepoint-answer {'9' * 99} stdout YQ==",
        "other 0 stdout YQ==",
    ],
)
def test_other_lines_are_no_frames(line: str) -> None:
    assert read_frame(line) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"code": "0"}', '{"code": 256}', "[" * 100_000])
def test_an_invalid_ending_is_none(text: str) -> None:
    log = io.StringIO()
    FrameWriter(log, {}).write(Part.END, text or " ")
    frame = read_frame(lines_of(log)[0])
    assert frame is not None
    assert ending_of([frame]) is None


@pytest.mark.parametrize("letter", ["x", "ü", "€", "\N{GRINNING FACE}", "\udcff"])
def test_text_of_any_letters_arrives(letter: str) -> None:
    """No line is longer than 16 KiB, however many bytes its characters take."""
    log = io.StringIO()
    FrameWriter(log, {}).write(Part.STDOUT, letter * 20_000)
    frames = frames_of(log)
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert "".join(frame.text for frame in frames) == letter * 20_000


@pytest.mark.parametrize("letter", ["x", "ü", "€", "\N{GRINNING FACE}", "\n", '"'])
def test_a_long_ending_arrives(letter: str) -> None:
    log = io.StringIO()
    ending = Ending(code=13, message=letter * 16_000, hint=f"{letter * 16_000}!")
    FrameWriter(log, {}).end(ending)
    assert ending_of(frames_of(log)) == ending


def test_an_ending_without_end_is_cut() -> None:
    """The error outside of the pod states how many characters are missing."""
    log = io.StringIO()
    FrameWriter(log, {}).end(Ending(code=1, message="x" * 10_000_000))
    ending = ending_of(frames_of(log))
    assert ending is not None
    assert SafepointError(ending.message).message == "x" * 16_384 + " … (9,983,616 more characters)"


def test_an_ending_that_no_writer_writes_is_refused() -> None:
    """Its memory is bounded, and a valid ending may follow."""
    reader = EndingReader()
    for number in range(2_000):
        assert reader.read(Frame(number=number, part=Part.ENDING, text="[" * 3000)) is None
    assert len(reader._text) < 2 << 20
    assert reader.read(Frame(number=2_000, part=Part.END, text="")) is None
    assert reader.read(Frame(number=2_001, part=Part.END, text='{"code": 0}')) == Ending(code=0)
