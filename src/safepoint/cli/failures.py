"""How failures of commands are reported: one line for a person, or one JSON document for a program, and an exit code.

Promises: with `--json` among the command's options, the last line on stderr of every failure is
`{"type": "exit_error", "code": …, "message": …, "hint": …}`, whatever failed: the arguments, a settings file, the
work, writing the answer, or Safepoint itself. A reader that closes stdout early, such as `head`, ends the command
without a message.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import typer

from safepoint.cli.invocation import Invocation
from safepoint.cli.lazy import LazyGroup
from safepoint.errors import AccessDeniedError, ExitCode, SafepointError

_CLOSED_PIPE = 141
"""128 + SIGPIPE, as a shell reports for a program that a closed pipe has ended."""
_MEANINGS: dict[int, str] = {
    ExitCode.FAILED: "it failed",
    ExitCode.USAGE: "an argument is invalid",
    ExitCode.NOTHING_VALID: "a checkpoint is damaged, or there is none",
    ExitCode.CONFLICT: "another run holds the output folder, or the checkpoint contradicts the settings",
    ExitCode.STORAGE: "the output location cannot be used",
    ExitCode.INTERRUPTED_SAVED: "interrupted and saved; run the same command again to continue",
    ExitCode.SIGINT: "interrupted by SIGINT",
    ExitCode.TERMINATED_UNSAVED: "terminated before a save was possible; the newest older checkpoint is unchanged",
}


def run_command(root: LazyGroup, arguments: Sequence[str]) -> int:
    """Run `safepoint ARGUMENTS…` and report a failure.

    Returns:
        The exit code for this process.
    """
    try:
        invocation = Invocation.of(root, arguments)
        sys.excepthook = _Unexpected(invocation)
        failure = _run(invocation)
    except BrokenPipeError:
        return _leave_quietly()
    except KeyboardInterrupt:
        return ExitCode.SIGINT
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Typer has seen it first
            return _leave_quietly()
        raise
    if isinstance(failure, int):
        if invocation.asks_for_json:
            report_to_program(failure)
        return failure
    sys.stderr.write(failure.json if invocation.asks_for_json else failure.line)
    sys.stderr.flush()
    return failure.code


def _run(invocation: Invocation) -> "int | _Failure":
    """Run it: the exit code where the command has explained it, or the failure that is still to be reported."""
    plain: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") or os.environ.get("CI") else {}
    try:
        if invocation.names:
            from safepoint.cli.defaults import default_map

            plain["default_map"] = default_map(invocation)
        outcome = invocation.root.main(
            list(invocation.arguments), prog_name="safepoint", standalone_mode=False, **plain
        )
        _end_answer()
    except SafepointError as error:
        return _Failure(exit_code_of(error), _with_origin(error.message, invocation), error.hint)
    except typer.TyperException as error:
        return _usage(error, invocation)
    except BrokenPipeError:
        raise
    except OSError as error:
        if _can_be_written():
            raise
        _forget_unwritten()
        return _Failure(ExitCode.FAILED, f"the answer cannot be written to stdout: {error.strerror}", None)
    except typer.Abort as error:
        was_interrupted = isinstance(error.__context__, KeyboardInterrupt)
        no_answer = _Failure(ExitCode.FAILED, "no answer was given; nothing was done", None)
        return ExitCode.SIGINT if was_interrupted else no_answer
    return outcome if isinstance(outcome, int) else ExitCode.OK


def report_to_program(code: int) -> None:
    """Write the line for a program, when a command has ended with `code` and explained it to people already."""
    if code != ExitCode.OK:
        sys.stderr.write(_Failure(code, _MEANINGS.get(code, f"it ended with {code}"), None).json)
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Failure:
    code: int
    message: str
    hint: str | None

    @property
    def line(self) -> str:
        """For a person."""
        return f"safepoint: error: {f'{self.message} — {self.hint}' if self.hint else self.message}\n"

    @property
    def json(self) -> str:
        """For a program."""
        document = {"type": "exit_error", "code": int(self.code), "message": self.message, "hint": self.hint}
        return f"{json.dumps(document)}\n"


def exit_code_of(error: SafepointError) -> int:
    """The exit code of a command. A training has fewer codes, and ends with 13 when the store refuses its keys."""
    return ExitCode.NOT_AUTHORISED if isinstance(error, AccessDeniedError) else error.exit_code


def _usage(error: typer.TyperException, invocation: Invocation) -> int | _Failure:
    if not invocation.asks_for_json and (show := getattr(error, "show", None)) is not None:
        show()  # with the command's usage
        return error.exit_code
    context = getattr(error, "ctx", None)
    command = "safepoint" if context is None else " ".join(context.command_path.split())
    return _Failure(error.exit_code, error.format_message().strip(), f"see `{command} --help`")


def _end_answer() -> None:
    stdout: Any = sys.stdout
    if stdout is None:
        raise SafepointError("stdout is closed; the answer is lost", hint="redirect it, to /dev/null for example")
    stdout.flush()


def _leave_quietly() -> int:
    _forget_unwritten()
    return _CLOSED_PIPE


def _can_be_written() -> bool:
    """Whether stdout can be written; the line that tries it precedes a traceback."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _forget_unwritten() -> None:
    """Drop what is buffered and cannot be written: the interpreter would complain about it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                os.dup2(nowhere, stream.fileno())


class _Unexpected:
    """An exception that is a fault in Safepoint: the traceback, and below it the line that a program reads."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        if self._invocation.asks_for_json:
            hint = "this is a fault in Safepoint; report it with the lines above"
            sys.stderr.write(_Failure(ExitCode.FAILED, f"{kind.__name__}: {error}", hint).json)


def _with_origin(message: str, invocation: Invocation) -> str:
    """`message`, and where the options that it names were set, unless they were typed."""
    named = {word.strip(":,.;'\"()") for word in message.split() if word.startswith("--")} - invocation.options
    if not named or not invocation.names:
        return message
    from safepoint.cli.defaults import effective
    from safepoint.foundation.configuration import Configuration

    try:
        settings = list(effective(invocation.root, invocation.names, Configuration.load()))
    except SafepointError:
        return message
    origins = {f"--{item.option}": item.origin for item in settings if item.origin}
    clauses = [f"{name} is set by {origins[name]}" for name in sorted(named & origins.keys())]
    return f"{message} ({', '.join(clauses)})" if clauses else message
