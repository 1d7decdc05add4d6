"""How failures of commands are reported: one line for a person, or one JSON document for a program, and an exit code.

Promises: with `--json` among the command's options, the last line on stderr of every failure is
`{"type": "exit_error", "code": …, "message": …, "hint": …}`, whatever failed: the arguments, a settings file, the
work, writing the answer, or Safepoint itself. A reader that closes stdout early, such as `head`, ends the command
without a message.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from safepoint.cli.lazy import Invocation, LazyGroup
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
    as_json = False
    try:
        invocation = Invocation.of(root, arguments)
        as_json = invocation.asks_for_json
        try:
            code = _run(invocation)
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                raise
            return _report_error(error, invocation)
    except KeyboardInterrupt:
        code = ExitCode.SIGINT
    except (BrokenPipeError, SystemExit) as error:
        # Typer ends with SystemExit when it has met a closed pipe itself.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _forget_unwritten()
        return _CLOSED_PIPE
    if as_json:
        report_to_program(code)
    return code


def _run(invocation: Invocation) -> int:
    extra: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") or os.environ.get("CI") else {}
    if invocation.names:
        from safepoint.cli.defaults import default_map

        extra["default_map"] = default_map(invocation)
    code = invocation.root.main(list(invocation.arguments), prog_name="safepoint", standalone_mode=False, **extra)
    stdout: Any = sys.stdout
    if stdout is None:
        raise SafepointError("stdout is closed; the answer is lost", hint="redirect it, to /dev/null for example")
    stdout.flush()
    return code if isinstance(code, int) else ExitCode.OK


def report_to_program(code: int) -> None:
    """Write the line for a program, when a command has ended with `code` and explained it to people already."""
    if code != ExitCode.OK:
        _report(code, SafepointError(_MEANINGS.get(code, f"it ended with {code}")), as_json=True)


def _report(code: int, error: SafepointError, *, as_json: bool) -> int:
    document = {"type": "exit_error", "code": int(code), "message": error.message, "hint": error.hint}
    sys.stderr.write(f"{json.dumps(document) if as_json else f'safepoint: error: {error}'}\n")
    sys.stderr.flush()
    return code


def _report_error(error: Exception, invocation: Invocation) -> int:
    """Report an exception that has ended the command; returns the exit code."""
    code, as_json = ExitCode.FAILED, invocation.asks_for_json
    if isinstance(error, SafepointError):
        # A training has fewer codes, and ends with 13 when the store refuses its keys.
        code = ExitCode.NOT_AUTHORISED if isinstance(error, AccessDeniedError) else error.exit_code
        explained = SafepointError(_with_origin(error.message, invocation), hint=error.hint)
    elif isinstance(error, typer.TyperException):
        code = error.exit_code
        if not as_json and (show := getattr(error, "show", None)) is not None:
            show()  # with the command's usage
            return code
        context = getattr(error, "ctx", None)
        command = "safepoint" if context is None else " ".join(context.command_path.split())
        explained = SafepointError(error.format_message().strip(), hint=f"see `{command} --help`")
    elif isinstance(error, typer.Abort):
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        explained = SafepointError("no answer was given; nothing was done")
    elif isinstance(error, OSError) and not _can_be_written():
        _forget_unwritten()
        explained = SafepointError(f"the answer cannot be written to stdout: {error.strerror}")
    else:
        traceback.print_exception(error)
        if not as_json:
            return code
        hint = "this is a fault in Safepoint; report it with the lines above"
        explained = SafepointError(f"{type(error).__name__}: {error}", hint=hint)
    return _report(code, explained, as_json=as_json)


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
