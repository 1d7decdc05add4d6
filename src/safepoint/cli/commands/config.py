"""`safepoint config …`: which settings are in effect and where they are set."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from safepoint.cli.defaults import check_places, check_tables, effective
from safepoint.cli.lazy import LazyGroup, walk
from safepoint.cli.output import print_answer
from safepoint.foundation.configuration import Configuration, toml
from safepoint.jobs.local.slots import count_slots

app = typer.Typer(
    name="config",
    help="Show which settings are in effect and where they are set.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def config() -> None:
    """Keeps `config` a group: without this callback, Typer would replace a group of one command by the command."""


@app.command()
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each setting is set.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show settings that have their defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the settings that are in effect, as a settings file.

    If several sources set the same setting, the first source in this list is used: environment variables,
    ./safepoint.toml, [tool.safepoint] in ./pyproject.toml, ~/.config/safepoint/config.toml. Settings that have their
    defaults are left out, unless --all is given.
    """
    root = context.find_root().command
    assert isinstance(root, LazyGroup)
    configuration = Configuration.load()
    lines: list[str] = []
    documents: list[dict[str, Any]] = []
    for names, _ in walk(root):
        found = [item for item in effective(root, names, configuration) if everything or item.source != "default"]
        lines += _section(".".join(names), [_line(item.option, item.value, origin and item.origin) for item in found])
        for item in found:
            document = {"command": " ".join(names), **dataclasses.asdict(item), "origin": item.origin or None}
            documents.append(document)
    check_tables(configuration, root)  # this comes after the loop, because the check needs all commands imported
    check_places(configuration, root)
    document: dict[str, Any] = {"settings": documents}
    origins = configuration.origins
    claims: dict[str, tuple[object, str]] = {
        claim: (str(folder), origins["pvc", claim].place) for claim, folder in configuration.pvc.items()
    }
    sections = {"local": _local(configuration), "pvc": claims}
    for (table, key), setting in origins.items():
        if table.startswith("places."):
            sections.setdefault(table, {})[key] = setting.value, setting.place
    for name, values in sections.items():
        lines += _section(name, [_line(key, value, origin and place) for key, (value, place) in values.items()])
        document[name] = {key: value for key, (value, _) in values.items()}
    print_answer(as_json, document, lines or ["# all settings have their defaults"])


def _local(configuration: Configuration) -> dict[str, tuple[object, str]]:
    """The numbers of CPU and GPU slots that are not defaults, each with the variable or the line that sets it."""
    counted = count_slots()
    found: dict[str, tuple[object, str]] = {}
    for name, count in (("cpu-slots", counted.cpu), ("gpu-slots", counted.gpu)):
        variable = f"SAFEPOINT_{name.replace('-', '_').upper()}"
        setting = configuration.origins.get(("local", name))
        if os.environ.get(variable, "").strip():
            found[name] = count, variable
        elif setting is not None:
            found[name] = count, setting.place
    return found


def _section(name: str, rows: Sequence[str]) -> list[str]:
    return [f"[{name}]", *rows, ""] if rows else []


def _line(name: str, value: object, origin: str | bool) -> str:
    text = f"# {name} is not set" if value is None else f"{name} = {toml(value)}"
    return f"{text}  # {origin}" if origin else text
