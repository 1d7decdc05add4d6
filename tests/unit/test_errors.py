"""Errors: what happened, what to do, and the exit code that says so."""

import pytest

from safepoint import errors
from safepoint.errors import ExitCode, Interrupted, SafepointError

CODES = {
    "SafepointError": 1,
    "UsageError": 2,
    "PartlyDoneError": 3,
    "NotFoundError": 10,
    "FolderNotFoundError": 10,
    "ConflictError": 11,
    "StorageError": 13,
    "NoRoomError": 13,
    "ObjectNotFoundError": 13,
    "ConditionError": 13,
    "AccessDeniedError": 13,
    "TransientError": 13,
    "CheckpointError": 14,
    "ManifestError": 14,
    "UnreadableError": 14,
    "ImageError": 14,
    "NothingValidError": 14,
    "WaitTimeoutError": 15,
    "UnsupportedError": 16,
    "MissingExtraError": 16,
    "SaveError": 1,
    "FreezeError": 1,
    "PeerError": 1,
}


def test_every_error_has_the_exit_code_of_the_table() -> None:
    """The codes are a promise to schedulers; a new error must be added to the table."""
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, SafepointError)
    }
    assert {name: int(kind.exit_code) for name, kind in kinds.items()} == CODES


def test_the_hint_follows_the_message() -> None:
    """One line holds both, and a message alone stands alone."""
    assert str(SafepointError("it broke", hint="mend it")) == "it broke — mend it"
    assert str(SafepointError("it broke")) == "it broke"


def test_an_interruption_passes_through_except_exception() -> None:
    """The user's `except Exception` does not swallow it, and the interpreter exits with 75."""
    interrupted = Interrupted(ExitCode.INTERRUPTED_SAVED, "saved")
    assert not isinstance(interrupted, Exception)
    assert interrupted.code == 75
    with pytest.raises(SystemExit):
        raise interrupted


def test_a_message_of_millions_of_characters() -> None:
    """It is cut before it is searched for credentials, which would take minutes."""
    error = SafepointError("a:/:" * 8_000_000)
    assert len(error.message) < 20_000
    assert error.message.endswith("… (31,983,616 more characters)")
