"""How a command ends that fails: one line for a person, or one JSON document for a program, and an exit code.

Promises: with `--json` among the command's options, the last line on stderr of every failure is
`{"type": "exit_error", "code": …, "message": …, "hint": …}`, whatever failed: the arguments, a settings file, the
work, writing the answer, or Safepoint itself. A reader that closes stdout early, such as `head`, ends the command
quietly.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from safepoint.cli.lazy import CommandGroup, own_options
from safepoint.errors import AccessDeniedError, ExitCode, SafepointError

_CLOSED_PIPE = 141
"""128 + SIGPIPE, as a shell reports of programs that leave when nobody reads them."""
_MEANINGS: dict[int, str] = {
    ExitCode.FAILED: "it failed",
    ExitCode.USAGE: "the arguments cannot be meant",
    ExitCode.NOTHING_VALID: "a checkpoint is damaged, or there is none",
    ExitCode.CONFLICT: "somebody else holds the output folder, or the checkpoint contradicts the settings",
    ExitCode.STORAGE: "the place for checkpoints cannot be used",
    ExitCode.INTERRUPTED_SAVED: "interrupted, and saved; the same command goes on from there",
    ExitCode.SIGINT: "interrupted by SIGINT",
    ExitCode.TERMINATED_UNSAVED: "terminated before anything could be saved; an older checkpoint still stands",
}


def run_command(root: CommandGroup, arguments: Sequence[str]) -> int:
    """Run `safepoint ARGUMENTS…` to its end and say what went wrong.

    Returns:
        The exit code for this process.
    """
    sys.excepthook = _Unexpected(root, arguments)
    try:
        return _run(root, arguments)
    except BrokenPipeError:
        return _leave_quietly()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Typer has seen it first
            return _leave_quietly()
        raise


def _run(root: CommandGroup, arguments: Sequence[str]) -> int:
    plain: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") or os.environ.get("CI") else {}
    try:
        outcome = root.main(list(arguments), prog_name="safepoint", standalone_mode=False, **plain)
        _end_answer()
    except SafepointError as error:
        failure = _Failure(exit_code_of(error), _with_origin(error.message, root, arguments), error.hint)
    except typer.TyperException as error:
        if not asks_for_json(root, arguments) and (show := getattr(error, "show", None)) is not None:
            show()  # with the command's usage
            return error.exit_code
        failure = _usage(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if _can_be_written():
            raise
        _forget_unwritten()
        failure = _Failure(ExitCode.FAILED, f"the answer cannot be written to stdout: {error.strerror}", None)
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            if asks_for_json(root, arguments):
                tell_program(ExitCode.SIGINT)
            return ExitCode.SIGINT
        failure = _Failure(ExitCode.FAILED, "no answer was given; nothing was done", None)
    else:
        code = outcome if isinstance(outcome, int) else ExitCode.OK
        if code == ExitCode.OK or not asks_for_json(root, arguments):
            return code
        tell_program(code)
        return code
    sys.stderr.write(failure.json if asks_for_json(root, arguments) else failure.line)
    sys.stderr.flush()
    return failure.code


def tell_program(code: int) -> None:
    """The line for a program, when a command ends with `code` and people have been told why."""
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
    """The exit code of a command; a training knows fewer of them, and says 13 when the store refuses its keys."""
    return ExitCode.NOT_AUTHORISED if isinstance(error, AccessDeniedError) else error.exit_code


def _usage(error: typer.TyperException) -> _Failure:
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
    """Whether stdout takes anything; the line that tries it stands before a traceback."""
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
    """What nobody expected: the traceback, and behind it the line that a program reads."""

    def __init__(self, root: CommandGroup, arguments: Sequence[str]) -> None:
        self._root = root
        self._arguments = arguments

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        if asks_for_json(self._root, self._arguments):
            hint = "this is a fault in Safepoint; report it with the lines above"
            sys.stderr.write(_Failure(ExitCode.FAILED, f"{kind.__name__}: {error}", hint).json)


def asks_for_json(root: CommandGroup, arguments: Sequence[str]) -> bool:
    """Whether `--json` is said to one of our commands; to a program that is run it may be said, too."""
    command, _, rest = _innermost(root, arguments)
    # Where there is no such command, whoever says `--json` still reads JSON.
    return "--json" in (rest if isinstance(command, TyperGroup) else own_options(command, rest))


def _innermost(
    root: CommandGroup, arguments: Sequence[str]
) -> tuple[TyperCommand | TyperGroup, tuple[str, ...], Sequence[str]]:
    """The command that `arguments` name, as far as there is one, its names, and the arguments behind them."""
    command: TyperCommand | TyperGroup = root
    path: tuple[str, ...] = ()
    rest = list(arguments)
    while isinstance(command, CommandGroup):
        names = [argument for argument in rest if not argument.startswith("-")]
        if not names or names[0] not in command.commands:
            break
        command, path, rest = command.load(names[0]), (*path, names[0]), rest[rest.index(names[0]) + 1 :]
    return command, path, rest


def _with_origin(message: str, root: CommandGroup, arguments: Sequence[str]) -> str:
    """`message`, and where the options that it names come from, unless they were typed."""
    from safepoint.cli.defaults import origins

    command, path, rest = _innermost(root, arguments)
    if not isinstance(command, TyperCommand):
        return message
    named = {word.strip(":,.;'\"()") for word in message.split() if word.startswith("--")}
    try:
        found = origins(command, path)
    except SafepointError:
        return message
    said = set(own_options(command, rest))
    clauses = [f"{name} is set by {found[name]}" for name in sorted(named - said) if name in found]
    return f"{message} ({', '.join(clauses)})" if clauses else message
