"""The options that the commands of `safepoint plan` share: their help, their values, and the pictures.

Messages name the option, its value and the fix.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from safepoint.cli.output import write_file
from safepoint.errors import UsageError
from safepoint.foundation.quantities import parse_bytes, parse_duration

_MOST_S = 100 * 365.25 * 86_400
_PERIODS = {
    "hour": 3600.0,
    "day": 86_400.0,
    "week": 7 * 86_400.0,
    "month": 365.25 / 12 * 86_400,
    "year": 365.25 * 86_400,
}
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*([a-z]+)", re.ASCII)

_AS_MODEL = "as in the failure model"

# ---- the options themselves ----------------------------------------------------------------------------------------


def time(what: str, *, otherwise: str | None = None) -> Any:
    """An option that is a time, such as `10m`. `otherwise` is the text that the help shows as the default."""
    return _option("TIME", what, otherwise)


def rate_of_model(what: str) -> Any:
    """An option that is a rate, such as `4/week`. It replaces the rate of the failure model."""
    return _option("RATE", what, _AS_MODEL)


def time_of_model(what: str) -> Any:
    """An option that is a time. It replaces the time of the failure model."""
    return _option("TIME", what, _AS_MODEL)


def share_of_model(what: str) -> Any:
    """An option that is a share from 0 to 1. It replaces the share of the failure model."""
    return _option("SHARE", what, _AS_MODEL)


def size_of(what: str) -> Any:
    """An option that is a size, such as `4G`."""
    return _option("SIZE", what, None)


def _option(metavar: str, what: str, otherwise: str | None) -> Any:
    return typer.Option(metavar=metavar, help=what, show_default=True if otherwise is None else otherwise)


Announced = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the interruptions that begin with a SIGTERM early enough for a save: a number from 0 to 1.",
    ),
]
RanksOnly = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the interruptions that end only training processes: a number from 0 to 1. In these "
        "interruptions, the machine continues, so the newest snapshot in its memory stays usable.",
    ),
]
Restart = Annotated[str, time("Time from an interruption until the ranks train again.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Svg = Annotated[
    str | None,  # not a Path: with an empty value, it would be the current folder
    typer.Option(
        "--svg",
        metavar="FILE",
        help="Also draw the answer, as an SVG picture in this file.",
        show_default="no picture",
    ),
]


def inputs_line(context: typer.Context, *, leave_out: Collection[str] = ()) -> str:
    """The options of a plan with their values, as on a command line: `--mtbf 4h --stall 2s`. Defaults are included.

    Args:
        context: the context of the command.
        leave_out: names of parameters that change nothing in this call.
    """
    found: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name not in leave_out and isinstance(value, str | int | float) and not isinstance(value, bool):
            name = max(parameter.opts, key=len)
            found.append(f"{name} {f'{value:g}' if isinstance(value, float) else value}")
    return " ".join(found)


# ---- their values --------------------------------------------------------------------------------------------------


def refuse_ignored(context: typer.Context, options: Mapping[str, str], reason: str, hint: str) -> None:
    """Refuse options on the command line that would change nothing. Values from settings files are not refused.

    Args:
        context: the context of the command.
        options: the options by the names of their parameters.
        reason: why an option has no effect, such as "is for announced interruptions, and --announced is 0".
        hint: what to do.

    Raises:
        UsageError: one of the options is on the command line.
    """
    for name, option in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{option} {reason}; nothing was computed", hint=hint)


def duration(option: str, text: str, *, least_s: float = 0.0) -> float:
    """The seconds of a time such as `10m`, for the option of this name.

    Raises:
        UsageError: `text` is not a time, is less than `least_s`, or is longer than a hundred years.
    """
    try:
        value = parse_duration(text)
    except ValueError as error:
        hint = f"for example {option} 10m"
        if _NUMBER.fullmatch(text.strip()):
            hint = f"write {option} {text.strip()}s, {text.strip()}m or {text.strip()}h"
        raise UsageError(f"{option}: {error}", hint=hint) from error
    if value < least_s or (least_s == 0 and value < 0):
        raise UsageError(f"{option} {text!r} is too short", hint=f"give at least {least_s:g}s")
    if value > _MOST_S:
        raise UsageError(f"{option} {text!r} is longer than a hundred years", hint="check its unit: s, m, h or d")
    return value


def share(option: str, value: float) -> float:
    """Check that a value is a share from 0 to 1, and return it.

    Raises:
        UsageError: the value is not from 0 to 1.
    """
    if not 0 <= value <= 1:
        hint = f"{value:g} % is {value / 100:g}" if 1 < value <= 100 else "0.25 is a quarter of all interruptions"
        raise UsageError(f"{option} {value:g} is not a share from 0 to 1", hint=hint)
    return value


def check_shares(announced: float, ranks_only: float) -> None:
    """Check `--announced` and `--ranks-only`, which are shares of the same interruptions.

    Raises:
        UsageError: one of the two is not a share, or their sum is more than 1.
    """
    if share("--announced", announced) + share("--ranks-only", ranks_only) > 1 + 1e-9:
        raise UsageError(
            f"--announced {announced:g} and --ranks-only {ranks_only:g} are shares of the same interruptions, and "
            "their sum is more than 1",
            hint="reduce one of them",
        )


def amount(option: str, value: float, *, most: float = 1e12) -> float:
    """Check that a value is a finite number from 0 to `most`, and return it.

    Raises:
        UsageError: the value is not such a number.
    """
    if not (math.isfinite(value) and 0 <= value <= most):
        raise UsageError(f"{option} {value:g} is not a number from 0 to {most:g}", hint=f"for example {option} 55")
    return value


def per_second(option: str, text: str) -> float:
    """A rate such as `4/week` or `1/month`, converted to a number per second.

    Raises:
        UsageError: `text` is not a rate, or is more than one per second.
    """
    match = _RATE.fullmatch(text.strip().lower())
    period_s = _PERIODS.get(match[2].removesuffix("s")) if match else None
    if match is None or period_s is None:
        raise UsageError(
            f"{option} {text!r} is not a rate: write a number, a slash, and a unit (hour, day, week, month or year)",
            hint=f"for example {option} 4/week",
        )
    value = float(match[1]) / period_s
    if value > 1:
        raise UsageError(f"{option} {text!r} is more than one in each second", hint="check the period of the rate")
    return value


def size(option: str, text: str) -> int:
    """The bytes of a size such as `4G`, from 1 byte to 1 EB.

    Raises:
        UsageError: `text` is not such a size.
    """
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", hint=f"for example {option} 4G") from error
    if not 0 < value <= 10**18:
        raise UsageError(f"{option} {text!r} is not a size from 1 byte to 1 EB", hint=f"for example {option} 4G")
    return value


def write_picture(path: str, picture: str) -> str:
    """Write the picture, and return a line about it.

    Raises:
        StorageError: the file cannot be written, or the path exists and is not a regular file.
    """
    write_file(Path(path), picture.encode(), option="--svg")
    return f"the picture is in {path}"
