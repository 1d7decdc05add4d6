"""The text of figures in the plans, for people: one function for each kind of figure.

docs/planning.md states the same conventions. JSON has seconds, bytes and shares from 0 to 1 instead.
"""

import math
from collections.abc import Sequence

from safepoint.foundation.units import format_bytes, format_duration

_DAY_S = 86_400
_GIB = 1 << 30


def time_text(seconds: float) -> str:
    """A time with the units that options have, and `ms`: `3.2 ms`, `48 s`, `2 m 10 s`, `3 h 05 m`, `41 d 06 h`."""
    if seconds > 0 and round(1000 * seconds, 1) < 100:
        return f"{1000 * seconds:.3g} ms"
    if round(seconds) < 2 * _DAY_S:
        return format_duration(seconds)
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours:02d} h"


def size_text(num_bytes: float) -> str:
    """A size in decimal units, as disks and stores have them: `1.2 GB` is 1.2 billion bytes."""
    return format_bytes(round(num_bytes))


def volume_text(num_bytes: int) -> str:
    """The size of a volume to ask for, as a Kubernetes quantity: `205Gi` is 205 times 1024³ bytes."""
    return f"{num_bytes // _GIB}Gi"


def speed_text(bytes_per_s: float) -> str:
    """Bytes in a second, in decimal units: `68.0 MB/s`."""
    return f"{size_text(bytes_per_s)}/s"


def percent_text(share: float) -> str:
    """A share from 0 to 1 in percent, with two decimals, or with two digits if it is small: `98.83 %`, `0.0042 %`."""
    value = 100 * share
    return f"{value:.2g} %" if 0.0001 <= abs(value) < 0.0995 else f"{value:.2f} %"


def percent_range_text(share: float, half_width: float) -> str:
    """A share in percent and the half width of its confidence interval: `98.15 ± 0.88 %`.

    If the half width is not finite, the text has the share only.
    """
    return f"{100 * share:.2f}{range_text(100 * half_width, 2)} %"


def range_text(half_width: float, digits: int) -> str:
    """The half width of a confidence interval, to append to a figure: ` ± 0.88`; empty if it is not finite."""
    return f" ± {half_width:.{digits}f}" if math.isfinite(half_width) else ""


def hours_text(hours: float) -> str:
    """A number of hours, for a column whose head names the unit: `15.2`."""
    return f"{hours:,.1f}"


def money_text(amount: float) -> str:
    """Money in the currency of the price: `25,049.12`."""
    return f"{amount:,.2f}"


def count_text(count: float) -> str:
    """A number of things: `131,072`."""
    return f"{count:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a name and a text, with the texts below each other."""
    width = len("settings from")
    return [f"{name.ljust(width)}  {text}" for name, text in rows]


def remarks(warnings: Sequence[str], notes: Sequence[str]) -> list[str]:
    """The last lines of an answer: its warnings and its notes."""
    return aligned([*(["warning", text] for text in warnings), *(["note", text] for text in notes)])
