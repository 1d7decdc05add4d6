"""The states of the random number generators that a training draws from."""

import contextlib
import random
from collections.abc import Generator, Iterable
from typing import Any, cast

import numpy as np
import torch

from safepoint.errors import CheckpointError, ConflictError, SafepointError, printable
from safepoint.foundation.units import plural

_PARTS = ("base_dataloader", "batch_sampler", "sampler")
_GENERATORS = ("generator", "synchronized_generator")


def capture_rng() -> dict[str, Any]:
    """The states of the generators of Python, of numpy, and of torch for the CPU and for the current CUDA device.

    Other CUDA devices are left out: they belong to other ranks, and another machine may have more or fewer of them.
    """
    states = capture_host_rng()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def capture_host_rng() -> dict[str, Any]:
    """Like `capture_rng`, but without devices, which a forked process must not use."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Set the states that `capture_rng` has returned; the index of the CUDA device may have changed.

    Raises:
        CheckpointError: a state is missing or invalid.
    """
    with _refusing_invalid():
        set_python_state(states["python"])
        set_numpy_state(states["numpy"])
        torch.random.set_rng_state(states["cpu"])
        cuda = states.get("cuda")
        if isinstance(cuda, torch.Tensor) and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)


@contextlib.contextmanager
def _refusing_invalid() -> Generator[None]:
    try:
        yield
    except (SafepointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # hostile content may raise anything
        what = printable(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"the checkpoint has invalid states of random number generators: {what}") from error


_set_python_state: Any = random.setstate


def set_python_state(state: Any) -> None:
    """Check the spare number of `random.gauss`, then call `random.setstate`, which checks the other values.

    Raises:
        ValueError: the state is not a state of Python's generator.
    """
    spare = state[2]
    if spare is not None and type(spare) is not float:
        raise ValueError(f"the spare number of Python's generator is a value of type {type(spare).__name__}")
    _set_python_state(state)


_set_numpy_state: Any = np.random.set_state
_NUM_KEYS = 624


def set_numpy_state(state: Any) -> None:
    """Check the position in the generator's array of keys, then call `np.random.set_state`.

    numpy does not check the position, and would read beyond the end of the array.

    Raises:
        CheckpointError: the position is not between 0 and the number of keys.
        ValueError: the state is not a state of numpy's generator.
    """
    position: Any = cast("Any", state)["state"]["pos"] if isinstance(state, dict) else state[2]
    if type(position) is not int or not 0 <= position <= _NUM_KEYS:
        raise CheckpointError(
            f"the checkpoint's state of numpy's random number generator is invalid: its position is {position!r}, "
            f"and must be between 0 and {_NUM_KEYS}"
        )
    _set_numpy_state(state)


def devices_left_out(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The names of the CUDA devices that hold some of `tensors` and that `capture_rng` leaves out."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return sorted(str(device) for device in devices if device.index != torch.cuda.current_device())


def generators_of(part: Any, inside: tuple[int, ...] = ()) -> list[torch.Generator]:
    """The generators of a data loader and of its samplers.

    Args:
        part: a data loader, a sampler, or another object that may have generators.
        inside: the `id` of each object that contains `part`. These objects are not searched again.

    Returns:
        Each generator once, in an order that does not depend on their states.
    """
    found: dict[int, torch.Generator] = {}
    for name in _GENERATORS:
        generator = getattr(part, name, None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    for name in _PARTS:
        inner = getattr(part, name, None)
        if inner is not None and id(inner) not in inside:
            found |= {id(one): one for one in generators_of(inner, (*inside, id(part)))}
    return list(found.values())


def restore_generators(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Set the states of a loader's generators; do nothing if the lists have different lengths.

    Raises:
        CheckpointError: a state is invalid.
    """
    if len(generators) == len(states):
        with _refusing_invalid():
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def other_generators(before: int, now: int) -> ConflictError:
    """The error for an epoch that cannot be continued, because its order came from another number of generators.

    Args:
        before: number of generators that produced the epoch's order.
        now: number of generators that the data loader has in this run.
    """
    return ConflictError(
        "the checkpoint was written in the middle of an epoch. The order of its samples was drawn with "
        f"{plural(before, 'random generator')} of the data loader, but this run's loader has {now}, so the remaining "
        "samples of the epoch cannot be determined; training was not started",
        hint="make the loader and its samplers as they were, or start from the beginning with --from-scratch",
    )
