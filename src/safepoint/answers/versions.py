"""The version that every JSON document of a command or a page states."""

from collections.abc import Mapping
from typing import Any

_VERSION = 1
"""The version of every JSON document. It increases when a key is removed or changes its meaning."""


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the additional key `version`."""
    return {"version": _VERSION, **document}
