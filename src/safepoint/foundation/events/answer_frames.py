"""The answer of a program in a pod, as lines of the pod's log: its stdout, its stderr, and how it ended.

A log has one stream, into which any library may write. So the program writes numbered frames, and the last frame says
how the program ended. If the connection breaks, the reader reads the log again from its beginning, and skips the
frames that it has read before.

Container runtimes split a line of a log that is longer than 16 KiB, and a part of a line is not a frame. So each
frame, with its base64 and the words before it, is shorter. A text that is too long for one frame is written in
several.
"""

import base64
import binascii
import io
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO, cast

from safepoint.errors import message_lines

_MARK = "safepoint-answer"
_MOST_CHARACTERS = 3000
"""The limit of characters in one frame. A character has at most 4 bytes in UTF-8, and 3 bytes become 4 in base64."""
_MOST_ENDING_CHARACTERS = 1 << 20


class Part(StrEnum):
    """What a frame contains."""

    STDOUT = "stdout"
    STDERR = "stderr"
    ENDING = "ending"
    """The beginning of an `Ending` that is too long for one frame."""
    END = "end"
    """The last frame: an `Ending`, or its last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the program ended.

    Args:
        code: its exit code.
        message: why the program failed; empty if it did not fail.
        hint: what the reader can do; None without a hint.
    """

    code: int
    message: str = ""
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of the log.

    Args:
        number: the number of the frame, from 0.
        part: what the frame contains.
        text: what the program wrote; in the parts `ENDING` and `END`, its `Ending` as JSON.
    """

    number: int
    part: Part
    text: str


class FrameWriter:
    """Writes frames as lines.

    Args:
        log: the stream that receives the lines.
        shown: text → the text that replaces it in everything that is written. For example, the address of a claim
            replaces the folder where the claim is mounted.
    """

    def __init__(self, log: TextIO, shown: Mapping[str, str]) -> None:
        self._log, self._shown = log, dict(shown)
        self._lock = threading.Lock()
        self._number = 0

    def write(self, part: Part, text: str) -> None:
        """Write a text in as many frames as it needs."""
        with self._lock:
            for piece in _pieces(self._replaced(text)):
                self._write(part, piece)

    def end(self, ending: Ending) -> None:
        """Write the last frame, after frames with the beginning of the ending if it is long.

        A message or a hint of more than 16,384 characters is cut, as in an error message.
        """
        hint = None if ending.hint is None else message_lines(self._replaced(ending.hint))
        message = message_lines(self._replaced(ending.message))
        *first, last = _pieces(json.dumps({"code": int(ending.code), "message": message, "hint": hint}))
        with self._lock:
            for piece in first:
                self._write(Part.ENDING, piece)
            self._write(Part.END, last)

    def stream(self, part: Part, *, is_terminal: bool = False) -> io.TextIOBase:
        """A stream that can replace `sys.stdout` or `sys.stderr`."""
        return _FrameStream(self, part, is_terminal=is_terminal)

    def _replaced(self, text: str) -> str:
        for hidden, shown in self._shown.items():
            text = text.replace(hidden, shown)
        return text

    def _write(self, part: Part, text: str) -> None:
        data = base64.b64encode(text.encode(errors="surrogateescape")).decode()
        self._log.write(f"{_MARK} {self._number} {part} {data}\n")
        self._log.flush()
        self._number += 1


def _pieces(text: str) -> list[str]:
    """The text in parts that each fit into one frame."""
    return [text[begin : begin + _MOST_CHARACTERS] for begin in range(0, len(text), _MOST_CHARACTERS)]


class _FrameStream(io.TextIOBase):
    def __init__(self, writer: FrameWriter, part: Part, *, is_terminal: bool) -> None:
        self._writer, self._part, self._is_terminal = writer, part, is_terminal

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "surrogateescape"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, s: str, /) -> int:
        self._writer.write(self._part, s)
        return len(s)


def read_frame(line: str) -> Frame | None:
    """The frame in a line of the log; None for any other line."""
    words = line.split(" ")
    if len(words) != 4 or words[0] != _MARK or not words[1].isdecimal() or len(words[1]) > 18:
        return None
    try:
        text = base64.b64decode(words[3], validate=True).decode(errors="surrogateescape")
        return Frame(number=int(words[1]), part=Part(words[2]), text=text)
    except (ValueError, binascii.Error):
        return None


class EndingReader:
    """Puts the ending together from the frames that have its parts."""

    def __init__(self) -> None:
        self._text = ""

    def read(self, frame: Frame) -> Ending | None:
        """How the program ended, if this is the last frame; None for all other frames, and if the ending is invalid.

        Args:
            frame: the next frame. Frames of stdout and stderr are ignored.
        """
        if frame.part not in {Part.ENDING, Part.END}:
            return None
        if len(self._text) <= _MOST_ENDING_CHARACTERS:
            self._text += frame.text
        if frame.part is Part.ENDING:
            return None
        text, self._text = self._text, ""
        return None if len(text) > _MOST_ENDING_CHARACTERS else _ending_in(text)


def _ending_in(text: str) -> Ending | None:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    given = cast("dict[str, Any]", found)
    code, hint = given.get("code"), given.get("hint")
    if type(code) is not int or not 0 <= code <= 255:
        return None
    return Ending(code=code, message=str(given.get("message") or ""), hint=None if hint is None else str(hint))
