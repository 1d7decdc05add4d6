"""Pictures as SVG, without another package: bars.

Promises: text is escaped, so that a name from a file cannot add elements or scripts to the picture.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT, _TOP = 900, 210, 90, 62
_BAR, _GAP, _LEGEND = 34, 22, 22
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#000000")
"""Paul Tol's "bright" scheme, which colour-blind readers can tell apart."""
_FONT = "font-family='system-ui, sans-serif' font-size"


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


def bars(title: str, drawn: Sequence[Bar]) -> str:
    """Horizontal bars over each other, with a legend.

    Args:
        title: above the bars.
        drawn: the bars, from the top.
    """
    names = list(dict.fromkeys(name for bar in drawn for name, _ in bar.parts))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    most = max((sum(value for _, value in bar.parts) for bar in drawn), default=0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    body: list[str] = []
    top = _TOP
    for bar in drawn:
        body.append(_text(_LEFT - 10, top + 22, bar.name, anchor="end"))
        left = float(_LEFT)
        for name, value in bar.parts:
            width = value * scale
            if width > 0:
                body.append(
                    f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='{_BAR}' fill='{colours[name]}'>"
                    f"<title>{_escaped(name)}</title></rect>"
                )
            left += width
        body.append(_text(left + 8, top + 22, bar.label))
        top += _BAR + _GAP
    for number, name in enumerate(names):
        column, line = number % 3, number // 3
        left, base = _LEFT + column * 220, top + line * _LEGEND
        body.append(f"<rect x='{left}' y='{base}' width='14' height='14' fill='{colours[name]}'/>")
        body.append(_text(left + 20, base + 12, name, size=13))
    height = top + (-(-len(names) // 3)) * _LEGEND + 12
    return picture(title, body, height=height)


def picture(title: str, body: Sequence[str], *, width: int = _WIDTH, height: int) -> str:
    """A whole SVG document on a white ground, with a title."""
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        "role='img'>",
        f"<title>{_escaped(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(20, 34, title, size=19),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(left: float, base: float, text: str, *, size: int = 15, anchor: str = "start") -> str:
    return (
        f"<text x='{left:.1f}' y='{base:.1f}' {_FONT}='{size}' fill='#222222' text-anchor='{anchor}'>"
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return escape("".join(one if one.isprintable() else "?" for one in text), quote=True)
