"""The table of checkpoints: when each was last read, on how many ranks it can be resumed, and why it is kept."""

import json
import os
import re
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.dashboard.pages import checkpoint_actions
from safepoint.dashboard.reading.checkpoint_view import Check, checks_in, reasons_to_keep, rows_of
from safepoint.errors import ConflictError
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.leases import reading
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings
from tests.support.checkpoints import commit, prepared
from tests.support.dashboards import Sample, write_sample
from tests.unit.dashboard.conftest import Dashboard


def event(name: str, time: str, **detail: object) -> JobEvent:
    return JobEvent(time=time, name=name, actor="rank 0", cause="", detail=detail)


def test_a_resume_reads_all_files() -> None:
    """The newest resume of each step counts; other events and other values do not."""
    found = checks_in(
        [
            event("resumed", "2026-01-31T09:30:00Z", step=20),
            event("resumed", "2026-01-31T09:31:00Z", step=20),
            event("saved", "2026-01-31T09:32:00Z", step=40),
            event("resumed", "2026-01-31T09:33:00Z", step="40"),
            event("resumed", "2026-01-31T09:33:00Z", step=True),
        ]
    )
    assert found == {"checkpoint-20": Check(time="2026-01-31T09:31:00Z", how="at a resume")}


def test_a_check_of_an_earlier_checkpoint_does_not_count(tmp_path: Path) -> None:
    """A run may save the same step again."""
    prepared(tmp_path)
    folder = commit(prepared(tmp_path), 20)
    for path in folder.rglob("*"):  # the manifest states that it was made on the first of January
        os.utime(path, (clock.parse_utc("2026-01-01T00:00:00Z"),) * 2)
    inventory = open_inventory(str(tmp_path))[0]
    created_s = inventory.item("checkpoint-20").created_s
    for time, is_shown in ((created_s + 60, True), (created_s - 60, False)):
        check = Check(time=clock.as_utc(time), how="here")
        [row] = rows_of(inventory, checks={"checkpoint-20": check})
        assert row.check == (check if is_shown else None)


def test_a_checkpoint_that_a_process_reads_is_not_deleted(tmp_path: Path) -> None:
    """The message gives this reason, too."""
    for step in (10, 20):
        commit(prepared(tmp_path), step)
    inventory = open_inventory(str(tmp_path))[0]
    with (
        reading(tmp_path / "checkpoint-10" / MANIFEST_NAME),
        pytest.raises(ConflictError, match="or a process reads or uploads it, or another"),
    ):
        checkpoint_actions._delete(inventory, "checkpoint-10")
    checkpoint_actions._delete(inventory, "checkpoint-10")
    assert not (tmp_path / "checkpoint-10").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {10: ["no policy sets a limit"], 20: ["no policy sets a limit"], 30: ["no policy sets a limit"]}),
        ({"keep": "newest=2,every=10"}, {10: ["every=10"], 20: ["newest=2", "every=10"]}),
        (
            {"save_total_limit": 2},
            {10: ["a process reads it"], 20: ["newest=2"], 30: ["it is the newest", "newest=2"]},
        ),
        ({"keep": "every=20"}, {20: ["every=20"], 30: ["it is the newest"]}),
        ({"keep": "best=1:loss,newest=1"}, {30: ["it is the newest", "newest=1"]}),
    ],
)
def test_why_a_checkpoint_is_kept(tmp_path: Path, options: dict[str, object], kept: dict[int, list[str]]) -> None:
    """By each policy of the run that keeps it, because it is the newest, or because a process reads it."""
    for step in (10, 20, 30):
        commit(prepared(tmp_path), step)
    items = open_inventory(str(tmp_path))[0].items()
    in_use = {"checkpoint-10"} if "save_total_limit" in options else set[str]()
    found = reasons_to_keep(items, in_use, RunSettings(**options))  # type: ignore[arg-type]
    for step, reasons in kept.items():
        assert list(found[f"checkpoint-{step}"]) == reasons
    if options == {"keep": "every=20"}:
        assert found["checkpoint-10"] == ()
    in_store = reasons_to_keep(items, (), RunSettings(**options), is_store=True)  # type: ignore[arg-type]
    assert set(in_store.values()) == {("no policy sets a limit",)}
    if options.get("keep"):
        options = {"store_keep": options["keep"], "save_total_limit": 1}
        assert reasons_to_keep(items, in_use, RunSettings(**options), is_store=True) == found  # type: ignore[arg-type]


def test_the_table_of_a_job(home: Path, dashboard: Dashboard) -> None:
    """Verified here or at a resume, with the numbers of ranks and the policies."""
    output = write_sample(home, Sample(name="tiny", state=JobState.SUSPENDED, step=30, steps=(10, 20, 30)))
    manifest = json.loads((output / "checkpoint-30" / "safepoint-manifest.json").read_text())
    num_batches = manifest["world_size"] * manifest["gradient_accumulation"]
    resumed = {"time": clock.utc_now(), "event": "resumed", "step": 10}
    with (job_folder("tiny") / "events.jsonl").open("a") as file:
        file.write(json.dumps(resumed) + "\n")
    dashboard.visitor()
    page = dashboard.get("/jobs/local/tiny/checkpoints").text
    assert len(re.findall("names and sizes compared now", page)) == 2
    assert re.search(r"all files read <time [^>]*>[^<]*</time>, at a resume", page)
    if num_batches > 1:
        assert "resumes on 1, " in page
    assert "no policy sets a limit" in page
    work = dashboard.post("/jobs/local/tiny/checkpoints/verify", {"checkpoint": "checkpoint-30"})
    number = work.headers["location"].rpartition("/")[2]
    while dashboard.get(f"/actions/{number}.json").json()["state"] == "running":
        pass
    page = dashboard.get("/jobs/local/tiny/checkpoints").text
    assert re.search(r"all files read <time [^>]*>[^<]*</time>, here", page)


def test_damage_that_was_found_stays_visible(home: Path, dashboard: Dashboard) -> None:
    """A list compares only sizes. Without the result of the check, the damaged one would seem to be the next."""
    output = write_sample(home, Sample(name="tiny", state=JobState.SUSPENDED, step=30, steps=(10, 20, 30)))
    model = output / "checkpoint-30" / "model.safetensors"
    good = model.read_bytes()
    model.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    path, headings = "/jobs/local/tiny/checkpoints", list[str]()

    def found() -> tuple[str, str, str]:
        work = dashboard.post(f"{path}/verify", {"checkpoint": "checkpoint-30"})
        while dashboard.get(f"{work.headers['location']}.json").json()["state"] == "running":
            pass
        headings.append(re.findall("<h1>(.*)</h1>", dashboard.get(work.headers["location"]).text)[0])
        page = dashboard.get(path).text
        row = re.search(r"<tr>\s*<td class=\"name\">checkpoint-30.*?</tr>", page, re.DOTALL)
        next_one = re.search(r"(checkpoint-\d+) <span class=\"sub\">newest", page)
        assert row is not None
        assert next_one is not None
        return row[0], next_one[1], dashboard.get("/jobs/local/tiny/resume").text

    row, next_one, resume = found()
    assert headings == ["It is damaged"]
    assert ">damaged<" in row
    assert "model.safetensors: its content changed" in row
    assert next_one == "checkpoint-20"
    assert f"{path}/delete" not in row
    assert "checkpoint-30 is damaged. The newest checkpoint without a known fault: checkpoint-20." in resume
    assert {one["name"]: one["state"] for one in dashboard.get(f"{path}.json").json()}["checkpoint-30"] == "damaged"
    model.write_bytes(good)
    row, next_one, resume = found()
    assert (">complete<" in row, next_one, "is damaged." in resume) == (True, "checkpoint-30", False)


def test_a_copy_on_this_machine_is_named(tmp_path: Path) -> None:
    """Of a run that publishes its checkpoints in an object store, for which a folder stands here."""
    for step in (10, 20):
        commit(prepared(tmp_path / "bucket"), step)
    commit(prepared(tmp_path / "local"), 20)
    inventory = open_inventory(str(tmp_path / "bucket"))[0]
    inventory.folder = None
    rows = rows_of(inventory, local=str(tmp_path / "local"))
    assert all(row.world_size for row in rows)
    found = {row.item.name: row.also_in for row in rows}
    assert found == {"checkpoint-20": str(tmp_path / "local" / "checkpoint-20"), "checkpoint-10": ""}
    for local in ("", str(tmp_path / "none"), "nul\0"):
        assert {row.also_in for row in rows_of(inventory, local=local)} == {""}
