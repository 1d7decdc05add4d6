"""An error that ends the user's program: its exit code, and its summary for the rank's record."""

from safepoint.errors import ExitCode, SafepointError, printable

_MOST_CHARACTERS = 300


def summarize(error: BaseException) -> str:
    """The type of an error and the first line of its message, printable and short."""
    text = next(iter(str(error).splitlines()), "")
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)[:_MOST_CHARACTERS]


def exit_code_after(error: BaseException) -> int:
    """The exit code of a program that ends by an error; for an error of Safepoint, the code in `errors.py`."""
    if isinstance(error, SafepointError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.OK if error.code is None else ExitCode.FAILED
    return ExitCode.FAILED
