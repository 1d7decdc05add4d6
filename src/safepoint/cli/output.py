"""Prints the answer of a command on stdout, as lines or as JSON, and writes the file that a user has named."""

import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from safepoint.answers.versions import versioned
from safepoint.errors import StorageError, printable, without_credentials
from safepoint.foundation.files import write_atomic

_PIECE = 1000
"""How many values of a list are printed at once."""
_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,40}m)")


def print_answer(
    as_json: bool,
    document: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    lines: Sequence[str],
    colours: Mapping[str, str] | None = None,
) -> None:
    """Print the document or the list of documents with `--json`, and `lines` without it.

    Args:
        as_json: whether `--json` was given.
        document: the answer for a program.
        lines: the answer for a person. Characters that are not printable are escaped.
        colours: words and their colours. If a line begins with one of these words, the word gets its colour.
    """
    if not as_json:
        typer.echo("\n".join(_coloured(printable(line), colours or {}) for line in lines))
    elif isinstance(document, Mapping):
        typer.echo(without_credentials(json.dumps(versioned(document), indent=1)))
    else:
        _print_list(document)


def _print_list(documents: Sequence[Mapping[str, Any]]) -> None:
    """Print a list as `json.dumps` formats it. The text of the whole list may not fit in memory, so it is printed in
    pieces."""
    if not documents:
        typer.echo("[]")
        return
    typer.echo("[")
    for begin in range(0, len(documents), _PIECE):
        piece = documents[begin : begin + _PIECE]
        text = ",".join(json.dumps([versioned(one)], indent=1)[1:-2] for one in piece)
        is_last = begin + _PIECE >= len(documents)
        typer.echo(without_credentials(text).removeprefix("\n") + ("" if is_last else ","))
    typer.echo("]")


def without_effect(options: Sequence[str]) -> str:
    """The beginning of a message: `--queue has no effect`, or `--image, --memory have no effect`."""
    return f"{', '.join(options)} {'has' if len(options) == 1 else 'have'} no effect"


def print_log_line(line: str) -> None:
    """Print a line of a job's output.

    If stdout is not a terminal, the line is printed unchanged. On a terminal, only its colours take effect; other
    escape sequences are printed as text, because they could change the clipboard or hide lines.
    """
    if sys.stdout.isatty():
        shown = line.expandtabs().rpartition("\r")[2]  # print only the last state of a progress bar
        parts = _COLOUR.split(shown)
        line = "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))
        line += "\x1b[0m" if len(parts) > 1 else ""
    typer.echo(line)


def print_warning(text: str) -> None:
    """Print a warning on stderr."""
    typer.echo(printable(f"safepoint: warning: {text}"), err=True)


def write_file(path: Path, data: bytes, *, option: str) -> None:
    """Write a file that the user has named, whole or not at all.

    Only a regular file is replaced. If devices were replaced too, `-o /dev/null` as root would replace the device
    /dev/null with a file.

    Args:
        path: the file.
        data: its content.
        option: the option that names the file, for messages.

    Raises:
        StorageError: the path exists and is not a regular file, or the file cannot be written.
    """
    hint = f"give another path with {option}"
    try:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise StorageError(f"{path} exists and is not a regular file; nothing was written", hint=hint)
        write_atomic(path, data, durable=False)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def _coloured(line: str, colours: Mapping[str, str]) -> str:
    word = line.partition(" ")[0]
    return typer.style(word, fg=colours[word]) + line[len(word) :] if word in colours else line


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as lines with aligned columns. Line breaks in a cell are escaped."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
