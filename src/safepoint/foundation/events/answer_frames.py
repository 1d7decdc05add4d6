"""The answer of a program in a pod, as lines of the pod's log: its stdout, its stderr, and how it ended.

A log has one stream, into which any library may write. So the program writes numbered frames, and the last frame says
how the program ended. If the connection breaks, the reader reads the log again from its beginning, and skips the
frames that it has read before.
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

_MARK = "safepoint-answer"
_MOST_CHARACTERS = 4096
"""The limit of characters in one frame. The log of a pod splits lines that are longer than 16 KiB."""


class Part(StrEnum):
    """What a frame contains."""

    STDOUT = "stdout"
    STDERR = "stderr"
    END = "end"


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
        text: what the program wrote; in the last frame, its `Ending` as JSON.
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
        text = self._replaced(text)
        with self._lock:
            for begin in range(0, len(text), _MOST_CHARACTERS):
                self._write(part, text[begin : begin + _MOST_CHARACTERS])

    def end(self, ending: Ending) -> None:
        """Write the last frame."""
        hint = None if ending.hint is None else self._replaced(ending.hint)
        document = {"code": int(ending.code), "message": self._replaced(ending.message), "hint": hint}
        with self._lock:
            self._write(Part.END, json.dumps(document))

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


def read_ending(frame: Frame) -> Ending | None:
    """How the program ended, by its last frame; None if the frame is not valid."""
    try:
        found: Any = json.loads(frame.text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    given = cast("dict[str, Any]", found)
    code, hint = given.get("code"), given.get("hint")
    if type(code) is not int or not 0 <= code <= 255:
        return None
    return Ending(code=code, message=str(given.get("message") or ""), hint=None if hint is None else str(hint))
