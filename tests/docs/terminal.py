"""A terminal for the guides: types into a shell or an interpreter, reads what it prints, and presses ^C."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.docs.markdown import Step, pattern, squeezed
from tests.support.patience import PATIENCE

_LIMIT_S = 180.0 * PATIENCE
_MARK = "\x1e"
_END = re.compile(f"\n{_MARK}(\\d+){_MARK}\n")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_BASH = ["bash", "--noprofile", "--norc"]
_BASH_BEGIN = "trap : INT\n"  # ^C is for the command, which does not inherit this, and not for bash
# The command's exit code is there for the next one: `echo $?`.
_BASH_STEP = "{ %s\n} </dev/null\n" + rf"code=$?; printf '\n{_MARK}%%d{_MARK}\n' $code; (exit $code)" + "\n"

_PYTHON = f"""
import code, json, sys
sys.path.insert(0, "")
errors = []
class Console(code.InteractiveInterpreter):
    def write(self, text):
        errors.append(text)
        sys.stdout.write(text)
console = Console({{"__name__": "__main__"}})
for line in sys.stdin:
    errors.clear()
    if console.runsource(json.loads(line) + "\\n", "<guide>", "single"):
        console.write("this statement is not complete\\n")
    print("\\n{_MARK}%d{_MARK}" % bool(errors), flush=True)
"""


class Terminal:
    """One session in a shell or an interpreter: a context manager that ends it.

    Args:
        folder: where it begins.
        language: `console` for bash, `pycon` for Python.
    """

    def __init__(self, folder: Path, language: str) -> None:
        self._is_bash = language == "console"
        self._process = subprocess.Popen(
            # A shell may ignore ^C for processes in the background, and programs inherit that.
            ["env", "--default-signal=INT", *(_BASH if self._is_bash else [sys.executable, "-u", "-c", _PYTHON])],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # for ^C, which is a signal to all in the foreground
        )
        if self._is_bash:
            self._type(_BASH_BEGIN)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass

    def do(self, step: Step) -> int:
        """Type the step, press ^C where it says so, and compare what is printed with what the step shows.

        Returns:
            The exit code; of Python 1 where something was raised.

        Raises:
            AssertionError: something else is printed.
        """
        if self._is_bash:
            self._type(_BASH_STEP % step.typed)
        else:
            self._type(json.dumps(step.typed) + "\n")
        deadline = time.monotonic() + _LIMIT_S
        raw, at = "", 0
        *before, last = step.parts
        for part in before:
            while not (found := pattern(part).match(_lines(raw), at)):
                assert not _END.search(raw), f"it ended before ^C\n{_difference(step, raw)}"
                raw += self._read(step, raw, deadline)
            at = found.end()
            os.killpg(self._process.pid, signal.SIGINT)
        while not (end := _END.search(raw)):
            raw += self._read(step, raw, deadline)
        raw = raw[: end.start()] + "\n"
        printed = _lines(raw)[at:].rstrip("\n") + "\n"
        assert pattern(last or ("",)).fullmatch(printed), _difference(step, raw)
        return int(end[1])

    def _type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _read(self, step: Step, raw: str, deadline: float) -> str:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"not done within {_LIMIT_S:.0f} s\n{_difference(step, raw)}"
        data = os.read(output, 1 << 16)
        assert data, f"the shell has ended\n{_difference(step, raw)}"
        return data.decode(errors="replace")


def _lines(raw: str) -> str:
    """The complete lines as a terminal shows them: without colours, and without overwritten text."""
    whole = _COLOURS.sub("", raw[: raw.rfind("\n") + 1])
    return "".join(f"{squeezed(line.rstrip().split(chr(13))[-1])}\n" for line in whole.split("\n")[:-1])


def _difference(step: Step, raw: str) -> str:
    return "\n".join(["$ " + step.typed, "--- the guide shows", *step.printed, "--- it printed", _lines(raw)])


__all__ = ["Terminal"]
