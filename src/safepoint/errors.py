"""What can go wrong, and the exit code that says so.

The tree:

```
SafepointError                 anything this package raises on purpose
├── UsageError            2   a setting or an argument cannot be meant
├── PartlyDoneError       3   some of it is done, and the rest failed
├── NotFoundError        10   what was named does not exist
├── ConflictError        11   somebody else holds the output folder, or the checkpoint contradicts the settings
├── StorageError         13   the place for checkpoints cannot be used
│   ├── ObjectNotFoundError  13   there is no object under this key
│   ├── ConditionError       13   another writer was first
│   ├── AccessDeniedError    13   wrong key, no permission; 12 of a command that does not train
│   └── TransientError       13   busy, slow, cut off or out of reach: the same request may succeed later
├── CheckpointError      14   a checkpoint is not what its manifest says
│   └── ManifestError    14   the manifest itself is unreadable or unacceptable
├── WaitTimeoutError     15   something that was waited for took longer
├── NothingValidError    14   checkpoints exist, and none of them is valid
├── UnsupportedError     16   what was asked for cannot be done on this machine or in this installation
├── SaveError             1   a save did not become a checkpoint
└── PeerError             1   another rank is gone or disagrees
Interrupted (SystemExit) 75   the run stopped where it was asked to; raised through the user's script
```

Every message says what happened, what was done about it, and what the reader can do.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `safepoint` and of a training process (docs/exit-codes.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTLY_DONE = 3
    """A command has done a part of what it was asked to do, and said which."""
    NOT_FOUND = 10
    CONFLICT = 11
    NOT_AUTHORISED = 12
    """Of commands: the keys are wrong or grant too little. A training says `STORAGE`."""
    STORAGE = 13
    NOTHING_VALID = 14
    TIMED_OUT = 15
    """A command was told how long to wait, and that was not long enough."""
    NOT_SUPPORTED = 16
    """What was asked for cannot be done on this machine or in this installation."""
    INTERRUPTED_SAVED = 75
    """`EX_TEMPFAIL`: interrupted, the state is saved, run the same command again."""
    SIGINT = 130
    TERMINATED_UNSAVED = 143
    """Terminated before anything could be saved; an older checkpoint, if any, still stands."""


class SafepointError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: what happened and what was done about it.
        hint: what the reader can do; one sentence.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message


class UsageError(SafepointError):
    """A setting or an argument cannot be meant."""

    exit_code = ExitCode.USAGE


class NotFoundError(SafepointError):
    """What was named does not exist."""

    exit_code = ExitCode.NOT_FOUND


class PartlyDoneError(SafepointError):
    """Some of what was asked for is done and stays done; the rest failed."""

    exit_code = ExitCode.PARTLY_DONE


class ConflictError(SafepointError):
    """Another run holds the output folder, or the checkpoint contradicts the settings of this run."""

    exit_code = ExitCode.CONFLICT


class StorageError(SafepointError):
    """The place for checkpoints cannot be used."""

    exit_code = ExitCode.STORAGE


class ObjectNotFoundError(StorageError):
    """There is no object under this key, or no such bucket."""


class ConditionError(StorageError):
    """A conditional write was not done, because the object exists or has changed: another writer was first."""


class AccessDeniedError(StorageError):
    """The store refuses these credentials, or grants them too little."""


class TransientError(StorageError):
    """The store is busy, slow, cut off or out of reach; the same request may succeed later."""


class CheckpointError(SafepointError):
    """A checkpoint is not what its manifest says."""

    exit_code = ExitCode.NOTHING_VALID


class ManifestError(CheckpointError):
    """A manifest is unreadable, malformed, altered, hostile, or of a version this release does not know."""


class NothingValidError(SafepointError):
    """Checkpoints exist, but none of them is valid; starting from scratch must be asked for."""

    exit_code = ExitCode.NOTHING_VALID


class WaitTimeoutError(SafepointError):
    """Something that was waited for took longer; it goes on."""

    exit_code = ExitCode.TIMED_OUT


class UnsupportedError(SafepointError):
    """What was asked for cannot be done on this machine, in this installation, or with this kind of job."""

    exit_code = ExitCode.NOT_SUPPORTED


class SaveError(SafepointError):
    """A save did not become a checkpoint; nothing of it is left behind."""


class PeerError(SafepointError):
    """Another rank is gone, does not answer, or has reached another point of the training loop."""


class Interrupted(SystemExit):
    """Leaves the training loop after an agreed stop.

    It derives from `SystemExit`, so that the code behind `train()` does not run while `finally` blocks do.

    Args:
        exit_code: 75 when the state is saved, 143 when there was nothing that could be saved.
        message: one sentence for the console.
    """

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(int(exit_code))
        self.exit_code = exit_code
        self.message = message
