"""Pictures as SVG, readable on light and dark pages, by screen readers and without colours. No dependency."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

_WIDTH, _HEIGHT = 860, 500
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 210, 56, 58
_COLOURS = (
    ("#1f5fbf", "#7fb2ff"),
    ("#b3400c", "#ff9e6b"),
    ("#1b7a3d", "#6fd08c"),
    ("#7a2ea0", "#d09cf0"),
    ("#8a6d00", "#e8c84a"),
    ("#b0215f", "#ff8fbf"),
    ("#00707d", "#5fd0dc"),
    ("#555555", "#bbbbbb"),
)
"""For each series, its colour on a light and on a dark page: at least 4.5 times the contrast of the page."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4", "1 4", "14 3 4 3")
_LABEL_HEIGHT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a picture.

    Args:
        name: its label at the right end.
        points: x and y, by x.
        half_widths: for each point, half of its confidence interval; empty: none are drawn.
    """

    name: str
    points: Sequence[tuple[float, float]]
    half_widths: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a picture.

    Args:
        label: what it shows, with its unit.
        ticks: the values with a line and a text, rising.
        texts: the texts of the ticks; empty: the values themselves.
        is_log: whether equal factors have equal distances.

    Raises:
        ValueError: the ticks are less than two, do not rise, or are not above 0 on a logarithmic axis.
    """

    label: str
    ticks: Sequence[float]
    texts: Sequence[str] = ()
    is_log: bool = False

    def __post_init__(self) -> None:
        # Otherwise the picture would run backwards, or divide by 0.
        if len(self.ticks) < 2 or any(not low < high < math.inf for low, high in pairwise(self.ticks)):
            raise ValueError(f"ticks is {[*self.ticks]!r}: give at least two finite numbers that rise")
        if self.is_log and self.ticks[0] <= 0:
            raise ValueError(f"ticks begins with {self.ticks[0]!r}, and those of a logarithmic axis must be above 0")

    def share(self, value: float) -> float:
        """Where the value is between the first and the last tick: 0 to 1, and no further."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def text(self, number: int) -> str:
        """The text of a tick."""
        return self.texts[number] if self.texts else f"{self.ticks[number]:g}"


def begin(title: str, description: str, *, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """The first lines of a picture: its size, its words for screen readers, and its colours.

    Classes: `s0` to `s7` are the colours of series, as lines; `f0` to `f7` the same as areas; `grid` and `axis` are
    lines, and text without a class is readable on both kinds of pages.
    """
    light = "".join(_rules(number, pair[0]) for number, pair in enumerate(_COLOURS))
    dark = "".join(_rules(number, pair[1]) for number, pair in enumerate(_COLOURS))
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13">',
        f'<title id="title">{_escaped(title)}</title>',
        f'<desc id="desc">{_escaped(description)}</desc>',
        "<style>text{fill:#1b1b1b}.page{fill:#fff}.grid{stroke:#ddd}.axis{stroke:#555}.head{font-size:16px}"
        f".line{{fill:none;stroke-width:2.2}}.range{{stroke-width:1}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#eee}.page{fill:#161616}.grid{stroke:#3a3a3a}.axis{stroke:#aaa}"
        f"{dark}}}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="head" x="20" y="28">{_escaped(title)}</text>',
    ]


def _rules(number: int, colour: str) -> str:
    return f".s{number}{{stroke:{colour}}}.f{number}{{fill:{colour}}}"


def curves(title: str, description: str, x: Axis, y: Axis, series: Sequence[Curve]) -> str:
    """A picture of lines, each with its name at its right end.

    Raises:
        ValueError: there are more series than colours, or a series has no points.
    """
    if len(series) > len(_COLOURS):
        raise ValueError(f"{len(series)} curves are too many for one picture: at most {len(_COLOURS)}")
    if any(not curve.points for curve in series):
        raise ValueError("a curve has no points: leave it out")
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at_x(value: float) -> float:
        return round(_LEFT + wide * x.share(value), 1)

    def at_y(value: float) -> float:
        return round(_TOP + high * (1 - y.share(value)), 1)

    lines = begin(title, description)
    for number, value in enumerate(y.ticks):
        at = at_y(value)
        lines.append(f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{_escaped(y.text(number))}</text>')
    for number, value in enumerate(x.ticks):
        at = at_x(value)
        lines.append(f'<path class="axis" d="M{at} {_TOP + high}v5"/>')
        lines.append(f'<text x="{at}" y="{_TOP + high + 20}" text-anchor="middle">{_escaped(x.text(number))}</text>')
    lines.append(f'<path class="axis" d="M{_LEFT} {_TOP + high}H{_WIDTH - _RIGHT}"/>')
    lines.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{_escaped(x.label)}</text>'
        f'<text x="20" y="{_TOP - 10}">{_escaped(y.label)}</text>'
    )
    for number, curve in enumerate(series):
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        points = " ".join(f"{at_x(one)} {at_y(other)}" for one, other in curve.points)
        lines.append(f'<path class="line s{number}"{dash} d="M{points}"/>')
        for (one, other), half in zip(curve.points, curve.half_widths, strict=False):
            if math.isfinite(half):
                low, top = at_y(other - half), at_y(other + half)
                lines.append(f'<path class="range s{number}" d="M{at_x(one)} {low}V{top}"/>')
    ends = sorted((at_y(curve.points[-1][1]), number) for number, curve in enumerate(series))
    last = _TOP - _LABEL_HEIGHT
    overflow = max(0.0, len(ends) * _LABEL_HEIGHT - high)
    for place, (at, number) in enumerate(ends):
        rest = (len(ends) - place - 1) * _LABEL_HEIGHT
        last = max(last + _LABEL_HEIGHT, min(at, _TOP + high + overflow - rest))
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        end = at_x(series[number].points[-1][0])
        lines.append(f'<path class="line s{number}" stroke-width="1" d="M{end} {at}L{_WIDTH - _RIGHT + 14} {last}"/>')
        lines.append(
            f'<path class="line s{number}"{dash} d="M{_WIDTH - _RIGHT + 14} {last}h30"/>'
            f'<text x="{_WIDTH - _RIGHT + 50}" y="{last + 4}">{_escaped(series[number].name)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


class Bar(NamedTuple):
    """One bar, of several parts.

    Args:
        name: beside the bar.
        parts: the name and the value of each part; equal names have one colour in all bars.
        label: behind the bar, such as the sum.
    """

    name: str
    parts: Sequence[tuple[str, float]]
    label: str


_BARS_LEFT, _BARS_RIGHT, _BAR, _GAP, _LEGEND = 190, 90, 34, 22, 22


def bars(title: str, description: str, drawn: Sequence[Bar]) -> str:
    """A picture of horizontal bars below each other, with a legend.

    Args:
        title: above the bars.
        description: for screen readers.
        drawn: the bars, from the top.

    Raises:
        ValueError: the bars have more parts than there are colours.
    """
    names = list(dict.fromkeys(name for bar in drawn for name, _ in bar.parts))
    if len(names) > len(_COLOURS):
        raise ValueError(f"{len(names)} parts are too many for one picture: at most {len(_COLOURS)}")
    scale = (_WIDTH - _BARS_LEFT - _BARS_RIGHT) / (
        max((sum(v for _, v in bar.parts) for bar in drawn), default=0) or 1
    )
    legend = _TOP + len(drawn) * (_BAR + _GAP)
    lines = begin(title, description, height=legend + -(-len(names) // 3) * _LEGEND + 12)
    for place, bar in enumerate(drawn):
        top, left = _TOP + place * (_BAR + _GAP), float(_BARS_LEFT)
        lines.append(f'<text x="{_BARS_LEFT - 10}" y="{top + 22}" text-anchor="end">{_escaped(bar.name)}</text>')
        for name, value in bar.parts:
            if value > 0:
                lines.append(
                    f'<rect class="f{names.index(name)}" x="{left:.1f}" y="{top}" width="{value * scale:.1f}" '
                    f'height="{_BAR}"><title>{_escaped(name)}</title></rect>'
                )
            left += value * scale
        lines.append(f'<text x="{left + 8:.1f}" y="{top + 22}">{_escaped(bar.label)}</text>')
    for number, name in enumerate(names):
        left, top = _BARS_LEFT + number % 3 * 210, legend + number // 3 * _LEGEND
        lines.append(f'<rect class="f{number}" x="{left}" y="{top}" width="14" height="14"/>')
        lines.append(f'<text x="{left + 20}" y="{top + 12}">{_escaped(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _escaped(text: str) -> str:
    """Text for a picture: a name from a file adds no element, and no character that XML forbids."""
    return escape("".join(one if one.isprintable() else "?" for one in text))
