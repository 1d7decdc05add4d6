"""Actions on jobs and checkpoints, by forms, on folders of jobs without processes."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.checkpoint.tools.removal import Removal
from safepoint.dashboard.access.sessions import Role
from safepoint.dashboard.pages import checkpoint_actions
from safepoint.dashboard.work import Outcome, Works
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.transparent.criu.program import Criu
from tests.support.dashboards import Sample, write_sample
from tests.support.patience import PATIENCE
from tests.unit.dashboard.conftest import Dashboard

STOPPED = Sample(name="tiny", state=JobState.SUSPENDED, step=30, steps=(10, 20, 30))


@pytest.fixture
def output(home: Path) -> Path:
    return write_sample(home, STOPPED)


def outcome(dashboard: Dashboard, answer: Any) -> dict[str, Any]:
    """What has become of an action."""
    assert answer.status_code == 303, answer.text
    path = answer.headers["location"]
    assert re.fullmatch(r"/actions/\d+", path)
    number = int(path.rpartition("/")[2])
    for thread in _threads(number):
        thread.join(30 * PATIENCE)
    page = dashboard.get(path)
    assert page.status_code == 200
    document = dashboard.get(f"{path}.json").json()
    assert document["state"] != "running"
    return document


def _threads(number: int) -> list[Any]:
    import threading

    return [thread for thread in threading.enumerate() if thread.name == f"safepoint-action-{number}"]


def test_a_job_is_resumed(output: Path, dashboard: Dashboard) -> None:
    """The request is in the history, with the actor."""
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/resume"))
    assert (found["state"], found["sentence"], found["by"]) == ("done", "The job resumes.", "dashboard")
    with History() as history:
        assert history.job("tiny").wanted is RequestedAction.RUN
        assert history.events("tiny")[-1].actor == "dashboard"


def test_a_job_is_resumed_from_an_older_checkpoint(output: Path, dashboard: Dashboard) -> None:
    """Its page first says what is repeated and moved aside; a step that is no checkpoint changes nothing."""
    dashboard.visitor()
    table = dashboard.get("/jobs/local/tiny/checkpoints").text
    links = re.findall(r'href="([^"]+)" aria-label="Resume from checkpoint-(\d+)"', table)
    base = "/jobs/local/tiny/resume"
    assert links == [(base, "30"), (f"{base}?step=20", "20"), (f"{base}?step=10", "10")]
    page = dashboard.get(f"{base}?step=10").text
    assert "Resume tiny from step 10?" in page
    assert re.search(r"from the checkpoint of step 10 and repeats 20 steps, about [^<]* of work, as soon as", page)
    assert "2 newer checkpoints will be moved aside; nothing is deleted." in page
    assert '<input type="hidden" name="step" value="10">' in page
    document = dashboard.get(f"{base}.json?step=10").json()
    assert (document["safe_step"], document["lost_s"] > 0) == (10, True)
    for text in ("-1", "x", "9" * 30, "²"):
        assert dashboard.get(f"{base}?step={text}").status_code == 400
        assert dashboard.post(base, {"step": text}).status_code == 400
    assert dashboard.get(f"{base}?step=15").status_code == 404
    failed = outcome(dashboard, dashboard.post(base, {"step": "15"}))
    assert failed["failure"].startswith("there is no checkpoint-15 in ")
    found = outcome(dashboard, dashboard.post(base, {"step": "10"}))
    assert (found["state"], found["sentence"]) == ("done", "The job resumes from step 10.")
    with History() as history:
        assert history.job("tiny").spec.settings.resume == str(output / "checkpoint-10")


@pytest.fixture
def _image_that_is_gone(output: Path) -> None:
    with History() as history:
        history.become("tiny", JobState.SUSPENDED, actor="test", image=str(output.parent / "image-1"))


@pytest.mark.usefixtures("_image_that_is_gone")
def test_a_job_that_has_a_process_image_says_where_it_goes_on(dashboard: Dashboard) -> None:
    """Before and after; here from its checkpoint, because the image is gone."""
    begins = "from the checkpoint of step 30, because the process image cannot be used: "
    dashboard.visitor()
    assert f"The job continues {begins}" in dashboard.get("/jobs/local/tiny/resume").text
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/resume"))
    assert found["sentence"].startswith(f"The job resumes {begins}")


def test_an_action_that_is_refused_says_why(output: Path, dashboard: Dashboard) -> None:
    """As the command does."""
    outcome(dashboard, dashboard.post("/jobs/local/tiny/resume"))
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/resume"))
    assert (found["state"], "not suspended" in found["failure"]) == ("failed", True)
    page = dashboard.get(f"/actions/{found['number']}").text
    assert "It was not done" in page


def test_a_job_is_scaled(output: Path, dashboard: Dashboard) -> None:
    """A number that is not valid changes nothing."""
    for text in ("", "0", "-1", "two", "1e3", "9" * 30, "²"):
        answer = dashboard.post("/jobs/local/tiny/scale", {"nnodes": text})
        assert answer.status_code == 400, text
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/scale", {"nnodes": "2"}))
    assert found["sentence"].startswith("The job has 2 nodes now, and is Suspended.")


def test_a_job_is_deleted_without_its_checkpoints(output: Path, dashboard: Dashboard) -> None:
    """They stay, unless the name of the job is typed, too."""
    refused = dashboard.post("/jobs/local/tiny/delete", {"checkpoints": "on", "name": "tin"})
    assert (refused.status_code, "type the name of the job" in refused.text) == (400, True)
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/delete", {"name": "tiny"}))
    assert found["result"] == {"name": "tiny", "checkpoints_deleted": 0}
    assert (output / "checkpoint-30").is_dir()
    assert dashboard.get("/jobs/local/tiny").status_code == 404


def test_a_job_is_deleted_with_its_checkpoints(output: Path, dashboard: Dashboard) -> None:
    """If the box is ticked and the name is typed."""
    form = {"checkpoints": "on", "name": "tiny"}
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/delete", form))
    assert found["result"]["checkpoints_deleted"] == 3
    assert not list(output.glob("checkpoint-*"))


def test_a_damaged_checkpoint_is_found(output: Path, dashboard: Dashboard) -> None:
    """One changed byte is found by reading the files, and one that is missing also in the list."""
    path = "/jobs/local/tiny/checkpoints"
    good = outcome(dashboard, dashboard.post(f"{path}/verify", {"checkpoint": "checkpoint-30"}))
    assert (good["result"]["valid"], "match their digests" in good["sentence"]) == (True, True)
    model = output / "checkpoint-30" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[100] ^= 1
    model.write_bytes(data)
    bad = outcome(dashboard, dashboard.post(f"{path}/verify", {"checkpoint": "checkpoint-30"}))
    assert bad["result"]["valid"] is False
    assert bad["result"]["faults"][0]["file"] == "model.safetensors"
    model.unlink()
    states = {one["name"]: one["state"] for one in dashboard.get(f"{path}.json").json()}
    assert states == {"checkpoint-30": "damaged", "checkpoint-20": "complete", "checkpoint-10": "complete"}


def test_a_checkpoint_is_copied_and_exported(output: Path, dashboard: Dashboard, tmp_path: Path) -> None:
    """To a full path; nothing is replaced, and nothing is written into a checkpoint."""
    path, copies, model = "/jobs/local/tiny/checkpoints", tmp_path / "copies", tmp_path / "model"
    form = {"checkpoint": "checkpoint-20", "target": str(copies)}
    for expected in (True, False):
        done = outcome(dashboard, dashboard.post(f"{path}/copy", form))
        assert (done["state"], done["result"]["copied"]) == ("done", expected)
    assert (copies / "checkpoint-20" / "model.safetensors").is_file()
    form["target"] = str(model)
    done = outcome(dashboard, dashboard.post(f"{path}/export", form))
    assert (done["state"], "model.safetensors" in done["result"]["files"]) == ("done", True)
    again = outcome(dashboard, dashboard.post(f"{path}/export", form))
    assert again["state"] == "failed"
    before = sorted(output.rglob("*"))
    for target in ("", "copies", "../x", str(output / "checkpoint-30" / "inner"), "nonsense://x"):
        for verb in ("copy", "export"):
            answer = dashboard.post(f"{path}/{verb}", {**form, "target": target})
            assert answer.status_code == 400, (verb, target)
    assert sorted(output.rglob("*")) == before
    missing = dashboard.post(f"{path}/copy", {"checkpoint": "checkpoint-99", "target": str(copies)})
    assert missing.status_code == 404


def test_an_older_checkpoint_is_deleted(output: Path, dashboard: Dashboard) -> None:
    """Not the newest complete one, not a damaged one, not without confirmation, and none that does not exist."""
    path = "/jobs/local/tiny/checkpoints/delete"
    assert dashboard.post(path, {"checkpoint": "checkpoint-10"}).status_code == 400
    for name in ("checkpoint-99", "", "..", "../../etc"):
        assert dashboard.post(path, {"checkpoint": name, "sure": "on"}).status_code == 404, name
    kept = outcome(dashboard, dashboard.post(path, {"checkpoint": "checkpoint-30", "sure": "on"}))
    assert kept["state"] == "failed"
    gone = outcome(dashboard, dashboard.post(path, {"checkpoint": "checkpoint-10", "sure": "on"}))
    assert gone["result"]["deleted"] == [str(output / "checkpoint-10")]
    assert sorted(found.name for found in output.glob("checkpoint-*")) == ["checkpoint-20", "checkpoint-30"]


@pytest.mark.parametrize(
    ("removal", "reason"),
    [
        ("kept", "a process reads it, or a later release wrote it"),
        ("failed", "Operation not permitted"),
    ],
)
def test_a_checkpoint_that_was_not_deleted(
    removal: str, reason: str, output: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because a process has begun to read it. The action has failed, also for programs."""

    def remove(inventory: Any, items: list[Any]) -> Removal:
        (item,) = items
        return Removal(kept=(item,)) if removal == "kept" else Removal(failed=((item, reason),))

    monkeypatch.setattr(checkpoint_actions, "remove", remove)
    form = {"checkpoint": "checkpoint-10", "sure": "on"}
    found = outcome(dashboard, dashboard.post("/jobs/local/tiny/checkpoints/delete", form))
    assert (found["state"], found["result"], found["sentence"]) == ("failed", None, "")
    assert found["failure"] == f"{output / 'checkpoint-10'} was not deleted: {reason}"
    assert "It was not done" in dashboard.get(f"/actions/{found['number']}").text


def test_any_location_can_be_verified(output: Path, dashboard: Dashboard) -> None:
    """By an operator, also without a job."""
    form = {"checkpoint": "checkpoint-20", "location": str(output)}
    found = outcome(dashboard, dashboard.post("/checkpoints/verify", form))
    assert found["result"]["valid"] is True


def test_a_link_is_made_for_another_person(dashboard: Dashboard) -> None:
    """It works once, with the role that was chosen."""
    for role, expected in (
        ("viewer", "You may read."),
        ("operator", "You may read and change."),
        ("x", "You may read."),
    ):
        page = dashboard.post("/links", {"role": role}).text
        (link,) = re.findall(r"http://127\.0\.0\.1:8765(/enter\?token=[\w-]+)", page)
        dashboard.leave()
        assert expected in dashboard.get(link).text
        assert dashboard.get(link).status_code == 401


def test_numbers_of_actions_are_not_used_again() -> None:
    """After a restart, an open page must not show another action under the number of its own."""
    done = Outcome(sentence="done", document={})
    numbers = {
        works.begin("suspend tiny", lambda: done, back="/", by="ada").number
        for works in [Works(lambda key: None) for _ in range(4)]
        for _ in range(4)
    }
    assert len(numbers) == 16
    assert all(0 < number < 1 << 53 for number in numbers)  # a script reads them as floats


def test_a_freeze_is_explained_and_done(home: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says why this machine cannot do it; with CRIU, where the image will be."""
    write_sample(home, Sample(name="busy", state=JobState.RUNNING, step=30, steps=(10,)))
    page = "/jobs/local/busy/freeze"
    dashboard.visitor()
    monkeypatch.setenv("SAFEPOINT_CRIU", str(home / "none"))
    found = dashboard.get(f"{page}.json").json()
    assert not found["is_possible"]
    assert found["sentences"][0].startswith("This machine cannot freeze the job: ")
    assert outcome(dashboard, dashboard.post(page))["state"] == "failed"
    criu = Criu(path="criu", version="4.2.1")
    for module in ("safepoint.answers.freezing", "safepoint.dashboard.pages.actions"):
        monkeypatch.setattr(f"{module}.find_criu", lambda: criu)
    text = dashboard.get(page).text
    assert f"are written to a process image in {job_folder('busy')}/images" in text
    assert ">Freeze</button>" in text
    requests: list[tuple[Any, ...]] = []

    def freeze(criu: Criu, name: str, location: Any, *, is_running_after: bool, actor: str) -> Any:
        requests.append((criu, name, location.where("image-1"), is_running_after, actor))
        manifest = SimpleNamespace(name="image-1", size_bytes=2 * 10**9)
        return SimpleNamespace(manifest=manifest, frozen_s=1.5)

    monkeypatch.setattr("safepoint.dashboard.pages.actions.freeze_job", freeze)
    image = f"{job_folder('busy')}/images/image-1"
    done = outcome(dashboard, dashboard.post(page))
    assert requests == [(criu, "busy", image, False, "dashboard")]
    assert (done["result"]["image"], done["result"]["frozen_s"]) == (image, 1.5)
    assert done["sentence"].startswith(f"A process image of the job was made: {image} (2.0 GB; frozen for 1.50 s).")
    dashboard.visitor(Role.VIEWER)
    assert ">Freeze</button>" not in dashboard.get(page).text
