"""Pictures: valid SVG with words for everything, whose labels do not cover each other."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from safepoint.planning.pictures import Axis, Bar, Curve, Mark, bars, curves, rising_ticks

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
    assert all(37 + width + 71 < 860 for _, width, _ in _parts(text))


def test_more_names_of_parts_than_colours_are_refused() -> None:
    """Several parts may have the same name, so that the number of parts does not matter."""
    bars("title", "description", [Bar("a", [(str(number % 8), 1.0) for number in range(9)], "9")])
    with pytest.raises(ValueError, match="9 different names of parts"):
        bars("title", "description", [Bar("a", [(str(number), 1.0) for number in range(9)], "9")])


def test_intervals_are_beside_each_other_and_none_is_a_speck() -> None:
    series = [Curve(name=str(at), points=[(64, 50)], half_widths=[half]) for at, half in enumerate((10, 20, 0.1))]
    tree = ElementTree.fromstring(curves("title", "description", X, Y, series))
    drawn = [path.get("d") or "" for path in tree.iter(f"{SVG}path") if (path.get("class") or "").startswith("range")]
    assert len({one.split()[0] for one in drawn}) == len(drawn) == 2


# ---- texts that are readable ---------------------------------------------------------------------------------------

WIDTH, CHARACTER = 860, 7.2


def _spans(picture: str) -> list[tuple[str, float, float, float]]:
    """Text, left end, right end and height of each text of 13 pixels, by a generous estimate of its width."""
    found: list[tuple[str, float, float, float]] = []
    for text in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        size = 16 if text.get("class") == "head" else 13
        wide, at = CHARACTER * size / 13 * len(text.text or ""), float(text.get("x", 0))
        left = at - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor", ""), 0)
        found.append((text.text or "", left, left + wide, float(text.get("y", 0))))
    return found


def _is_readable(picture: str) -> bool:
    """Whether each text is inside of the picture, and none covers another one."""
    spans = _spans(picture)
    inside = all(left >= 0 and right <= WIDTH for _, left, right, _ in spans)
    return inside and not any(
        abs(one[3] - other[3]) < 12 and one[1] < other[2] and other[1] < one[2]
        for one, other in itertools.combinations(spans, 2)
    )


@pytest.mark.parametrize("name", ["a", "lost if nothing is announced", "w" * 200])
def test_names_of_curves_and_bars_are_inside(name: str) -> None:
    """Long ones are cut off with a sign."""
    series = [Curve(name=f"{name}{number}", points=[(8, 10 * number), (512, 10)]) for number in range(3)]
    assert _is_readable(curves(name, "description", X, Y, series))
    drawn = [Bar(name, [("x", 1.0), (name, 3.0)], "4.0 GB", ["1.0 GB", "3.0 GB"])]
    assert _is_readable(bars(name, "description", drawn))


@pytest.mark.parametrize(
    "ticks",
    [
        [8, 64, 512, 1024, 4096, 16384, 32768, 65536, 131072],
        list(range(1, 65)),
        [8, 9],
        [1_000_000, 1_000_001, 10_000_000],
        [4, 8, 16],
    ],
)
def test_texts_of_an_axis_do_not_cover_each_other(ticks: list[float]) -> None:
    """The first and the last one are always there."""
    axis = Axis(label="ranks", ticks=ticks, texts=[f"{tick:,.0f}" for tick in ticks], is_log=True)
    picture = curves("title", "description", axis, Y, [Curve(name="one", points=[(ticks[0], 1), (ticks[-1], 2)])])
    assert _is_readable(picture)
    texts = {text for text, *_ in _spans(picture)}
    assert {axis.text(0), axis.text(len(ticks) - 1)} <= texts


@pytest.mark.parametrize("place", [(8, 0), (8, 100), (64, 1), (512, 50), (512, 100)])
def test_a_mark_is_inside(place: tuple[float, float]) -> None:
    picture = curves(
        "title", "description", X, Y, [Curve(name="one", points=[place])], [Mark(*place, "best: 5 m 39 s")]
    )
    assert _is_readable(picture)
    assert picture.count("<circle") == 2, "a curve of one point is a dot, too"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (8.66, 100, [0, 20, 40, 60, 80, 100]),
        (97.9, 100, [97.5, 98, 98.5, 99, 99.5, 100]),
        (99.97, 100, [99.6, 99.7, 99.8, 99.9, 100]),
        (100, 100, [99.6, 99.7, 99.8, 99.9, 100]),
        (0, 11.4, [0, 5, 10, 15]),
        (0, 0.0003, [0, 0.0001, 0.0002, 0.0003]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
    ],
)
def test_round_ticks(low: float, high: float, expected: list[float]) -> None:
    """Curves that are close to 100 % do not lie on each other at the top of the picture."""
    assert rising_ticks(low, high) == pytest.approx(expected)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_on_light_and_dark_pages() -> None:
    """At least 4.5, as WCAG 2.2 requires it of texts: of each colour to its page, and of texts in bars to the bar."""
    style = next(ElementTree.fromstring(bars("title", "description", [])).iter(f"{SVG}style")).text or ""
    light, dark = style.split("@media")
    for part, page, inside in ((light, "#fff", "#fff"), (dark, "#161616", "#161616")):
        assert f".page{{fill:{page}}}" in part
        assert f".inside{{fill:{inside}}}" in part
        colours = [rule.partition("{fill:")[2] for rule in part.split("}") if ".f" in rule[:3]]
        assert len(colours) == 8
        assert all(_contrast(colour, page) >= 4.5 for colour in colours)
        assert all(_contrast(colour, inside) >= 4.5 for colour in colours)
