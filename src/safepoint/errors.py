"""The exceptions of Safepoint, each with its exit code.

The tree:

```
SafepointError                 base of all of them
├── UsageError            2   a setting or an argument is invalid
├── PartlyDoneError       3   a part is done, and the rest failed
├── NotFoundError        10   a job, checkpoint or connection does not exist
├── ConflictError        11   another process uses the folder, or a setting or request conflicts with what exists
├── StorageError         13   a folder, an object store or a cluster cannot be used
│   ├── ObjectNotFoundError  13   there is no object under this key
│   ├── FolderNotFoundError  10   a command was given a folder that does not exist
│   ├── ConditionError       13   another writer was first
│   ├── AccessDeniedError    13   wrong key, no permission; 12 in commands that do not train
│   ├── NoRoomError          13   a disk has too little free space
│   └── TransientError       13   busy, slow, cut off or out of reach: the same request may succeed later
├── CheckpointError      14   a checkpoint is damaged, or has a layout that Safepoint cannot read
│   ├── ManifestError    14   the manifest itself is unreadable or unacceptable
│   └── UnreadableError  14   an object of the checkpoint cannot be read, but others can
├── ImageError           14   a process image is damaged, hostile, or of another version
├── WaitTimeoutError     15   the work takes longer than the caller waits
├── NothingValidError    14   there is no valid checkpoint
├── UnsupportedError     16   not supported on this machine or in this installation
│   └── MissingExtraError    16   a package that an extra of Safepoint installs is missing
├── SaveError             1   a save failed, or was not complete in time
├── FreezeError           1   processes could not be frozen or restored
└── PeerError             1   another rank has ended or disagrees
Interrupted (SystemExit)      ends the user's script when the run stops early:
                         75   the state is saved; 143 if it is not, 13 if uploads fail
```

The rule for messages: say what happened, what was done about it, and what the reader can do.
"""

import copy
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Self

_ADDRESS = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,20}:/{1,2})"
    r"""(?:[^\s/?#"<>]{0,1000}@|[^\s/:@"<>]{0,100}:[^\s"<>]{0,1000}@)"""
)
"""The beginning of a URL with a user name or password, even if these have characters that should be encoded."""
_PARAMETER = re.compile(
    r"(?P<name>[?&](?:x-amz-|x-goog-|sig|[\w-]{0,40}(?:token|secret|password|key|credential))[\w-]{0,40}=)"
    r"""[^\s&#"<>\\]+""",
    re.IGNORECASE,
)


_MOST_CHARACTERS = 16_384
_MOST_IN_END = 64
_CUT_OFF = re.compile(r" … \([0-9,]{1,30} more characters\)\Z")
"""The end of a text that `message_lines` has cut."""


def without_credentials(text: str) -> str:
    """`text` without the user names, passwords and signatures that are in its URLs."""
    if ":/" not in text:
        return text
    if "@" in text:
        text = _ADDRESS.sub(r"\g<scheme>", text)
    return _PARAMETER.sub(r"\g<name>...", text)


def printable(text: str) -> str:
    """`text` as one line. Credentials are removed, and unprintable characters are escaped.

    So the line cannot move a terminal's cursor, and cannot hide the text that the terminal prints after the line.
    """
    text = without_credentials(text)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """Several lines, each of them `printable`; tabs become spaces."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def message_lines(text: str) -> str:
    """`printable_lines` of the first 16,384 characters of a message, and the number of further characters, if any.

    A message may contain the answer of a server, which may be very long. If this function has cut a text, it does not
    cut the result again.
    """
    end = _CUT_OFF.search(text, max(0, len(text) - _MOST_IN_END))
    left_out = len(text) - _MOST_CHARACTERS - (0 if end is None else len(end[0]))
    if left_out <= 0:
        return printable_lines(text)
    return f"{printable_lines(text[:_MOST_CHARACTERS])} … ({left_out:,} more characters)"


_translate: list[Callable[[str], str]] = []


def name_options(translate: Callable[[str], str]) -> None:
    """From now on, pass every message of this process to `translate`, which replaces the names of options."""
    _translate[:] = [translate]


def in_readers_words(text: str) -> str:
    """The message with the names of options replaced, if `name_options` was called."""
    return _translate[0](text) if _translate else text


class ExitCode(IntEnum):
    """Exit codes of `safepoint` and of a training process (docs/exit-codes.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTLY_DONE = 3
    """A command has done only a part of its work; its message says what was not done."""
    NOT_FOUND = 10
    CONFLICT = 11
    NOT_AUTHORISED = 12
    """A command's credentials are wrong or grant too little. A training ends with `STORAGE` in this case."""
    STORAGE = 13
    NOTHING_VALID = 14
    TIMED_OUT = 15
    """The time limit of a command has passed, and its work is not finished."""
    NOT_SUPPORTED = 16
    """Not supported on this machine or in this installation."""
    INTERRUPTED_SAVED = 75
    """Interrupted, and the state is saved: run the same command again. The value is that of `EX_TEMPFAIL`."""
    SIGINT = 130
    TERMINATED_UNSAVED = 143
    """Terminated before a save was possible; older checkpoints are unchanged."""


class SafepointError(Exception):
    """Base class of the errors that Safepoint reports to its users, each with an exit code.

    Args:
        message: what happened and what was done about it.
        hint: what the reader can do; one sentence.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message_lines(in_readers_words(message))
        self.hint = None if hint is None else message_lines(in_readers_words(hint))
        super().__init__(self.message)

    def with_message(self, message: str, *, hint: str | None) -> Self:
        """A copy of this error with another message and hint. The constructor of a subclass is not called."""
        error = copy.copy(self)
        SafepointError.__init__(error, message, hint=hint)
        return error

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # `Exception.__reduce__` would call the constructor with the message, which a subclass need not accept.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[SafepointError], args: tuple[Any, ...], state: dict[str, Any]) -> SafepointError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(SafepointError):
    """A setting or an argument is invalid."""

    exit_code = ExitCode.USAGE


class NotFoundError(SafepointError):
    """A job, checkpoint or connection does not exist."""

    exit_code = ExitCode.NOT_FOUND


class PartlyDoneError(SafepointError):
    """A part of the work is done and stays done; the rest failed."""

    exit_code = ExitCode.PARTLY_DONE


class ConflictError(SafepointError):
    """Another process uses the folder, or a setting or request conflicts with an existing job or checkpoint."""

    exit_code = ExitCode.CONFLICT


class StorageError(SafepointError):
    """A folder, an object store or a cluster cannot be used."""

    exit_code = ExitCode.STORAGE


class ObjectNotFoundError(StorageError):
    """There is no object under this key, or no such bucket."""


class FolderNotFoundError(StorageError):
    """A command was given a folder that does not exist.

    Args:
        folder: the path of the folder.
    """

    exit_code = ExitCode.NOT_FOUND

    def __init__(self, folder: object) -> None:
        super().__init__(f"there is no folder {folder}", hint="check the path")


class ConditionError(StorageError):
    """A conditional write failed, because the object exists or has changed: another writer was first."""


class AccessDeniedError(StorageError):
    """The store or the cluster refuses these credentials, or grants them too little."""


class NoRoomError(StorageError):
    """A disk has too little free space for files that were about to be written."""


class TransientError(StorageError):
    """The store or the cluster is busy, slow, cut off or out of reach; the same request may succeed later."""


class CheckpointError(SafepointError):
    """A checkpoint is damaged, differs from its manifest, or has a layout that Safepoint cannot read."""

    exit_code = ExitCode.NOTHING_VALID


class ManifestError(CheckpointError):
    """A manifest is unreadable, malformed, altered, hostile, or of a version that this release cannot read."""


class UnreadableError(CheckpointError):
    """An object of the checkpoint cannot be read, but other objects in the store can be read."""


class ImageError(SafepointError):
    """A process image is damaged, hostile, or of a version that this release cannot read."""

    exit_code = ExitCode.NOTHING_VALID


class NothingValidError(SafepointError):
    """There is no valid checkpoint. A run without any checkpoint starts at step 0 and does not raise this error."""

    exit_code = ExitCode.NOTHING_VALID


class WaitTimeoutError(SafepointError):
    """The work takes longer than the caller waits. The work continues."""

    exit_code = ExitCode.TIMED_OUT


class UnsupportedError(SafepointError):
    """Not supported on this machine, in this installation, or for this kind of job."""

    exit_code = ExitCode.NOT_SUPPORTED


class MissingExtraError(UnsupportedError, ImportError):
    """A package that an extra of Safepoint installs is missing."""


class SaveError(SafepointError):
    """A save has failed, or was not complete when the wait ended. An incomplete checkpoint is never used."""


class FreezeError(SafepointError):
    """Processes could not be frozen or restored. Processes that should have been frozen continue to run."""


class PeerError(SafepointError):
    """Another rank has ended, does not answer, or is at another point of the training loop."""


class Interrupted(SystemExit):
    """Ends the training loop after all ranks have agreed to stop.

    It derives from `SystemExit`, so that the user's `finally` blocks run, but not the code after `train()`.

    Args:
        exit_code: 75 if the state is saved, 143 if it is not, 13 if the run stops because uploads fail.
        message: one sentence for the console.
    """

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(int(exit_code))
        self.exit_code = exit_code
        self.message = message


def require_torch(what: str) -> None:
    """Check that PyTorch is installed, without importing it.

    Args:
        what: what needs PyTorch, as the subject of a sentence.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(
            f"{what} needs PyTorch, which is not installed for {sys.executable}; nothing was done",
            hint="pip install 'safepoint[torch]'",
        )


def error_line(code: int, error: SafepointError, *, as_json: bool) -> str:
    """The line on stderr with which a command ends after an error: for a program with `--json`, else for a person."""
    document = {"type": "exit_error", "code": int(code), "message": error.message, "hint": error.hint}
    return f"{json.dumps(document) if as_json else printable_lines(f'safepoint: error: {error}')}\n"
