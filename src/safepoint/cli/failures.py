"""Reports the failure of a command: one line for a person, or one JSON document for a program, and an exit code.

Promises: if the command is called with `--json`, the last line that each failure writes to stderr is
`{"type": "exit_error", "code": …, "message": …, "hint": …}`. Failures include invalid arguments, an invalid settings
file, output that cannot be written, and bugs of Safepoint. If the program that reads stdout ends early, as `head`
does, the command ends without a message.
"""

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, cast

import typer

from safepoint.cli.interruption import Interrupted
from safepoint.cli.lazy import Invocation, LazyGroup
from safepoint.errors import (
    AccessDeniedError,
    ExitCode,
    MissingExtraError,
    SafepointError,
    error_line,
    printable,
    printable_lines,
    require_torch,
)

# Before 0.28, Typer raises Click's exceptions. Later releases have exceptions of their own, and do not need Click.
_COMMAND_ERROR: Any = getattr(typer, "TyperException", None) or importlib.import_module("click").ClickException
_CLOSED_PIPE = 141
"""128 + SIGPIPE: the exit code that a shell reports for a program that SIGPIPE has ended."""
_OUTSIDE_FAULTS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG),
}
"""Errors with a cause outside Safepoint, such as a full disk; they are reported without a traceback."""
_MEANINGS: dict[int, str] = {
    ExitCode.FAILED: "the command failed",
    ExitCode.USAGE: "an argument is invalid",
    ExitCode.NOTHING_VALID: "a checkpoint is damaged, or there is no checkpoint",
    ExitCode.CONFLICT: "another run holds the output folder, or the checkpoint contradicts the settings",
    ExitCode.STORAGE: "the output location cannot be used",
    ExitCode.INTERRUPTED_SAVED: "interrupted and saved; run the same command again to continue",
    ExitCode.SIGINT: "interrupted by SIGINT",
    ExitCode.TERMINATED_UNSAVED: "terminated before a save was possible; earlier checkpoints are unchanged",
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
    except Interrupted as interrupt:
        message = f"interrupted by {interrupt.number.name}: {interrupt.effect}"
        return _report(interrupt.exit_code, SafepointError(message), as_json=as_json)
    except KeyboardInterrupt:
        code = ExitCode.SIGINT
    except (BrokenPipeError, SystemExit) as error:
        # After a BrokenPipeError, Typer raises SystemExit.
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
        raise SafepointError("stdout is closed; the answer is lost", hint="redirect stdout, for example to /dev/null")
    stdout.flush()
    return code if isinstance(code, int) else ExitCode.OK


def report_to_program(code: int) -> None:
    """Write the JSON line for a command that has ended with `code` and has printed its reason itself."""
    if code != ExitCode.OK:
        _report(code, SafepointError(_MEANINGS.get(code, f"the command ended with exit code {code}")), as_json=True)


def _report(code: int, error: SafepointError, *, as_json: bool) -> int:
    sys.stderr.write(error_line(code, error, as_json=as_json))
    sys.stderr.flush()
    return code


def explain(error: Exception) -> tuple[ExitCode, SafepointError] | None:
    """The exit code and the message for an error whose cause is outside Safepoint's code; None for other errors."""
    if isinstance(error, SafepointError):
        # If a store or a cluster refuses the credentials, a command ends with 12, and a training with 13.
        return ExitCode.NOT_AUTHORISED if isinstance(error, AccessDeniedError) else error.exit_code, error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in {"torch", "numpy"}:
        try:
            require_torch("this command")
        except MissingExtraError as missing:
            return missing.exit_code, missing
    if isinstance(error, OSError) and error.errno in _OUTSIDE_FAULTS:
        where = printable(str(error.filename or "a file"))
        return ExitCode.STORAGE, SafepointError(f"{where}: {error.strerror}; the command was not completed")
    return None


def _report_error(error: Exception, invocation: Invocation) -> int:
    """Report the exception that has ended the command, and return the exit code."""
    code, as_json = ExitCode.FAILED, invocation.asks_for_json
    known = explain(error)
    if isinstance(error, SafepointError) and known is not None:
        code, explained = known[0], SafepointError(_with_origin(error.message, invocation), hint=error.hint)
    elif isinstance(error, _COMMAND_ERROR):
        from safepoint.cli.defaults import invalid_value

        refused = cast("Any", error)
        code = refused.exit_code
        if (invalid := invalid_value(refused, invocation)) is not None:
            return _report(code, invalid, as_json=as_json)
        if not as_json and (show := getattr(refused, "show", None)) is not None:
            refused.message = printable_lines(refused.message)
            show()  # this text includes the usage of the command
            return code
        context = getattr(refused, "ctx", None)
        command = "safepoint" if context is None else " ".join(context.command_path.split())
        explained = SafepointError(refused.format_message().strip(), hint=f"see `{command} --help`")
    elif isinstance(error, typer.Abort):
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        explained = SafepointError("the question was not answered; nothing was done")
    elif isinstance(error, OSError) and not _can_be_written():
        _forget_unwritten()
        explained = SafepointError(f"the answer cannot be written to stdout: {error.strerror}")
    elif known is not None:
        code, explained = known
    else:
        sys.stderr.write(printable_lines("".join(traceback.format_exception(error))))
        if not as_json:
            return code
        hint = "this is a bug in Safepoint; report it with the lines above"
        explained = SafepointError(f"{type(error).__name__}: {error}", hint=hint)
    return _report(code, explained, as_json=as_json)


def _can_be_written() -> bool:
    """Whether stdout can be written. The check writes an empty line to stdout, before the error message."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _forget_unwritten() -> None:
    """Discard buffered output that cannot be written, so that the interpreter reports no error when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                os.dup2(nowhere, stream.fileno())


def _with_origin(message: str, invocation: Invocation) -> str:
    """The message. If it names an option that a file or a variable sets, this file or variable is added."""
    named = {word.strip(":,.;'\"()") for word in message.split() if word.startswith("--")}
    named -= invocation.options.keys()
    if not named or not invocation.names:
        return message
    from safepoint.cli.defaults import effective, place_of
    from safepoint.foundation.configuration import Configuration

    try:
        configuration = Configuration.load()
        place = place_of(invocation, configuration)
        settings = list(effective(invocation.root, invocation.names, configuration, place=place))
    except SafepointError:
        return message
    origins = {f"--{item.option}": item.origin for item in settings if item.origin}
    clauses = [f"{name} is set by {origins[name]}" for name in sorted(named & origins.keys())]
    return f"{message} ({', '.join(clauses)})" if clauses else message
