"""An error that ends the user's program."""

import pytest

from safepoint.errors import ExitCode, Interrupted, NothingValidError
from safepoint.training.outcome.program_error import exit_code_after, summarize


def test_the_summary_of_an_error() -> None:
    """Its type and its first line, without control characters and cut to a maximum."""
    assert summarize(ValueError("one\ntwo")) == "ValueError: one"
    assert summarize(KeyError()) == "KeyError"
    assert summarize(ValueError("\x1b[2J")) == "ValueError: \\x1b[2J"
    assert len(summarize(ValueError("x" * 10_000))) == 300


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(7), 7),
        (SystemExit("a text"), 1),
        (SystemExit(""), 1),
        (NothingValidError("x"), 14),
        (Interrupted(ExitCode.INTERRUPTED_SAVED, "x"), 75),
    ],
)
def test_the_exit_code_after_an_error(error: BaseException, code: int) -> None:
    """As the interpreter has it, and Safepoint's own."""
    assert exit_code_after(error) == code
