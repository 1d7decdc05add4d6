"""Reads fields of a cluster's objects. Every field may be missing."""

import json
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
"""One object of a cluster, as the API server sends it."""
_LEAST_VALUE_BYTES = 32


def at(value: Any, *path: str) -> Any:
    """The value at this path of keys; None if one of the keys is missing."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]


def items(value: Any, *path: str) -> list[Any]:
    """The list at this path of keys; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, list) else []  # pyright: ignore[reportUnknownVariableType]


def texts(value: Any, *path: str) -> dict[str, str]:
    """The mapping of strings at this path of keys, such as labels; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def number(value: Any, *path: str) -> int:
    """The whole number at this path of keys, such as an exit code; 0 if there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) else 0


def count_of(value: float | None) -> int | None:
    """A number as a count from 0 to 1e15; None for None.

    The limits are needed because a person who may change the object can write any number.
    """
    return None if value is None else int(min(max(value, 0.0), 1e15))


def name_of(value: Any) -> str:
    """The name of an object."""
    return str(at(value, "metadata", "name") or "")


def uid_of(value: Any) -> str:
    """The uid of an object. A later object of the same name has another uid."""
    return str(at(value, "metadata", "uid") or "")


def owners_of(value: Any) -> set[str]:
    """The uids of the owners of an object."""
    return {str(at(one, "uid")) for one in items(value, "metadata", "ownerReferences")}


def size_of(value: Object) -> int:
    """The approximate size of an object in a reply, in bytes; see `size_of_json`."""
    return size_of_json(json.dumps(value).encode())


def size_of_json(data: bytes) -> int:
    """The size of a JSON text for a limit of memory, in bytes.

    Each value counts as at least 32 bytes, because a parsed value takes more memory than its text: an empty object
    takes 3 bytes of text and 64 bytes of memory.
    """
    return max(len(data), _LEAST_VALUE_BYTES * sum(map(data.count, (b",", b"[", b"{"))))


def condition(value: Any, kind: str) -> Any:
    """The condition of type `kind` in an object's status, if that condition is true; otherwise None."""
    found = [item for item in items(value, "status", "conditions") if at(item, "type") == kind]
    return next((item for item in found if at(item, "status") == "True"), None)


def event_time(item: Object) -> str:
    """The time at which an event last occurred."""
    for key in ("lastTimestamp", "eventTime", "firstTimestamp"):
        if at(item, key):
            return str(at(item, key))
    return str(at(item, "metadata", "creationTimestamp") or datetime.now(UTC).isoformat())
