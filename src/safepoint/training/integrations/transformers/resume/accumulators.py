"""The numbers that a trainer has counted or added up in its attributes.

A trainer of a library, or a subclass in the script, may keep running averages or totals, and log them every few
steps. This module finds such attributes by their values: numbers, or dictionaries and lists of numbers, that the
training has changed. The module leaves out:

- attributes that the Trainer of transformers itself uses, because the Trainer restores them or sets them again;
- True and False, because these often say that something was prepared in this process.
"""

import functools
import inspect
import sys
from collections import deque
from typing import Any, cast

from safepoint.training.integrations.transformers.resume.changed_attributes import given_names, set_attributes

_NUMBERS = (bool, int, float)
_FLAT = set(_NUMBERS)
_LONGEST = 10_000
"""A container with more values is treated as data, not as counts or totals."""
_LEFT_OUT = {"_last_loaded_step"}
"""In TRL, the step whose weights were last sent to vLLM. This number must not be restored: after a restart, vLLM has
the weights of the original model."""
_MISSING = object()


def accumulators(trainer: Any) -> dict[str, Any]:
    """Copies of the trainer's attributes that may be counts or totals, by name."""
    left_out = _names_in_trainer()
    own = cast("dict[str, Any]", vars(trainer))
    return {name: copied(value) for name, value in own.items() if name not in left_out and _is_count(value)}


def changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The entries of `now` that `before` does not have, or has with another value."""
    return {name: value for name, value in now.items() if repr(before.get(name, _MISSING)) != repr(value)}


def without_settings(trainer: Any, saved: Any) -> tuple[dict[str, Any], list[str]]:
    """Separate saved counts and totals from numbers that can only be settings of the script.

    Settings are not restored: another person may have written the checkpoint, and the script decides about settings.
    A number is a count if some code sets its attribute after the trainer was made. Code can change the contents of a
    container and not set the attribute. So a container holds counts, unless it was an argument of the trainer.

    Args:
        trainer: the trainer, as the script has made it.
        saved: the numbers of a checkpoint, by name.

    Returns:
        The counts and totals, and the names of the settings whose saved value differs from the value in the script.
    """
    numbers = cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {}
    if not numbers:
        return {}, []
    is_set, is_given = set_attributes(trainer), given_names(trainer)
    kept: dict[str, Any] = {}
    others: list[str] = []
    for name, value in numbers.items():
        own: Any = inspect.getattr_static(trainer, name, _MISSING) if isinstance(name, str) else _MISSING
        if name in is_set or not (type(own) in _NUMBERS or name in is_given):
            kept[name] = value
        elif _is_count(own) and own != value and name not in _names_in_trainer():
            others.append(name)
    return kept, others


def restore_accumulators(trainer: Any, saved: Any) -> None:
    """Set the saved numbers on a trainer. The contents of a container are replaced in place.

    An attribute is set only if its present value, or its default in the class, consists of numbers too. A checkpoint
    must not replace attributes that are not counts.
    """
    left_out = _names_in_trainer()
    for name, value in (cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {}).items():
        if not isinstance(name, str) or name in left_out or not _is_count(value) or _has_large_number(value):
            continue
        own: Any = inspect.getattr_static(trainer, name, _MISSING)
        if _is_count(own) and type(own) in _NUMBERS and type(value) in _NUMBERS:
            vars(trainer)[name] = value
        elif isinstance(own, list | deque) and isinstance(value, list) and _is_number(own):
            _refill(own, value)
        elif isinstance(own, dict) and isinstance(value, dict) and _is_number(own):
            restore_into(cast("dict[Any, Any]", own), cast("dict[Any, Any]", value))


def restore_into(target: dict[Any, Any], value: dict[Any, Any]) -> None:
    """Replace the entries of `target` in place by the entries of `value`.

    `target` may be a defaultdict, and other code may refer to it.
    """
    for name in target.keys() - value.keys():
        del target[name]
    for name, one in value.items():
        makes_dict = isinstance(getattr(target, "default_factory", None), type) and isinstance(one, dict)
        inner = target[name] if name in target or makes_dict else None
        if isinstance(inner, dict) and isinstance(one, dict):
            restore_into(cast("dict[Any, Any]", inner), cast("dict[Any, Any]", one))
        elif isinstance(inner, deque) and isinstance(one, list):
            _refill(inner, one)
        else:
            target[name] = copied(one)


def _refill(target: Any, values: Any) -> None:
    target.clear()
    target.extend(copied(values))


def copied(value: Any) -> Any:
    """A copy of a plain container; a deque becomes a list."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | deque):
        entries = cast("list[Any]", value)
        return list(entries) if _is_flat(entries) else [copied(one) for one in entries]
    return value


def _is_flat(values: list[Any]) -> bool:
    """Whether all values are numbers. This check must be fast, because the counts are copied at each step."""
    return set(map(type, values)) <= _FLAT


def _is_count(value: Any) -> bool:
    return type(value) is not bool and _is_number(value)


def _has_large_number(value: Any) -> bool:
    """Whether a count is too large for a float: the trainer would fail when it logs the count."""
    if isinstance(value, dict):
        return any(map(_has_large_number, cast("dict[Any, Any]", value).values()))
    if isinstance(value, list):
        return any(map(_has_large_number, cast("list[Any]", value)))
    return type(value) is int and abs(value) > sys.float_info.max


def _is_number(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, or a container of numbers."""
    if type(value) in _NUMBERS:
        return True
    if depth > 4 or not isinstance(value, dict | list | deque) or len(cast("list[Any]", value)) > _LONGEST:
        return False
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(type(key) in {str, int} and _is_number(one, depth + 1) for key, one in mapping.items())
    entries = cast("list[Any]", value)
    return _is_flat(entries) or all(_is_number(one, depth + 1) for one in entries)


@functools.cache
def _names_in_trainer() -> frozenset[str]:
    """The names of all attributes that the Trainer's own methods use."""
    from transformers import Trainer

    contents = cast("dict[str, Any]", vars(Trainer))
    methods = [inspect.unwrap(one) for one in contents.values() if inspect.isfunction(one)]
    return frozenset(name for method in methods for name in method.__code__.co_names) | _LEFT_OUT
