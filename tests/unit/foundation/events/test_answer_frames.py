"""Tests of safepoint.foundation.events.answer_frames."""

import io

import pytest

from safepoint.foundation.events.answer_frames import Ending, FrameWriter, Part, read_ending, read_frame


def lines_of(log: io.StringIO) -> list[str]:
    return log.getvalue().splitlines()


def test_text_arrives_character_for_character_beside_lines_of_others() -> None:
    log = io.StringIO()
    writer = FrameWriter(log, {})
    texts = ["a\n", "ü \x1b[31m\r", "x" * 10_000, "\udcff", ""]
    for text in texts:
        writer.stream(Part.STDOUT).write(text)
        log.write("a library writes: this\n")
    writer.end(Ending(code=14, message="it is damaged", hint="see above"))
    frames = [frame for line in lines_of(log) if (frame := read_frame(line)) is not None]
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert "".join(frame.text for frame in frames[:-1]) == "".join(texts)
    assert max(map(len, lines_of(log))) < 16 << 10  # a log splits longer lines
    assert frames[-1].part is Part.END
    assert read_ending(frames[-1]) == Ending(code=14, message="it is damaged", hint="see above")


def test_folders_of_the_pod_are_shown_as_claims() -> None:
    log = io.StringIO()
    writer = FrameWriter(log, {"/mnt/safepoint/ckpt": "pvc://ckpt"})
    writer.write(Part.STDOUT, "/mnt/safepoint/ckpt/run/checkpoint-20")
    writer.end(Ending(code=1, message="in /mnt/safepoint/ckpt", hint="use /mnt/safepoint/ckpt/a"))
    first, last = map(read_frame, lines_of(log))
    assert first is not None
    assert last is not None
    assert first.text == "pvc://ckpt/run/checkpoint-20"
    assert read_ending(last) == Ending(code=1, message="in pvc://ckpt", hint="use pvc://ckpt/a")


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
    assert read_ending(frame) is None
