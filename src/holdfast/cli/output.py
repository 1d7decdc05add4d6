"""What a command answers on stdout: lines for a person, or one JSON document."""

import json
from collections.abc import Sequence
from typing import Any

import typer

from holdfast.foundation.units import printable


def print_answer(as_json: bool, document: Any, lines: Sequence[str]) -> None:
    """Print `document` where a program asks, `lines` otherwise."""
    typer.echo(json.dumps(document, indent=1) if as_json else "\n".join(lines))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of one width each; a cell is one line, whatever is in it."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


__all__ = ["print_answer", "table"]
