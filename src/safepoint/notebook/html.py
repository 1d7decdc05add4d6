"""Jobs and checkpoints as HTML for a cell of a notebook. The HTML is static, has its own style, and loads no files.

Promises: every value is shown as text, even if it contains HTML. Without Jinja, the functions return None.
"""

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from safepoint.answers.job_documents import event_rows
from safepoint.errors import SafepointError
from safepoint.estimates.job_needs import JobNeeds
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.notebook.text import plan_facts, plan_warning
from safepoint.notebook.views import CheckpointView, JobDetails, JobView
from safepoint.presentation.drawings import curve_of, metric_names, timeline_of
from safepoint.presentation.tones import TONES

_READ_WITHIN_S = 2.0
"""In seconds. Files that are not read within this time, because a server does not answer, are left out."""
_MOST_CURVES = 6
_MOST_POINTS = 200
_MOST_EVENTS = 8
_MOST_CHECKPOINTS = 8
_MOST_ROWS = 100
_NO_FORMULAS = "tex2jax_ignore mathjax_ignore"
"""In notebooks, MathJax shows text between two dollar signs as a formula, even if the signs are in different values.
It leaves elements of these classes as they are."""
_COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)


def job_html(view: JobView, details: JobDetails | None = None, *, note: str = "") -> str | None:
    """A job in a cell.

    Args:
        view: the job.
        details: its curves, events and checkpoints; None to read them now, up to the time of the view.
        note: a sentence to add; may be empty.
    """
    if details is None:
        details = _details_of(view)
    curves = [curve_of(name, details.points, most_points=_MOST_POINTS) for name in metric_names(details.points)]
    drawn = [curve for curve in curves if curve is not None][:_MOST_CURVES]
    checkpoints = details.checkpoints
    return _render(
        "job.html",
        view=view,
        tone=TONES[view.state],
        progress=view.progress,
        note=note,
        curves=drawn,
        timeline=timeline_of(details.attempts, details.events, until_s=view.read_s),
        events=event_rows(details.events[-_MOST_EVENTS:]),
        num_events=len(details.events),
        checkpoints=checkpoints[:_MOST_CHECKPOINTS] if checkpoints is not None else None,
        num_checkpoints=len(checkpoints or ()),
        read=_date(view.read_s),
    )


def jobs_html(views: Sequence[JobView]) -> str | None:
    """A list of jobs in a cell."""
    shown = views[-_MOST_ROWS:]
    return _render(
        "jobs.html",
        views=shown,
        tones=TONES,
        num_jobs=len(views),
        read=_date(max((view.read_s for view in views), default=clock.wall_s())),
    )


def checkpoints_html(rows: Sequence[CheckpointView]) -> str | None:
    """A list of checkpoints in a cell."""
    return _render("checkpoints.html", rows=rows[:_MOST_ROWS], num_checkpoints=len(rows))


def plan_html(needs: JobNeeds, grace_s: float | None) -> str | None:
    """What a job will need, in a cell; see `plan_warning`."""
    return _render("plan.html", facts=plan_facts(needs), warning=plan_warning(needs, grace_s))


def _details_of(view: JobView) -> JobDetails:
    if view.details is None:
        return JobDetails()
    try:
        found = Work(view.details).result(_READ_WITHIN_S)
    except SafepointError:  # the job was deleted meanwhile, or its location cannot be read
        found = None
    return JobDetails() if found is None else found.until(view.read_s)


def _date(time_s: float) -> str:
    return clock.as_utc(time_s)[:19].replace("T", " ")


def _render(template: str, **values: Any) -> str | None:
    environment = _environment()
    if environment is None:
        return None
    body: str = environment.get_template(template).render(**values)
    return f'<div class="safepoint {_NO_FORMULAS}"><style>{_style()}</style>{body}</div>'


@functools.cache
def _environment() -> Any:
    try:
        from safepoint.presentation.rendering import make_environment
    except ModuleNotFoundError:
        return None
    return make_environment("safepoint.notebook")


@functools.cache
def _style() -> str:
    """The rules of both style sheets, which apply to elements below the class `safepoint` only.

    The selector names the class three times, so that these rules override the rules of the notebook.
    """
    files = ("safepoint.presentation", "parts.css"), ("safepoint.notebook", "cell.css")
    texts = [resources.files(package).joinpath("static", name).read_text("utf-8") for package, name in files]
    rules = _COMMENT.sub("", "".join(texts)).replace(":root", "&")
    return ".safepoint.safepoint.safepoint{" + re.sub(r"\s*\n\s*", "", rules) + "}"
