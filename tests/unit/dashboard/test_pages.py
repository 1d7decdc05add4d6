"""What the pages show of real folders of jobs, and that their documents are those of the commands."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from safepoint.dashboard.access.sessions import Role
from safepoint.dashboard.pages import overviews
from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from tests.support.commands import safepoint
from tests.support.dashboards import SAMPLES, Sample, write_sample
from tests.support.job_values import job_spec
from tests.unit.dashboard.conftest import Dashboard

PAGES = (
    "/jobs",
    "/jobs?state=active&sort=name&q=llama",
    "/jobs/local/llama-sft-8b",
    "/jobs/local/llama-sft-8b/events",
    "/jobs/local/llama-sft-8b/logs",
    "/jobs/local/llama-sft-8b/logs?rank=0&q=loss&all=1",
    "/jobs/local/llama-sft-8b/checkpoints",
    "/jobs/local/llama-sft-8b/suspend",
    "/jobs/local/llama-sft-8b/scale",
    "/jobs/local/reward-model/resume",
    "/jobs/local/reward-model/delete",
    "/jobs/local/sweep-lr-3e-4",
    "/jobs/local/dpo-beta-01",
    "/checkpoints",
    "/storage",
    "/costs",
)


@pytest.fixture
def samples(home: Path) -> Path:
    for index, sample in enumerate(SAMPLES):
        write_sample(home, sample, age_s=7200 * (index + 1))
    return home


def test_every_page_is_shown(samples: Path, dashboard: Dashboard) -> None:
    """To an operator and to a viewer, as a whole document without a script or a style inside of it."""
    for role in Role:
        dashboard.visitor(role)
        for path in PAGES:
            answer = dashboard.get(path)
            assert answer.status_code == 200, answer.text
            assert answer.text.rstrip().endswith("</html>")
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|hx-on", answer.text)


def test_an_empty_list_says_what_to_type(dashboard: Dashboard) -> None:
    """A user without jobs learns how to submit one."""
    dashboard.visitor()
    assert "safepoint submit --output-dir out train.py" in dashboard.get("/jobs").text
    for path in ("/checkpoints", "/storage", "/costs"):
        assert "safepoint " in dashboard.get(path).text


def test_jobs_that_need_attention_come_first(samples: Path, dashboard: Dashboard) -> None:
    """A failed job, then one whose storage is nearly full; each with the reason."""
    dashboard.visitor()
    text = dashboard.get("/jobs").text
    names = re.findall(r'data-row="/jobs/local/([^"]+)"', text)
    assert names[0] == "dpo-beta-01"
    assert set(names[1:4]) >= {"tokenizer-ablation"}
    assert "CUDA out of memory" in text
    assert "the output folder is nearly full" in text
    assert len(names) == len(SAMPLES)


def test_a_list_is_filtered_and_sorted(samples: Path, dashboard: Dashboard) -> None:
    """By words, states and order; values that are not valid have no effect."""
    dashboard.visitor()

    def names(query: str) -> list[str]:
        return re.findall(r'data-row="/jobs/local/([^"]+)"', dashboard.get(f"/jobs?{query}").text)

    assert names("q=LLAMA") == ["llama-sft-8b"]
    assert names("q=train.py+failed") == ["dpo-beta-01"]
    assert names("state=suspended") == ["reward-model"]
    assert names("sort=name") == sorted(sample.name for sample in SAMPLES)
    assert names("state=bogus&sort=bogus&page=999999999&place=") == names("")
    assert names("q=nothing-has-this") == []


def test_documents_are_those_of_the_commands(samples: Path, dashboard: Dashboard) -> None:
    """`list`, `status`, `events`, `logs` and `checkpoints list`, by path and by header."""
    dashboard.visitor()
    name = "llama-sft-8b"
    output = str(samples / "out" / name)
    for path, command in {
        "/jobs": ("list",),
        f"/jobs/local/{name}": ("status", name),
        f"/jobs/local/{name}/events": ("events", name),
        f"/jobs/local/{name}/checkpoints": ("checkpoints", "list", output),
        f"/checkpoints?location={output}": ("checkpoints", "list", output),
    }.items():
        expected = safepoint(*command, "--json").document
        page, _, query = path.partition("?")
        found = dashboard.get(f"{page}.json{'?' if query else ''}{query}").json()
        assert _sorted(found) == _sorted(expected), path
        assert dashboard.get(path, headers={"Accept": "application/json"}).json() == found
    logs = dashboard.get(f"/jobs/local/{name}/logs.json?rank=0&all=1").json()
    assert logs[0] == {"version": 1, "source": "rank 0", "text": "step 1: loss 2.8738"}


def _sorted(document: Any) -> Any:
    """Lists of jobs have another order on the page."""
    return sorted(document, key=json.dumps) if isinstance(document, list) else document


def test_metrics_are_columns(samples: Path, dashboard: Dashboard) -> None:
    """One column for each metric, as long as the steps, and where each attempt begins."""
    dashboard.visitor()
    found = dashboard.get("/jobs/local/llama-sft-8b/metrics").json()
    assert found["steps"] == list(range(1, 1241))
    assert [*found["metrics"]][:2] == ["loss", "learning_rate"]
    assert all(len(values) == 1240 for values in found["metrics"].values())
    assert [one["attempt"] for one in found["attempts"]] == [1, 2, 3]


def test_a_page_shows_what_has_changed(samples: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that another process has written is on the next page."""
    for limit in ("_FRESH_S", "_BUSY_SHARE"):
        monkeypatch.setattr(f"safepoint.dashboard.reading.places.{limit}", 0.0)
    dashboard.visitor()
    assert "Suspended: step 820 is saved" in dashboard.get("/jobs/local/reward-model").text
    with History() as history:
        history.become("reward-model", JobState.FAILED, actor="test", message="the disk is full")
        history.add(_new_spec(samples), actor="test")
    assert "Is about to start." in dashboard.get("/jobs/local/brand-new").text
    assert "Failed at step 820: the disk is full." in dashboard.get("/jobs/local/reward-model").text
    assert "brand-new" in dashboard.get("/jobs").text


def _new_spec(root: Path) -> Any:
    return job_spec("brand-new", working_dir=str(root))


def test_a_suspension_is_explained_before_it_is_done(samples: Path, dashboard: Dashboard) -> None:
    """The safe step, the time of a save, the grace period, and what would be lost."""
    dashboard.visitor()
    assert "and only 27 s of the 30 s grace period can be used." in dashboard.get("/jobs/local/llama-sft-8b").text
    text = dashboard.get("/jobs/local/llama-sft-8b/suspend").text
    assert "The last safe point is step 1,200, 2 m " in text
    assert "only 27 s of the 30 s grace period can be used: it may not fit, and 44 s of work would be lost." in text
    found = dashboard.get("/jobs/local/llama-sft-8b/suspend.json").json()
    assert (found["fits"], found["safe_step"], found["usable_s"]) == (False, 1200, 27.0)
    refused = dashboard.get("/jobs/local/digits-baseline/suspend.json").json()
    assert (refused["is_possible"], refused["sentences"]) == (
        False,
        ["The job is Complete; there is nothing to stop."],
    )


def test_a_page_that_does_not_exist_says_so(samples: Path, dashboard: Dashboard) -> None:
    """Also in JSON, with the document of a failed command."""
    dashboard.visitor()
    for path in (
        "/nothing",
        "/jobs/local/nothing",
        "/jobs/mars/tiny",
        "/jobs/local/reward-model/explode",
        "/actions/9",
    ):
        assert dashboard.get(path).status_code == 404, path
        document = dashboard.get(f"{path}.json").json()
        assert (document["type"], bool(document["message"])) == ("exit_error", True)
    missing = dashboard.get("/checkpoints?location=/does/not/exist")
    assert missing.status_code == 400
    assert "There is no folder /does/not/exist" in missing.text


def test_costs_and_storage_have_numbers(samples: Path, dashboard: Dashboard) -> None:
    """The hours of all jobs, and the forecast of the launcher for a folder."""
    dashboard.visitor()
    costs = {one["job"]: one for one in dashboard.get("/costs.json").json()}
    assert len(costs["llama-sft-8b"]["interruptions"]) == 2
    rooms = {Path(one["location"]).name: one for one in dashboard.get("/storage.json").json()}
    assert rooms["tokenizer-ablation"]["saves_left"] == 2
    assert rooms["llama-sft-8b"]["free_bytes"] > 0
    low = rooms["tokenizer-ablation"]
    assert low["growth_bytes_s"] == pytest.approx(low["free_bytes"] / 1200)


def test_a_waiting_job_says_its_place(samples: Path, dashboard: Dashboard) -> None:
    """Behind the job that was preempted before it was submitted; on its page and in its document."""
    dashboard.visitor()
    name = "sweep-lr-3e-4"
    assert dashboard.get(f"/jobs/local/{name}.json").json()["queue_place"] == 2
    text = dashboard.get(f"/jobs/local/{name}").text
    assert "Waits: waits for 2 of 8 CPU slots; number 2 in the queue." in text


def test_the_last_resume_says_how_long_it_verified(samples: Path, dashboard: Dashboard) -> None:
    """From the event of the resume at which the newest start began."""
    dashboard.visitor()
    text = dashboard.get("/jobs/local/llama-sft-8b").text
    assert "Resumed from step 800, which was verified in 0.30 s." in text


def test_the_origin_of_an_option_is_shown(home: Path, dashboard: Dashboard) -> None:
    """Of a job that the command has submitted: the option, the variable, or the file and the line."""
    with History() as history:
        origins = {"save-steps": "safepoint.toml, line 3", "grace": "--grace"}
        settings = {"save_steps": 7, "grace_s": 45.0}
        history.add(job_spec("tiny", settings=settings, origins=origins, working_dir=str(home)), actor="test")
    dashboard.visitor()
    text = dashboard.get("/jobs/local/tiny").text
    for name, value, origin in (("save-steps", "7", "safepoint.toml, line 3"), ("grace", "45.0", "--grace")):
        assert f'<dt>{name}</dt><dd>{value}<span class="sub">set by {origin}</span></dd>' in text


def test_a_state_has_the_word_of_openshift_ai(samples: Path, dashboard: Dashboard) -> None:
    """Where it is another one."""
    dashboard.visitor()
    text = dashboard.get("/jobs").text
    assert 'title="OpenShift AI calls this Paused">Suspended<' in text
    assert re.search('class="pill" data-tone="good">Running<', text)


def test_a_job_without_reports_has_a_page(home: Path, dashboard: Dashboard) -> None:
    """Before its first attempt there is neither progress nor a timeline."""
    write_sample(home, Sample(name="early", state=JobState.CREATED, attempts=0))
    dashboard.visitor()
    text = dashboard.get("/jobs/local/early").text
    assert "Is about to start." in text
    assert 'class="timeline"' not in text


def test_a_folder_whose_server_does_not_answer(
    samples: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives up after a while. This is not the time limit of the page."""

    def give_up(*arguments: Any, **options: Any) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/net/out")

    monkeypatch.setattr(overviews, "read_rooms", give_up)
    dashboard.visitor()
    text = dashboard.get("/storage").text
    assert "A file cannot be read: Connection timed out" in text
