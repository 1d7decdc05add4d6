"""A training, or a person who can write to its output folder, gives a metric a name that no page shows as it is.

The script of the page compares the names in the answer with those of the curves in the page. If they never agreed, it
would request the page again and again, without a pause.
"""

import html
import re

import pytest

from safepoint.dashboard.reading.job_view import metric_columns
from safepoint.presentation.drawings import curve_of, metric_names
from safepoint.presentation.rendering import make_environment
from safepoint.progress.metric_history import MetricPoint

_FIGURE = '{% from "parts.html" import curve_figure %}{{ curve_figure(curve) }}'


@pytest.mark.parametrize(
    "name",
    ["loss", "a\x00b", "a\nb", "\x1b[31m", "https://user:secret@host/loss", '"><script>', "é", "e\u0301", "\ud800"],
)
def test_the_page_and_the_answer_have_the_same_names(name: str) -> None:
    points = [MetricPoint(time="", attempt=1, step=step, values={name: float(step)}) for step in (1, 2)]
    curve = curve_of(metric_names(points)[0], points)
    page = make_environment("safepoint.dashboard").from_string(_FIGURE).render(curve=curve)
    shown = re.search(r'data-metric="([^"]*)"', page)
    assert shown is not None
    (column,) = metric_columns(points)["metrics"]
    assert html.unescape(shown[1]) == column
    assert "secret" not in column
