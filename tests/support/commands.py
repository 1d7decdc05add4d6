"""Runs `safepoint …` in this process, as the console script does."""

import contextlib
import io
import json
import logging
from dataclasses import dataclass
from typing import Any

from safepoint.cli.failures import run_command
from safepoint.cli.main import root


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    @property
    def exit_error(self) -> Any:
        """The JSON document in the last line of stderr."""
        return json.loads(self.stderr.splitlines()[-1])


def safepoint(*arguments: object, command: Any = None) -> Outcome:
    """Run a command and capture its output; `command` replaces Safepoint's own entry point."""
    log = logging.getLogger("safepoint")
    logging_before = log.handlers[:], log.level, log.propagate
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                code = run_command(command or root(), [str(argument) for argument in arguments])
            except SystemExit as left:
                code = int(left.code or 0)
    finally:
        log.handlers[:], log.level, log.propagate = logging_before
    return Outcome(code=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())
