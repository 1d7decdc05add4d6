"""Names the checkpoint in every error that its states cause while they are loaded."""

import contextlib
import re
import traceback
from collections.abc import Generator
from pathlib import Path

import torch

from safepoint.errors import CheckpointError, SafepointError, printable

_ANOTHER_CAUSE = re.compile(
    r"loading state_dict|out of memory|CUDA error|gloo|NCCL|ProcessGroup|connect|timed? ?out|peer|socket",
    re.IGNORECASE,
)
"""Words in those errors of torch whose cause is not the checkpoint, but a model that differs, a device or the
network."""
_MOST_CHARACTERS = 300
_DELETE_IT = "if someone else may have written this checkpoint, delete the checkpoint to resume from an older one"


def refusal(where: object, what: str, otherwise: str = "") -> CheckpointError:
    """The error for a checkpoint, or a file of a checkpoint, that was not loaded.

    Args:
        where: the checkpoint or the file.
        what: why it was not loaded.
        otherwise: what to do if only this user can have written the checkpoint; empty for no such advice.
    """
    hint = f"{_DELETE_IT}; {otherwise}" if otherwise else _DELETE_IT
    return CheckpointError(f"{where} was not loaded: {what}", hint=hint)


@contextlib.contextmanager
def states_of(where: object) -> Generator[None]:
    """While the block runs, turn the errors of invalid states into CheckpointErrors.

    A checkpoint that someone else has written may have values of any type in its states. Frameworks do not expect
    such values. Errors with other causes pass unchanged: errors of files, memory, devices, networks and different
    models.

    Args:
        where: the file or the checkpoint that is loaded, for the message.

    Raises:
        CheckpointError: the block raised an error that invalid states cause.
    """
    try:
        yield
    except (SafepointError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # hostile content may raise anything
        if isinstance(error, RuntimeError) and _ANOTHER_CAUSE.search(str(error)):
            raise
        raise CheckpointError(
            f"{where} could not be loaded: {_summary(error)}",
            hint=f"{_DELETE_IT}; otherwise load it with the script and the libraries that wrote it",
        ) from error


def _summary(error: Exception) -> str:
    """The error, and the line of code that raised it."""
    text = printable(f"{type(error).__name__}: {error}")[:_MOST_CHARACTERS]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
