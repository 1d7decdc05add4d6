"""The answer of a command on stdout: lines for a person, or JSON for a program."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from safepoint.foundation.units import printable

_VERSION = 1
"""The version of every JSON document on stdout. It increases when a key is removed or changes its meaning."""


def print_answer(
    as_json: bool, document: Mapping[str, Any] | Sequence[Mapping[str, Any]], lines: Sequence[str]
) -> None:
    """Print the document, or the list of documents, with `--json`; otherwise print `lines`."""
    if not as_json:
        typer.echo("\n".join(lines))
    elif isinstance(document, Mapping):
        typer.echo(json.dumps(versioned(document), indent=1))
    else:
        typer.echo(json.dumps([versioned(one) for one in document], indent=1))


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the key `version`."""
    return {"version": _VERSION, **document}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. Line breaks in a cell are escaped."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
