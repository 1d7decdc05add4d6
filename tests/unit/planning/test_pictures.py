"""Bars as SVG: their lengths are to scale, equal parts have one colour, and the document is well-formed."""

from xml.etree import ElementTree

import pytest

from safepoint.planning.pictures import Bar, bars

_SVG = "{http://www.w3.org/2000/svg}"


def _rectangles(text: str) -> list[tuple[str, float, str]]:
    """Name, width and colour of each part of a bar."""
    root = ElementTree.fromstring(text)
    return [
        (title.text or "", float(one.get("width", "")), one.get("fill", ""))
        for one in root.iter(f"{_SVG}rect")
        if (title := one.find(f"{_SVG}title")) is not None
    ]


def test_parts_are_to_scale_and_have_one_colour() -> None:
    found = _rectangles(bars("title", [Bar("a", [("x", 1.0), ("y", 3.0)], "4"), Bar("b", [("y", 2.0)], "2")]))
    assert [name for name, *_ in found] == ["x", "y", "y"]
    widths = [width for _, width, _ in found]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert found[1][2] == found[2][2] != found[0][2]


@pytest.mark.parametrize("drawn", [[], [Bar("empty", [], "0")], [Bar("zero", [("x", 0.0)], "0")]])
def test_nothing_to_draw_is_a_picture_too(drawn: list[Bar]) -> None:
    assert _rectangles(bars("title", drawn)) == []


def test_the_longest_bar_and_its_label_are_inside() -> None:
    text = bars("title", [Bar("a", [("x", 1e15)], "1.0 PB")])
    width = float(ElementTree.fromstring(text).get("width", ""))
    assert all(210 + bar < width for _, bar, _ in _rectangles(text))
