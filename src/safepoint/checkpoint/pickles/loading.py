"""Names the checkpoint in every error that its states cause while they are loaded."""

import contextlib
import re
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import CheckpointError, ConflictError, SafepointError, printable

_ANOTHER_CAUSE = re.compile(
    r"out of memory|CUDA error|gloo|NCCL|ProcessGroup|connect|timed? ?out|peer|socket",
    re.IGNORECASE,
)
"""Words in those errors of torch whose cause is not the checkpoint, but a device or the network."""
_OF_MODULE = "loading state_dict"
_DIFFERENCES = re.compile(r"\s*(size mismatch for|Missing key\(s\)|Unexpected key\(s\))")
"""How the lines of torch's error begin if the names or the shapes of a module's state differ from the script's."""
_MOST_CHARACTERS = 300
_CONTAINERS: Any = (dict, list, tuple, set, frozenset)
_DELETE_IT = "if someone else may have written this checkpoint, delete the checkpoint to resume from an older one"


class ForbiddenNameError(CheckpointError):
    """A pickle names a function or class that is not allowed. The class may be one of the user's own."""


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
    such values. A folder in the place of a file is invalid, too. Errors with other causes pass unchanged: errors of
    files, memory, devices and networks.

    Args:
        where: the file or the checkpoint that is loaded, for the message.

    Raises:
        CheckpointError: the block raised an error that invalid states cause.
        ConflictError: the names or shapes of a module's state differ from the script's.
    """
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        raise refusal(where, f"it is damaged: a file and a folder are mistaken for each other ({error})") from error
    except (SafepointError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # hostile content may raise anything
        text = str(error) if isinstance(error, RuntimeError) else ""
        entries = text.splitlines()[1:]  # line 1 names the module
        if _OF_MODULE in text and entries and all(_DIFFERENCES.match(line) for line in entries if line.strip()):
            raise ConflictError(
                f"a model of {where} differs from this script's: {printable(entries[0].strip())[:_MOST_CHARACTERS]}; "
                "training was not started",
                hint="create the model as in the run that wrote the checkpoint, or start from the beginning with "
                "--from-scratch",
            ) from error
        if isinstance(error, RuntimeError) and _OF_MODULE not in text and _ANOTHER_CAUSE.search(text):
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


def check_memory(where: object, state: Any, own_state: Callable[[], Any]) -> None:
    """Refuse tensors without memory (of the device `meta`), if the script's state has none.

    A script keeps the values of a dictionary, and often those of an object of its own. A tensor without memory would
    take the place of a tensor with values, and the next checkpoints would contain it, too.

    Args:
        where: the file or the checkpoint that is loaded, for the message.
        state: the loaded state.
        own_state: returns the script's state before the load. Called only if `state` has such a tensor.

    Raises:
        CheckpointError: the state has a tensor without memory.
    """
    if _has_meta_tensor(state) and not _has_meta_tensor(own_state()):
        raise refusal(where, "it has a tensor without memory (of the device meta), and so without values")


def _has_meta_tensor(state: Any) -> bool:
    waiting: list[Any] = [state]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return True
        elif isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return False
