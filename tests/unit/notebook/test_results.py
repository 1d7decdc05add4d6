"""The results of the client in a notebook: HTML that is static and escaped, and short texts elsewhere."""

import copy
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from IPython.lib.pretty import pretty

from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.notebook import html
from safepoint.progress.metric_history import METRICS_NAME, MetricPoint
from safepoint.sdk import TrainerClient, TrainJob
from safepoint.sdk.results.lists import CheckpointList, JobList
from tests.support.dashboards import SAMPLES, Sample, write_sample
from tests.support.hostile_texts import HOSTILE, Tags, write_hostile

RUNNING = Sample(
    name="tiny", state=JobState.RUNNING, step=40, steps=(10, 20, 30), num_points=40, attempts=2, save_s=48.0
)
FETCHES = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "image", "use"}


class Visible(HTMLParser):
    """The text of HTML, without its style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._in_style = False
        self.parts: list[str] = []
        self.feed(text)
        self.close()
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if not self._in_style:
            self.parts.append(data)


def shown(result: object) -> str:
    text: str | None = result._repr_html_()  # type: ignore[attr-defined]
    assert text is not None
    return Visible(text).text


def test_a_job_is_shown_as_its_page_shows_it(home: Path, client: TrainerClient) -> None:
    """Its sentence, what needs attention, progress, curves, timeline, checkpoints and events."""
    write_sample(home, RUNNING)
    job = client.get_job("tiny")
    text = shown(job)
    assert "tiny Running Trains: step 40 of 2,000" in text
    assert "If it had to stop now: newest save: step 30" in text
    assert "Last safe point 30" in text
    assert "4 further metrics" in text
    assert re.search(r"Checkpoints .*checkpoint-30 complete periodic .* checkpoint-20", text)
    assert re.search(r"Events .*saved keeper periodic, step", text)
    assert f"Checkpoints in {home}/out/tiny. As it was on 20" in text
    markup = job._repr_html_() or ""
    assert 'aria-label="loss from step 1 to step 40: lowest' in markup
    assert '<progress class="meter" max="100" value="2.0"' in markup


def test_a_short_text_where_there_is_no_html(home: Path, client: TrainerClient) -> None:
    """In a list, in a terminal, and in Jupyter without HTML."""
    write_sample(home, RUNNING)
    job = client.get_job("tiny")
    assert re.fullmatch(r"<TrainJob tiny: Running, step 40 of 2,000, loss 2\.\d+, step 30 is saved>", repr(job))
    first, second, third = pretty(job).split("\n")
    assert first == "tiny: Running"
    assert second.startswith("  Trains: step 40 of 2,000, ")
    assert third.startswith("  If it had to stop now: newest save: step 30")
    assert repr(TrainJob(**dict.fromkeys(("runtime", "steps", "num_nodes", "creation_timestamp")), name="x"))


def test_lists_are_tables(home: Path, client: TrainerClient) -> None:
    """They are lists as before, and so are their slices."""
    assert shown(client.list_jobs()) == " No jobs. client.train(trainer=…) submits one. "
    assert pretty(client.list_jobs()) == "[]"
    for index, sample in enumerate(SAMPLES):
        write_sample(home, sample, age_s=5400 * (index + 1))
    jobs = client.list_jobs()
    assert isinstance(jobs, list)
    assert jobs == list(jobs)
    assert jobs[0].name in {sample.name for sample in SAMPLES}
    text = shown(jobs)
    assert all(sample.name in text for sample in SAMPLES)
    assert "waits for 2 of 8 CPU slots" in text
    assert pretty(jobs).startswith("7 jobs, oldest first\n  ")
    assert "2 jobs" in shown(jobs[:2])
    assert isinstance(jobs[:2], JobList)
    checkpoints = client.list_checkpoints("llama-sft-8b")
    assert "3 checkpoints" in shown(checkpoints)
    assert "checkpoint-1200 complete periodic" in shown(checkpoints)
    assert pretty(checkpoints).startswith("3 checkpoints\n  checkpoint-1200: complete, periodic, ")
    assert isinstance(checkpoints[1:], CheckpointList)
    assert shown(client.list_checkpoints("sweep-lr-3e-4")) == " No checkpoints. "


def test_what_is_newer_than_the_result_is_left_out(home: Path, client: TrainerClient) -> None:
    """A result shows one moment, also when it is shown later."""
    write_sample(home, RUNNING)
    job = client.get_job("tiny")
    before = shown(job)
    later = MetricPoint(time=clock.as_utc(clock.wall_s() + 60), attempt=2, step=41, values={"loss": 9.0})
    with (job_folder("tiny") / METRICS_NAME).open("ab") as file:
        file.write(later.to_line())
    assert shown(job) == before
    assert job.view is not None
    details = job.view.details
    assert details is not None
    assert [len(details().points), len(details().until(job.view.read_s).points)] == [41, 40]
    nothing = details().until(0.0)
    assert not any((nothing.points, nothing.attempts, nothing.events, nothing.checkpoints))


def test_a_deleted_job_is_shown_as_it_was(home: Path, client: TrainerClient) -> None:
    """Without what can no longer be read; another job of its name adds nothing to it."""
    write_sample(home, Sample(name="tiny", state=JobState.COMPLETE, step=4, steps=(4,), num_points=4))
    job = client.get_job("tiny")
    assert "Events" in shown(job)
    client.delete_job("tiny")
    assert "tiny Complete Finished at step 4." in shown(job)
    assert "Events" not in shown(job)
    write_sample(home, Sample(name="tiny", state=JobState.RUNNING, step=9, num_points=9))
    assert "Events" not in shown(job)


def test_results_can_be_copied(home: Path, client: TrainerClient) -> None:
    """As results of Kubeflow's client can; what a notebook shows does not make two results differ."""
    write_sample(home, RUNNING)
    job = client.get_job("tiny")
    for other in (copy.deepcopy(job), pickle.loads(pickle.dumps(job)), client.get_job("tiny")):
        assert other == job
        assert "further metrics" in shown(other)


def test_a_cell_is_static(home: Path, client: TrainerClient) -> None:
    """No script, no id, no link, nothing that is fetched; one style, below one class."""
    write_sample(home, RUNNING)
    for result in (client.get_job("tiny"), client.list_jobs(), client.list_checkpoints("tiny")):
        markup = result._repr_html_() or ""  # type: ignore[union-attr]
        tags = Tags()
        tags.feed(markup)
        assert {tag for tag, _ in tags.found} & FETCHES == set()
        assert not tags.links
        attributes = {name for _, names in tags.found for name in names}
        assert not {name for name in attributes if name.startswith("on") or name in {"id", "style", "srcset"}}
        assert not re.search(r"url\(|@import|@font-face|https?:", markup)
        assert markup.count("<style>.safepoint.safepoint.safepoint{") == markup.count("<style>") == 1
        assert len(markup) < 64_000


def test_dollar_signs_are_no_formulas(home: Path, client: TrainerClient) -> None:
    """JupyterLab and nbconvert let MathJax set the text between two of them, also across values. It looks for classes
    of an element around the text."""
    write_sample(home, RUNNING)
    for result in (client.get_job("tiny"), client.list_jobs(), client.list_checkpoints("tiny")):
        markup = result._repr_html_() or ""  # type: ignore[union-attr]
        classes = re.match(r'<div class="([^"]*)">', markup)
        assert classes is not None
        assert {"tex2jax_ignore", "mathjax_ignore"} <= set(classes[1].split())
        assert "tex2jax_process" not in markup


def test_hostile_texts_are_shown_as_text(home: Path, client: TrainerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add no element or attribute, and show no credentials or control characters; in texts neither."""
    usual: set[tuple[str, tuple[str, ...]]] = set()
    for index, text in enumerate(("harmless", *HOSTILE)):
        monkeypatch.setenv("XDG_STATE_HOME", str(home / f"state-{index}"))
        write_hostile(home / f"{index}", text)
        job, jobs = client.get_job("tiny"), client.list_jobs()
        tags = Tags()
        tags.feed((job._repr_html_() or "") + (jobs._repr_html_() or ""))  # type: ignore[attr-defined]
        if text == "harmless":
            usual = tags.found
            continue
        assert tags.found <= usual | {("time", ("data-exact", "datetime", "title"))}, text
        assert not tags.links
        texts = "".join((*tags.text, repr(job), pretty(job), pretty(jobs)))
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", texts), text
        assert "secret" not in texts
        if "://" not in text and not text.isspace():
            assert printable(text)[:40] in "".join(tags.text), text


def test_without_jinja_there_are_texts(home: Path, client: TrainerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter then shows the text."""
    write_sample(home, RUNNING)
    monkeypatch.setattr(html, "_environment", lambda: None)
    assert client.get_job("tiny")._repr_html_() is None
    assert client.list_jobs()._repr_html_() is None  # type: ignore[attr-defined]
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from safepoint.notebook.html import checkpoints_html\nprint(checkpoints_html([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_a_suspension_shows_its_receipt(home: Path, client: TrainerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is safe, where it is, and the digest of its manifest."""
    write_sample(home, Sample(name="tiny", state=JobState.SUSPENDED, step=20, steps=(20,), num_points=20))
    job = client.suspend_job("tiny")
    assert job.receipt is not None
    assert (job.receipt.step, job.receipt.is_read, job.receipt.was_requested) == (20, False, False)
    assert job.receipt.text.startswith(f"step 20 was saved in {home}/out/tiny/checkpoint-20 (digest xxh3-128:")
    assert re.search(r"Receipt .*Safe step .*20 .*Digest of its manifest .*xxh3-128:\w{32}", shown(job))
    assert "\n  Safe step: 20\n" in pretty(job)
    assert client.get_job("tiny").receipt is None
