"""Pictures as SVG, readable on light and dark pages, by screen readers and without colours. No dependency."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

_WIDTH, _HEIGHT = 860, 500
_LEFT, _TOP, _BOTTOM = 64, 66, 58
_SAMPLE, _MOST_NAME = 50, 260
"""In pixels: the width of the sample of dashes beside the name of a curve, and the limit of the width of a name."""
_CHARACTER = 7.2
"""The width of a character in pixels, at a font size of 13. It is rounded up, because the fonts of readers differ."""
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
"""For each series, its colour on a light and on a dark page. The contrast to the page is at least 4.5."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4", "1 4", "14 3 4 3")
_LABEL_HEIGHT = 16
_FEWEST_STEPS = 4
_RANGE_GAP, _LEAST_RANGE = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a picture.

    Args:
        name: its label at the right end.
        points: x and y, sorted by x.
        half_widths: for each point, half of the width of its confidence interval. If empty, no intervals are drawn.
    """

    name: str
    points: Sequence[tuple[float, float]]
    half_widths: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a picture.

    Args:
        label: what it shows, with its unit.
        ticks: the values with a line and a text, in ascending order.
        texts: the texts of the ticks. If empty, the values are shown.
        is_log: whether the axis is logarithmic.

    Raises:
        ValueError: there are less than two ticks, they do not ascend, or they are not above 0 on a logarithmic axis.
    """

    label: str
    ticks: Sequence[float]
    texts: Sequence[str] = ()
    is_log: bool = False

    def __post_init__(self) -> None:
        # If the ticks did not rise, the picture would run backwards, or a division by 0 would occur.
        if len(self.ticks) < 2 or any(not low < high < math.inf for low, high in pairwise(self.ticks)):
            raise ValueError(f"ticks is {[*self.ticks]!r}: give at least two finite numbers that rise")
        if self.is_log and self.ticks[0] <= 0:
            raise ValueError(f"ticks begins with {self.ticks[0]!r}: a logarithmic axis needs ticks above 0")

    def share(self, value: float) -> float:
        """The position of the value between the first tick (0) and the last one (1), limited to this range."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def text(self, number: int) -> str:
        """The text of a tick."""
        return self.texts[number] if self.texts else f"{self.ticks[number]:g}"


class Mark(NamedTuple):
    """A point of a curve that has a text.

    Args:
        x: the position of the point on the horizontal axis.
        y: the position of the point on the vertical axis.
        text: the text beside the point.
    """

    x: float
    y: float
    text: str


def rising_ticks(low: float, high: float) -> list[float]:
    """The ticks of an axis: at most seven round numbers, from `low` or less to `high` or more.

    If `low` is less than half of `high`, the axis begins at 0. Otherwise it begins at `low` or below: on an axis from
    0, curves that differ little would cover each other.
    """
    if low < high / 2:
        low = 0.0
    rough = max(high - low, high / 200, 1e-12) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Do not magnify small differences to the whole height.
    first = max(0, min(first, last - _FEWEST_STEPS))
    return [round(number * step, 12) for number in range(first, last + 1)]


def begin(title: str, description: str, *, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """The first lines of a picture: its size, its title, its description for screen readers, and its colours.

    The lines define CSS classes, which the caller can use. `s0` to `s7` draw a line in the colour of a series, and
    `f0` to `f7` fill an area with this colour. `grid` and `axis` draw lines in two shades of grey. Text without a
    class is readable on light and on dark pages.
    """
    light = "".join(_rules(number, pair[0]) for number, pair in enumerate(_COLOURS))
    dark = "".join(_rules(number, pair[1]) for number, pair in enumerate(_COLOURS))
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13">',
        f'<title id="title">{_escaped(title)}</title>',
        f'<desc id="desc">{_escaped(description)}</desc>',
        "<style>text{fill:#1b1b1b}.page{fill:#fff}.grid{stroke:#ddd}.axis{stroke:#555}.head{font-size:16px}"
        ".halo{stroke:#fff;stroke-width:4;paint-order:stroke}.inside{fill:#fff}"
        f".line{{fill:none;stroke-width:2.2}}.range,.lead{{fill:none;stroke-width:1}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#eee}.page{fill:#161616}.grid{stroke:#3a3a3a}.axis{stroke:#aaa}"
        f".halo{{stroke:#161616}}.inside{{fill:#161616}}{dark}}}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="head" x="20" y="28">{_escaped(_shortened(title, width - 40, size=16))}</text>',
    ]


def _rules(number: int, colour: str) -> str:
    return f".s{number}{{stroke:{colour}}}.f{number}{{fill:{colour}}}"


def curves(
    title: str, description: str, x: Axis, y: Axis, series: Sequence[Curve], marks: Sequence[Mark] = ()
) -> str:
    """A picture of lines, each with its name at its right end.

    A curve of one point is a dot. If texts of the horizontal axis would cover each other, some of them are left out.

    Raises:
        ValueError: there are more series than colours, or a series has no points.
    """
    if len(series) > len(_COLOURS):
        raise ValueError(f"{len(series)} curves are too many for one picture: at most {len(_COLOURS)}")
    if any(not curve.points for curve in series):
        raise ValueError("a curve has no points: leave it out")
    names = [_shortened(curve.name, _MOST_NAME) for curve in series]
    right = _WIDTH - _SAMPLE - math.ceil(max(map(_width, names), default=0)) - 20
    wide, high = right - _LEFT, _HEIGHT - _TOP - _BOTTOM

    def at_x(value: float) -> float:
        return round(_LEFT + wide * x.share(value), 1)

    def at_y(value: float) -> float:
        return round(_TOP + high * (1 - y.share(value)), 1)

    lines = begin(title, description)
    for number, value in enumerate(y.ticks):
        at = at_y(value)
        lines.append(f'<path class="grid" d="M{_LEFT} {at}H{right}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{_escaped(y.text(number))}</text>')
    places = [at_x(value) for value in x.ticks]
    lines += [f'<path class="axis" d="M{at} {_TOP + high}v5"/>' for at in places]
    for number in _apart(places, [x.text(number) for number in range(len(places))]):
        at, text = places[number], _escaped(x.text(number))
        lines.append(f'<text x="{at}" y="{_TOP + high + 20}" text-anchor="middle">{text}</text>')
    lines.append(f'<path class="axis" d="M{_LEFT} {_TOP + high}H{right}"/>')
    lines.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{_escaped(x.label)}</text>'
        f'<text x="20" y="{_TOP - 16}">{_escaped(y.label)}</text>'
    )
    for number, curve in enumerate(series):
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        points = " ".join(f"{at_x(one)} {at_y(other)}" for one, other in curve.points)
        lines.append(f'<path class="line s{number}"{dash} d="M{points}"/>')
        if len(curve.points) == 1:
            (one, other) = curve.points[0]
            lines.append(f'<circle class="f{number}" cx="{at_x(one)}" cy="{at_y(other)}" r="4"/>')
        # If several curves have a point at the same x, draw their intervals beside each other.
        beside = _RANGE_GAP * (number - (len(series) - 1) / 2)
        for (one, other), half in zip(curve.points, curve.half_widths, strict=False):
            low, top = at_y(other - half), at_y(other + half)
            # Leave out a very small interval: the line of the curve would cover most of it.
            if math.isfinite(half) and low - top >= _LEAST_RANGE:
                at = min(right, max(_LEFT, at_x(one) + beside))
                lines.append(f'<path class="range s{number}" d="M{at} {low}V{top}"/>')
    ends = sorted((at_y(curve.points[-1][1]), number) for number, curve in enumerate(series))
    last = _TOP - _LABEL_HEIGHT
    overflow = max(0.0, len(ends) * _LABEL_HEIGHT - high)
    for place, (at, number) in enumerate(ends):
        rest = (len(ends) - place - 1) * _LABEL_HEIGHT
        last = max(last + _LABEL_HEIGHT, min(at, _TOP + high + overflow - rest))
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        end = at_x(series[number].points[-1][0])
        lines.append(f'<path class="lead s{number}" d="M{end} {at}L{right + 14} {last}"/>')
        lines.append(
            f'<path class="line s{number}"{dash} d="M{right + 14} {last}h30"/>'
            f'<text x="{right + _SAMPLE}" y="{last + 4}">{_escaped(names[number])}</text>'
        )
    for mark in marks:
        at, beside = at_y(mark.y), _width(mark.text) / 2
        # Other curves may be close to the point. So the text is at a distance above the point or, at the top of the
        # picture, below the point.
        line, text = (-6, -62) if at - 80 > _TOP else (6, 72)
        middle = min(right - beside, max(_LEFT + beside, at_x(mark.x)))
        lines.append(
            f'<circle class="f0" cx="{at_x(mark.x)}" cy="{at}" r="4"/>'
            f'<path class="lead axis" d="M{at_x(mark.x)} {at + line}V{at + text + (4 if text < 0 else -14)}"/>'
            f'<text class="halo" x="{middle:.1f}" y="{at + text:.1f}" text-anchor="middle">'
            f"{_escaped(mark.text)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _width(text: str) -> float:
    return _CHARACTER * len(text)


def _shortened(text: str, most: float, *, size: int = 13) -> str:
    """The text. If it would be wider than `most` pixels, it is cut off, and ends with an ellipsis."""
    count = int(most / (_CHARACTER * size / 13))
    return text if len(text) <= count else f"{text[: count - 1]}…"


def _apart(places: Sequence[float], texts: Sequence[str]) -> list[int]:
    """The numbers of texts that do not cover each other. The first and the last text are always included."""
    chosen = [0]
    last = len(texts) - 1

    def fit(one: int, other: int) -> bool:
        return places[other] - places[one] >= (_width(texts[one]) + _width(texts[other])) / 2 + 4

    for number in range(1, last):
        if fit(chosen[-1], number) and fit(number, last):
            chosen.append(number)
    return [*chosen, last] if last else chosen


class Bar(NamedTuple):
    """One bar, of several parts.

    Args:
        name: the text beside the bar.
        parts: the name and the value of each part. Parts with the same name have the same colour in all bars.
        label: the text after the bar, such as the sum.
        texts: the value of each part as a text. The text is shown in the part if there is space. If empty, no values
            are shown.
    """

    name: str
    parts: Sequence[tuple[str, float]]
    label: str
    texts: Sequence[str] = ()


_BAR, _GAP, _LEGEND, _COLUMNS = 34, 22, 22, 3


def bars(title: str, description: str, drawn: Sequence[Bar]) -> str:
    """A picture of horizontal bars, one below the other, with a legend.

    The legend has a number for each name of a part. A part that is wide enough shows this number, so that the parts
    can be distinguished without colours. A part with the value 0 is not drawn.

    Args:
        title: the text above the bars.
        description: the text for screen readers.
        drawn: the bars, from the top.

    Raises:
        ValueError: the parts have more different names than there are colours.
    """
    names = list(dict.fromkeys(name for bar in drawn for name, _ in bar.parts))
    if len(names) > len(_COLOURS):
        raise ValueError(
            f"{len(names)} different names of parts are too many for one picture: at most {len(_COLOURS)}"
        )
    labels = [_shortened(bar.name, _MOST_NAME) for bar in drawn]
    begin_x = 30 + math.ceil(max(map(_width, labels), default=0))
    behind = 28 + math.ceil(max((_width(bar.label) for bar in drawn), default=0))
    scale = (_WIDTH - begin_x - behind) / (max((sum(v for _, v in bar.parts) for bar in drawn), default=0) or 1)
    legend = _TOP + len(drawn) * (_BAR + _GAP)
    lines = begin(title, description, height=legend + -(-len(names) // _COLUMNS) * _LEGEND + 12)
    for place, bar in enumerate(drawn):
        top, left = _TOP + place * (_BAR + _GAP), float(begin_x)
        lines.append(f'<text x="{begin_x - 10}" y="{top + 22}" text-anchor="end">{_escaped(labels[place])}</text>')
        for at, (name, value) in enumerate(bar.parts):
            number, wide = names.index(name), value * scale
            if value > 0:
                lines.append(
                    f'<rect class="f{number}" x="{left:.1f}" y="{top}" width="{max(wide - 1, 0.5):.1f}" '
                    f'height="{_BAR}"><title>{_escaped(name)}</title></rect>'
                )
                texts = [*([f"{number + 1}: {bar.texts[at]}"] if bar.texts else []), str(number + 1)]
                fitting = next((text for text in texts if _width(text) + 6 <= wide), "")
                if fitting:
                    lines.append(
                        f'<text class="inside" x="{left + wide / 2:.1f}" y="{top + 22}" text-anchor="middle">'
                        f"{_escaped(fitting)}</text>"
                    )
            left += wide
        lines.append(f'<text x="{left + 8:.1f}" y="{top + 22}">{_escaped(bar.label)}</text>')
    column = (_WIDTH - begin_x - 20) // _COLUMNS
    for number, name in enumerate(names):
        left, top = begin_x + number % _COLUMNS * column, legend + number // _COLUMNS * _LEGEND
        text = _shortened(f"{number + 1}  {name}", column - 24)
        lines.append(f'<rect class="f{number}" x="{left}" y="{top}" width="14" height="14"/>')
        lines.append(f'<text x="{left + 20}" y="{top + 12}">{_escaped(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _escaped(text: str) -> str:
    """A text for a picture, escaped, and without characters that XML forbids."""
    return escape("".join(one if one.isprintable() else "?" for one in text))
