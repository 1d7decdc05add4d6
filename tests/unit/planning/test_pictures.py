"""Pictures: valid SVG with words for everything, whose labels do not cover each other."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from safepoint.planning.pictures import Axis, Bar, Curve, bars, curves

SVG = "{http://www.w3.org/2000/svg}"
X = Axis(label="ranks", ticks=[8, 64, 512], is_log=True)
Y = Axis(label="%", ticks=[0, 50, 100])


def test_a_picture_has_a_title_a_description_and_all_names() -> None:
    """Also if names and titles have characters of XML."""
    series = [Curve(name=f"<{number}> & more", points=[(8, 99), (512, 98)]) for number in range(8)]
    tree = ElementTree.fromstring(curves("A < B", "C & D", X, Y, series))
    assert tree.get("role") == "img"
    assert tree.get("aria-labelledby") == "title desc"
    found = {child.tag: child.text for child in tree}
    assert (found[f"{SVG}title"], found[f"{SVG}desc"]) == ("A < B", "C & D")
    assert "prefers-color-scheme:dark" in (found[f"{SVG}style"] or "")
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"ranks", "%", "8", "64", "512", "0", "100", *(curve.name for curve in series)} <= set(texts)
    dashes = [path.get("stroke-dasharray") for path in tree.iter(f"{SVG}path") if "M64.0" in (path.get("d") or "")]
    assert len(set(dashes)) == 8, "each curve has its own dashes"


@pytest.mark.parametrize("value", [0, 50, 100])
def test_labels_are_apart_and_inside(value: float) -> None:
    series = [Curve(name=f"curve {number}", points=[(8, value), (512, value)]) for number in range(8)]
    tree = ElementTree.fromstring(curves("title", "description", X, Y, series))
    heights = sorted(float(text.get("y", 0)) for text in tree.iter(f"{SVG}text") if "curve" in (text.text or ""))
    assert all(after - before >= 15 for before, after in itertools.pairwise(heights))
    assert heights[0] > 40
    assert heights[-1] < 500


def test_values_outside_of_the_axes_stay_inside_of_the_picture() -> None:
    series = [Curve(name="far", points=[(1e-9, -1e9), (1e9, 1e9)], half_widths=[5, float("inf")])]
    picture = curves("title", "description", X, Y, series)
    assert "nan" not in picture
    assert "inf" not in picture


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="9 curves"):
        curves("title", "description", X, Y, [Curve(name="one", points=[(8, 1)])] * 9)
    with pytest.raises(ValueError, match="no points"):
        curves("title", "description", X, Y, [Curve(name="one", points=[])])


@pytest.mark.parametrize("ticks", [[], [1], [2, 2], [2, 1], [1, float("nan")], [1, float("inf")]])
def test_an_axis_rises(ticks: list[float]) -> None:
    """Otherwise a picture would run backwards, or divide by 0."""
    with pytest.raises(ValueError, match="ticks is"):
        Axis(label="x", ticks=ticks)
    with pytest.raises(ValueError, match="ticks begins with 0"):
        Axis(label="x", ticks=[0, 1], is_log=True)


def test_the_picture_of_the_documents_is_valid() -> None:
    path = Path(__file__).parents[3] / "docs" / "pictures" / "ettr.svg"
    tree = ElementTree.fromstring(path.read_text())
    assert tree.tag == f"{SVG}svg"
    assert path.stat().st_size < 20_000


def _parts(text: str) -> list[tuple[str, float, str]]:
    """Name, width and colour of each part of a bar."""
    return [
        (title.text or "", float(one.get("width", "")), one.get("class", ""))
        for one in ElementTree.fromstring(text).iter(f"{SVG}rect")
        if (title := one.find(f"{SVG}title")) is not None
    ]


def test_parts_of_bars_are_to_scale_and_have_one_colour() -> None:
    drawn = [Bar("a", [("x", 1.0), ("y", 3.0)], "4"), Bar("b", [("y", 2.0)], "2")]
    found = _parts(bars("title", "description", drawn))
    assert [name for name, *_ in found] == ["x", "y", "y"]
    widths = [width for _, width, _ in found]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert found[1][2] == found[2][2] != found[0][2]


@pytest.mark.parametrize("drawn", [[], [Bar("empty", [], "0")], [Bar("zero", [("x", 0.0)], "0")]])
def test_no_bars_are_a_picture_too(drawn: list[Bar]) -> None:
    assert _parts(bars("title", "description", drawn)) == []


def test_the_longest_bar_is_inside() -> None:
    text = bars("title", "description", [Bar("a", [("x", 1e15)], "1.0 PB")])
    assert all(190 + width + 80 < 860 for _, width, _ in _parts(text))


def test_more_parts_than_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="9 parts"):
        bars("title", "description", [Bar("a", [(str(number), 1.0) for number in range(9)], "9")])
