"""The commands for jobs, without a training: what they refuse and how, and what they say of jobs that are there."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.cli.commands.watch import picture, sparkline
from safepoint.cli.job_answers import page, timed_starts
from safepoint.jobs.local.history import SCHEMA_VERSION, History
from safepoint.jobs.local.paths import history_file, job_folder, state_folder
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.records import JobEvent, RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, SaveStatistics, SpaceRecord, State
from safepoint.settings.run_settings import RunSettings
from tests.support.commands import safepoint
from tests.support.job_values import job_record, job_spec, supervised

SCRIPT = "train.py"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, and a script to submit."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "0")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (project / SCRIPT).write_text("")
    return tmp_path / "state"


def spec(name: str, **changes: Any) -> JobSpec:
    values: dict[str, Any] = {"name": name, "program": (SCRIPT,), "python": "python3", "working_dir": "/"}
    return JobSpec(**values | changes)


def add(name: str, state: JobState, **changes: Any) -> None:
    """A job that is there, without a supervisor: as far as commands can see, it has ended or is suspended."""
    with History() as history:
        history.add(spec(name, **changes), actor="test")
        history.become(name, state, actor="test")
        if state is JobState.SUSPENDED:
            history.request(name, RequestedAction.SUSPEND, actor="test")


def connections(text: str, mode: int = 0o600) -> None:
    path = state_folder().parent.parent / "config" / "safepoint" / "connections.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(mode)


_AS_NOBODY = """
import os, sys
from safepoint.cli.failures import run_command
from safepoint.cli.main import root
state = os.environ["XDG_STATE_HOME"]
os.environ["XDG_STATE_HOME"] = "/dev/null"
assert run_command(root(), sys.argv[1:]) == 13
print("loaded", file=sys.stderr)
os.environ["XDG_STATE_HOME"] = state
if os.getuid() == 0:
    os.setuid(65534)
sys.exit(run_command(root(), sys.argv[1:]))
"""
"""It has imported everything when it has failed elsewhere: a user without rights may not read the interpreter."""


@pytest.mark.parametrize("arguments", [["submit", "train.py"], ["list"], ["delete", "done"]])
def test_a_state_folder_that_cannot_be_written(arguments: list[str]) -> None:
    """By a user without rights; a process of root gives its own away first."""
    with tempfile.TemporaryDirectory() as text:  # not below pytest's folder, which no other user may enter
        root = Path(text)
        root.chmod(0o755)
        state = root / "state" / "safepoint"
        (root / "work").mkdir()
        (root / "work" / SCRIPT).write_text("")
        with History(state / "jobs.sqlite3") as history:
            history.add(spec("done"), actor="test")
            history.become("done", JobState.COMPLETE, actor="test")
        for path in (state, *state.iterdir()):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted(path.name for path in state.iterdir())
        done = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, *arguments],
            cwd=root / "work",
            env={**os.environ, "XDG_STATE_HOME": str(root / "state"), "HOME": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 13, done.stderr
        assert "Traceback" not in done.stderr
        assert str(state) in done.stderr.partition("loaded")[2]
        assert not done.stdout
        assert sorted(path.name for path in state.iterdir()) == before


def newer_history() -> None:
    History().close()
    with sqlite3.connect(history_file()) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    database.close()


def damaged_history() -> None:
    state_folder().mkdir(parents=True)
    history_file().write_bytes(b"no database at all" * 100)


def unwritable_state() -> None:
    state_folder().parent.write_text("a file where a folder should be")


def two_with_one_beginning() -> None:
    add("tiny-1", JobState.COMPLETE)
    add("tiny-2", JobState.COMPLETE)


KEYS = 'AWS_ACCESS_KEY_ID = "k"\nAWS_SECRET_ACCESS_KEY = "sesame"\n'
NOTHING: Callable[[], None] = lambda: None  # noqa: E731
SUBMIT: list[tuple[list[str], int, str]] = [
    ([], 2, "Missing argument"),
    (["absent.py"], 2, "there is no script absent.py"),
    (["-m", "no_such_module_anywhere"], 2, "there is no module"),
    (["--nproc-per-node", "0", SCRIPT], 2, "--nproc-per-node '0'"),
    (["--nproc-per-node", "two", SCRIPT], 2, "--nproc-per-node 'two'"),
    (["--nproc-per-node", "gpu", SCRIPT], 2, "--nproc-per-node gpu means 0 ranks on this machine"),
    (["-o", "json", SCRIPT], 2, "--format json has no effect without --dry-run"),
    (["--dry-run", "-o", "xml", SCRIPT], 2, "--format 'xml' must be yaml or json"),
    (["--nnodes", "0", SCRIPT], 2, "num_nodes 0"),
    (["--nnodes", "x", SCRIPT], 2, "--nnodes"),
    (["--cpu", "-1", SCRIPT], 2, "--cpu"),
    (["--gpu", "8", SCRIPT], 2, "this machine has 0"),
    (["--priority", "high", SCRIPT], 2, "--priority"),
    (["--max-restarts", "-1", SCRIPT], 2, "max_restarts -1"),
    (["--env", "NOVALUE", SCRIPT], 2, "NAME=VALUE"),
    (["--env", "1A=b", SCRIPT], 2, "'1A'"),
    (["--name", "", SCRIPT], 2, "job name ''"),
    (["--env", "AWS_SECRET_ACCESS_KEY=sesame", SCRIPT], 2, "--connection"),
    (["--name", "Not A Name", SCRIPT], 2, "lower case"),
    (["--name", "x" * 64, SCRIPT], 2, "63"),
    (["--name", "../../etc", SCRIPT], 2, "lower case"),
    (["--save-strategy", "often", SCRIPT], 2, "--save-strategy 'often'"),
    (["--save-steps", "0", SCRIPT], 2, "--save-steps 0"),
    (["--save-steps", "5", "--save-strategy", "epoch", SCRIPT], 2, "contradicts"),
    (["--save-total-limit", "0", SCRIPT], 2, "--save-total-limit 0"),
    (["--grace", "-3", SCRIPT], 2, "--grace -3"),
    (["--keep", "everything", SCRIPT], 2, "--keep"),
    (["--store-keep", "newest=none", SCRIPT], 2, "--store-keep"),
    (["--on-upload-failure", "cry", SCRIPT], 2, "--on-upload-failure"),
    (["--snapshot-steps", "0", SCRIPT], 2, "--snapshot-steps"),
    (["--snapshot-slots", "99", SCRIPT], 2, "--snapshot-slots"),
    (["--metrics-port", "70000", SCRIPT], 2, "--metrics-port 70000"),
    (["--output-dir", "ftp://somewhere/x", SCRIPT], 2, "unknown scheme"),
    (["--output-dir", "s3://", SCRIPT], 2, "names no bucket"),
    (["--output-dir", "pvc://claim/x", SCRIPT], 2, "claim"),
    (["--resume", "nowhere", SCRIPT], 2, "there is no such folder"),
    (["--from-scratch", "--resume", ".", SCRIPT], 2, "contradicts"),
    (["--connection", "absent", SCRIPT], 10, "no data connection 'absent'"),
    (["--output-dir", "s3://bucket/x", "--connection", "dead", SCRIPT], 13, "cannot be used"),
    (["--no-such-option", SCRIPT], 2, "--no-such-option"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), SUBMIT, ids=[" ".join(case[0])[:40] for case in SUBMIT])
def test_what_submit_refuses(arguments: list[str], code: int, said: str, project: Path) -> None:
    """The message names what is wrong, the exit code says of what kind, and nothing of the job is left behind."""
    connections(f'[dead]\n{KEYS}AWS_S3_ENDPOINT = "http://127.0.0.1:9"\n')
    outcome = safepoint("submit", "--json", *arguments)
    assert outcome.code == code, outcome.stderr
    assert outcome.exit_error["code"] == code
    assert said in outcome.exit_error["message"] + str(outcome.exit_error["hint"])
    assert "Traceback" not in outcome.stderr
    assert safepoint("list", "--json").document == []
    assert not list((state_folder() / "jobs").glob("*"))
    assert sorted(path.name for path in project.iterdir()) == [SCRIPT]


def test_a_current_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said to be one, for a module and for a script elsewhere."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for program in (["-m", "json.tool"], [str(tmp_path / "project" / SCRIPT)]):
        outcome = safepoint("submit", *program)
        assert outcome.code == 2, outcome.stderr
        assert "the current folder was deleted" in outcome.stderr
    monkeypatch.chdir(tmp_path)


def test_a_mistyped_key_of_run_is_refused_by_submit_too(project: Path) -> None:
    """What only `run` has is none of its business; what neither has is a mistake."""
    (project / "safepoint.toml").write_text("[run]\nnode-rank = 0\n")
    assert "there is no script" in safepoint("submit", "absent.py").stderr
    (project / "safepoint.toml").write_text("[run]\nsave-step = 20\n")
    outcome = safepoint("submit", "--json", SCRIPT)
    assert outcome.code == 2
    assert "save-step" in outcome.exit_error["message"]
    assert outcome.exit_error["hint"] == "did you mean save-steps?"


@pytest.mark.parametrize("command", ["status", "logs", "events", "suspend", "resume", "delete"])
def test_a_name_that_is_no_text(command: str) -> None:
    """Bytes of the command line that are not UTF-8 are no job's name."""
    outcome = safepoint(command, "--json", "\udcff")
    assert outcome.code == 10, outcome.stderr
    assert "there is no job" in outcome.exit_error["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["status"], ["logs"], ["events"], ["suspend"], ["resume"], ["delete"], ["watch", "--json"]),
        *(["scale", "--nnodes", "2"], ["plan", "storage", "--for"], ["plan", "cost", "--for"], ["thaw"]),
    ],
)
def test_a_misspelt_name_of_a_job_suggests_the_nearest_one(arguments: list[str]) -> None:
    """Also if it is written in capitals; the hint still says how to see all jobs."""
    add("train", JobState.COMPLETE)
    add("other", JobState.COMPLETE)
    for misspelt in ("trian", "TRAIN"):
        outcome = safepoint(*arguments, misspelt)
        assert outcome.code == 10, outcome.stderr
        assert f"there is no job '{misspelt}'" in outcome.stderr
        assert "did you mean train? `safepoint list` shows the jobs" in outcome.stderr
    assert "did you mean" not in safepoint(*arguments, "zzzz").stderr


def test_a_location_of_a_misspelt_job_suggests_the_nearest_one() -> None:
    """`job:NAME` in place of a location."""
    add("train", JobState.COMPLETE)
    assert "did you mean train?" in safepoint("checkpoints", "list", "job:trian").stderr


def test_what_may_be_a_secret_is_said() -> None:
    """Before the job is refused for another reason, which spares this test a supervisor."""
    outcome = safepoint("submit", "--env", "HF_TOKEN=hf_x", "--env", "A=1", "--output-dir", "pvc://claim/x", SCRIPT)
    assert outcome.code == 2
    assert "warning: --env has HF_TOKEN; values of --env are stored in the job history" in outcome.stderr
    assert "hf_x" not in outcome.stderr


def test_which_keys_are_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose name was mistyped means the environment's keys, which a line reports."""
    connections(f"[minio]\n{KEYS}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "environ")
    output = ["--output-dir", "pvc://claim/x"]
    assert (
        "AWS_* variables of the environment are used"
        in safepoint("submit", "--connection", "mimio", *output, SCRIPT).stderr
    )
    assert "are used" not in safepoint("submit", "--connection", "minio", *output, SCRIPT).stderr


def test_a_rank_that_the_job_has_not() -> None:
    """It is not found, with those that there are; one of an earlier, larger attempt still is."""
    add("two", JobState.COMPLETE, ranks_per_node=2)
    folder = job_folder("two") / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-7.log").write_text("before it was scaled\n")
    outcome = safepoint("logs", "two", "--rank", "99", "--json")
    assert outcome.code == 10
    assert outcome.exit_error["message"] == "job two has no rank 99"
    assert outcome.exit_error["hint"] == "ranks of the job: 0 to 1"
    assert safepoint("logs", "two", "--rank", "1").code == 0
    assert safepoint("logs", "two", "--rank", "7").stdout == "before it was scaled\n"


def test_a_new_line_in_an_argument_stays_in_its_row() -> None:
    """And so does whatever else would move a terminal's cursor."""
    add("odd", JobState.COMPLETE, program=(SCRIPT, "a\nb\x1b[2J\udcff"))
    lines = safepoint("list").stdout.splitlines()
    assert len(lines) == 2
    assert r"a\nb\x1b[2J\udcff" in lines[1]
    assert r"a\nb\x1b[2J" in safepoint("status", "odd").stdout


def test_a_folder_that_is_nearly_full_is_on_the_page() -> None:
    """Only while the training runs, and only if the launcher has warned."""
    low = SpaceRecord(
        place="output folder", path="/out", free_bytes=35 * 10**9, needed_bytes=10**10, saves_left=3, remaining_s=2400
    )
    for record, state, expected in (
        (replace(low, is_low=True), State.TRAINING, "the output folder is full in 3 saves, about 40 m 00 s (35.0 GB"),
        (
            replace(low, is_low=True, saves_left=0),
            State.TRAINING,
            "the output folder has no room for the next save (",
        ),
        (SpaceRecord(place="folder", remaining_s=60, is_low=True), State.TRAINING, "is nearly full, about 1 m 00 s"),
        (low, State.TRAINING, ""),
        (replace(low, is_low=True), State.FINISHED, ""),
    ):
        progress = replace(report("any", state=state), space=(record,))
        lines = page(job_record(state=JobState.RUNNING), progress, [], None)
        found = [line for line in lines if line.startswith("  space ")]
        assert len(found) == bool(expected)
        assert all(expected in line for line in found)


def test_while_it_resumes_no_pace_of_before_is_shown() -> None:
    """The values are those of the previous attempt until the new one has reported its own."""
    progress = report("any", state=State.TRAINING)
    running, resuming = (
        "\n".join(page(job_record(state=state), progress, [], None))
        for state in (JobState.RUNNING, JobState.RESUMING)
    )
    assert "steps/s" in running
    assert " left" in running
    assert "steps/s" not in resuming
    assert " left" not in resuming


COMMANDS: list[tuple[Callable[[], None], list[str], int, str]] = [
    (NOTHING, ["status", "absent"], 10, "there is no job 'absent'"),
    (NOTHING, ["status", ""], 10, "there is no job"),
    (NOTHING, ["status", "../jobs"], 10, "there is no job"),
    (NOTHING, ["logs", "absent"], 10, "there is no job"),
    (NOTHING, ["events", "absent"], 10, "there is no job"),
    (NOTHING, ["suspend", "absent"], 10, "there is no job"),
    (NOTHING, ["resume", "absent"], 10, "there is no job"),
    (NOTHING, ["delete", "absent"], 10, "there is no job"),
    (NOTHING, ["scale", "absent", "--nnodes", "2"], 10, "there is no job"),
    (two_with_one_beginning, ["status", "tiny"], 11, "matches 2 jobs: tiny-1, tiny-2"),
    (lambda: add("done", JobState.COMPLETE), ["suspend", "done"], 11, "cannot be suspended"),
    (lambda: add("done", JobState.COMPLETE), ["resume", "done"], 11, "is complete"),
    (lambda: add("done", JobState.COMPLETE), ["scale", "done", "--nnodes", "2"], 11, "is complete"),
    (lambda: add("held", JobState.SUSPENDED), ["scale", "held", "--nnodes", "0"], 2, "--nnodes"),
    (lambda: add("held", JobState.SUSPENDED), ["logs", "held", "--rank", "-1"], 2, "--rank"),
    (lambda: add("held", JobState.SUSPENDED), ["suspend", "held", "--timeout", "0"], 2, "--timeout"),
    (lambda: add("done", JobState.COMPLETE), ["delete", "done", "--checkpoints"], 11, "nothing was done"),
    (
        lambda: add("done", JobState.COMPLETE),
        ["submit", "--name", "done", SCRIPT],
        11,
        "there is already a job 'done'",
    ),
    (newer_history, ["list"], 11, "newer release of Safepoint"),
    (newer_history, ["submit", SCRIPT], 11, "newer release of Safepoint"),
    (damaged_history, ["list"], 13, "cannot be used"),
    (unwritable_state, ["list"], 13, "cannot be created"),
    (unwritable_state, ["submit", SCRIPT], 13, "cannot be created"),
    (lambda: connections(f"[minio]\n{KEYS}", 0o644), ["submit", "--connection", "minio", SCRIPT], 2, "chmod 600"),
    (
        lambda: connections("[minio]\nAWS_ACCESS_KEY_ID = 'k'"),
        ["submit", "--connection", "minio", SCRIPT],
        2,
        "has no",
    ),
    (lambda: connections("[minio\nkey = 'sesame"), ["submit", "--connection", "minio", SCRIPT], 2, "not valid TOML"),
]


@pytest.mark.parametrize(("before", "arguments", "code", "said"), COMMANDS)
def test_what_other_commands_refuse(
    before: Callable[[], None], arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    """Likewise, and the state folder is as it was; a history may have been made, with nothing in it."""
    before()
    jobs_before = _jobs()
    there = _contents(tmp_path / "state")
    outcome = safepoint(*arguments[:1], "--json", *arguments[1:])
    assert outcome.code == code, outcome.stderr
    assert said in outcome.exit_error["message"] + str(outcome.exit_error["hint"])
    assert "sesame" not in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert _contents(tmp_path / "state") in (there, [str(history_file())])
    assert _jobs() == jobs_before


@pytest.mark.parametrize("option", [("--from", "20"), ("--from-checkpoint",)])
def test_a_choice_of_the_checkpoint_on_a_cluster(option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and the job does not resume."""
    resumed: list[str] = []
    cluster = SimpleNamespace(resume=resumed.append)
    monkeypatch.setattr("safepoint.cli.commands.jobs.open_jobs", lambda *_: contextlib.nullcontext(cluster))
    outcome = safepoint("resume", "--on", "kind", "--json", *option, "tiny")
    assert outcome.code == 16, outcome.stderr
    assert f"{option[0]} is not possible for job tiny" in outcome.exit_error["message"]
    assert resumed == []


def _jobs() -> list[tuple[object, ...]]:
    """All that the history says of jobs, where there is one that can be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{history_file()}?mode=ro", uri=True)) as database:
            return database.execute("SELECT * FROM job ORDER BY name").fetchall()
    except sqlite3.DatabaseError:
        return []


_SIDE_FILES = {".sqlite3-wal", ".sqlite3-shm"}


def _contents(folder: Path) -> list[str]:
    """What is there; the database's own side files come and go."""
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() and path.suffix not in _SIDE_FILES)


def test_watch_needs_a_terminal() -> None:
    """It says what to use in a script."""
    outcome = safepoint("watch")
    assert outcome.code == 2
    assert "use --json" in outcome.stderr


def report(name: str, **changes: Any) -> Progress:
    progress = Progress(
        time="2026-01-31T09:30:00.000Z",
        state=State.INTERRUPTED,
        step=40,
        max_steps=100,
        epoch=0.4,
        loss=2.5,
        step_s=0.5,
        safe_step=30,
        safe_time="2026-01-31T09:29:00.000Z",
        saves=SaveStatistics(count=2, mean_stall_s=0.01, last_durable_s=1.5, expected_s=1.5),
    )
    progress = replace(progress, **changes)
    job_folder(name).mkdir(parents=True, exist_ok=True)
    (job_folder(name) / "progress.json").write_bytes(progress.to_bytes())
    return progress


def test_what_list_and_status_say() -> None:
    """Newest first, with the step, what is done and what is safe; the document has the same figures."""
    add("older", JobState.COMPLETE)
    add("newer", JobState.SUSPENDED, settings=RunSettings(output_dir="out"), num_nodes=2, priority=3)
    with History() as history:
        history.become(
            "newer", JobState.SUSPENDED, actor="test", message="step 30 is saved", safe_step=30, exit_code=75
        )
    report("newer")
    report("older", state=State.FINISHED, step=100)
    lines = safepoint("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", "newer", "older"]
    assert lines[0].split()[:4] == ["JOB", "STATE", "AGE", "STEP"], "beside SAFE STEP it would be taken for its age"
    assert "40/100" in lines[1]
    assert "40 %" in lines[1]
    page = safepoint("status", "new").stdout
    assert "newer: Suspended (step 30 is saved)" in page
    assert "2 nodes, 1 rank on each" in page
    assert "safepoint resume newer" in page
    assert "left" not in safepoint("status", "older").stdout
    document = safepoint("status", "newer", "--json").document
    assert (document["state"], document["safe_step"], document["exit_code"]) == ("Suspended", 30, 75)
    assert document["progress"]["step"] == 40
    assert document["output_dir"] == "/out"  # in full: the job runs in /
    assert document["num_nodes"] == 2
    assert [job["name"] for job in safepoint("list", "--json").document] == ["newer", "older"]
    assert safepoint("list", "--active").stdout.strip() == "no jobs"


@pytest.mark.parametrize(
    ("became", "figures", "code", "said"),
    [
        (JobState.SUSPENDED, {"attempt": 1, "exit_code": 75}, 0, ""),
        (JobState.SUSPENDED, {}, 0, ""),
        (JobState.SUSPENDED, {"attempt": 1, "exit_code": None}, 3, "without a durable save"),
        (JobState.SUSPENDED, {"attempt": 1, "exit_code": 143}, 3, "without a durable save"),
        (JobState.SUSPENDED, {"attempt": 1, "exit_code": 13}, 3, "without a durable save"),
    ],
)
def test_a_suspension_without_a_save_is_no_success(
    became: JobState, figures: dict[str, Any], code: int, said: str
) -> None:
    """The job is described all the same; a script does not take it for saved."""
    add("held", became)
    with History() as history:
        history.become("held", became, actor="test", **figures)
    outcome = safepoint("suspend", "held", "--json")
    assert outcome.code == code
    assert outcome.document["state"] == became
    assert said in (outcome.exit_error["message"] if code else "")


def test_a_job_that_fails_while_it_stops_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the message says that it is not suspended."""
    add("held", JobState.SUSPENDED)
    with History() as history:
        history.become("held", JobState.FAILED, actor="test", message="exit code 3", attempt=1, exit_code=3)
        failed = history.job("held")
    monkeypatch.setattr("safepoint.jobs.local.local_jobs.LocalJobs.suspend", lambda *_, **__: failed)
    outcome = safepoint("suspend", "held")
    assert (outcome.code, outcome.stdout) == (1, "job held is Failed: exit code 3\n")
    assert "failed before it was suspended" in outcome.stderr


def test_what_somebody_has_damaged_does_not_hide_the_rest() -> None:
    """A row, a record of progress, an event: the other jobs are listed, and the job itself is shown."""
    for name in ("good", "bad", "worse"):
        add(name, JobState.COMPLETE)
        report(name)
    with sqlite3.connect(history_file()) as database:
        database.execute("UPDATE job SET created = 'yesterday' WHERE name = 'worse'")
    database.close()
    (job_folder("bad") / "progress.json").write_text('{"step": 3, "safe_step": 2, "safe_time": "yesterday"}')
    (job_folder("bad") / "events.jsonl").write_text("[" * 100_000 + "\n" + '{"event": "saved", "step": "x"}\n')
    outcome = safepoint("list")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.stdout.splitlines()] == ["JOB", "bad", "good"]
    for command in ("status", "events"):
        assert safepoint(command, "bad").code == 0
    assert safepoint("status", "worse").code == 13
    assert safepoint("delete", "worse").code == 0


def test_logs_say_who_printed() -> None:
    """One rank alone is printed plainly; several with their names; a rank can be picked."""
    add("one", JobState.COMPLETE)
    add("two", JobState.COMPLETE, ranks_per_node=2)
    for name, ranks in (("one", 1), ("two", 2)):
        folder = job_folder(name) / "logs"
        folder.mkdir(parents=True)
        for rank in range(ranks):
            (folder / f"rank-{rank}.log").write_text(f"hello from {rank}\n")
    assert safepoint("logs", "one").stdout == "hello from 0\n"
    assert safepoint("logs", "two").stdout == "rank 0 | hello from 0\nrank 1 | hello from 1\n"
    assert safepoint("logs", "two", "--rank", "1").stdout == "hello from 1\n"
    lines = safepoint("logs", "two", "--json").stdout.splitlines()
    assert json.loads(lines[1]) == {"version": 1, "source": "rank 1", "text": "hello from 1"}


def test_events_are_in_the_order_of_time() -> None:
    """Those of commands and of ranks are one story."""
    add("done", JobState.COMPLETE)
    job_folder("done").mkdir(parents=True, exist_ok=True)
    event = {"time": "2999-01-01T00:00:00.000Z", "event": "saved", "actor": "keeper", "step": 7, "trigger": "jit"}
    (job_folder("done") / "events.jsonl").write_text(json.dumps(event) + '\n{"time": "cut')
    names = [item["event"] for item in safepoint("events", "done", "--json").document]
    assert names == ["submitted", "complete", "saved"]
    assert "step 7" in safepoint("events", "done").stdout.splitlines()[-1]


def test_status_shows_the_phases_of_the_last_starts() -> None:
    """Only with --verbose, the newest five; lines of another form are shown as far as they can be read."""
    add("done", JobState.COMPLETE)
    report("done")
    phases = [{"phase": "noticed", "at_s": 0.0, "rank": None}, {"phase": "first step done", "at_s": 0.91, "rank": 1}]
    starts: list[Any] = [{"restart": number, "node": 0, "phases": phases} for number in range(7)]
    starts += [{"restart": 8, "phases": "none"}, {"restart": 9, "node": 0, "phases": [3, {"phase": "x"}]}]
    lines = [json.dumps({"time": "2026-01-31T09:30:00.000Z", "event": "start_timed", **start}) for start in starts]
    (job_folder("done") / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert "starts of the ranks" not in safepoint("status", "done").stdout
    page = safepoint("status", "done", "--verbose").stdout
    assert "restart 6, node 0: noticed 0.0, first step done 0.91" in page
    assert "restart 9, node 0: x None" in page
    assert "restart 4" in page
    assert "restart 3" not in page


def test_the_last_starts_of_many_nodes() -> None:
    """Five starts, complete, of any number of nodes; also if the numbers of restarts begin again."""
    numbers = [0, 1, 2, 0, 0, 1, 2]
    details: list[dict[str, Any]] = [{"restart": number, "node": node} for number in numbers for node in range(8)]
    events = [
        JobEvent(time=str(place), name="start_timed", actor="", cause="", detail=detail)
        for place, detail in enumerate(details)
    ]
    lines = timed_starts(events)
    assert len(lines) == 5 * 8
    assert lines[0].startswith("16  restart 2, node 0")
    assert lines[-1].startswith("55  restart 2, node 7")
    assert len(timed_starts(events[: 3 * 8])) == 3 * 8


def test_events_say_what_was_chosen_before_a_deadline() -> None:
    """In words, before the figures."""
    add("done", JobState.COMPLETE)
    job_folder("done").mkdir(parents=True, exist_ok=True)
    event = {
        "time": "2999-01-01T00:00:00.000Z",
        "event": "deadline_choice",
        "actor": "rank 0",
        "choice": "commit_snapshot",
        "step": 7,
    }
    (job_folder("done") / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert "commit snapshot, step 7" in safepoint("events", "done").stdout.splitlines()[-1]


def test_delete_forgets_the_job_and_keeps_its_checkpoints(project: Path) -> None:
    """The folder of the job goes, that of its checkpoints stays."""
    (project / "out" / "checkpoint-5").mkdir(parents=True)
    add("done", JobState.COMPLETE, settings=RunSettings(output_dir=str(project / "out")))
    report("done")
    outcome = safepoint("delete", "done")
    assert outcome.code == 0
    assert "its checkpoints stay in" in outcome.stdout
    assert not job_folder("done").exists()
    assert (project / "out" / "checkpoint-5").is_dir()
    assert safepoint("status", "done").code == 10


SLOW = {"state": State.TRAINING, "step_s": 10.0, "saves": SaveStatistics(expected_s=38.0)}


@pytest.mark.parametrize(
    ("changes", "grace_s", "is_risky"),
    [
        (SLOW, 30.0, True),
        (SLOW, 50.0, True),  # the ranks leave 3 s before its end
        (SLOW, 51.0, False),
        ({"state": State.TRAINING, "saves": SaveStatistics()}, 30.0, False),
        ({**SLOW, "state": State.INTERRUPTED}, 30.0, False),
    ],
)
def test_a_suspension_that_does_not_fit_is_announced(changes: dict[str, Any], grace_s: float, is_risky: bool) -> None:
    """With what is safe, how old it is, what a save takes and what the platform grants."""
    then = datetime.fromtimestamp(time.time() - 130.4, UTC).isoformat()
    job = job_record(state=JobState.RUNNING)
    job = replace(job, spec=job_spec(settings={"grace_s": grace_s}))
    risk = risk_of_suspending(job, report("any", safe_step=1240, safe_time=then, **changes))
    assert (risk is not None) == is_risky
    if risk is not None:
        assert risk.startswith("newest save: step 1,240, 2 m 10 s ago; a save takes about 48 s")
        assert f"of the {grace_s:g} s grace period" in risk
    unsaved = risk_of_suspending(job, report("any", safe_step=None, safe_time=None, **changes))
    assert unsaved is None or unsaved.startswith("nothing is saved yet; a save takes about 48 s")


def test_a_risky_suspension_is_asked_for_or_refused() -> None:
    """In a script it is a conflict and nothing is done; `--yes` says the figures and goes on."""
    with History() as history:
        history.add(spec("held"), actor="test")
        history.become("held", JobState.RUNNING, actor="test")
    report("held", **SLOW)
    with supervised("held"):
        for command in (["suspend", "held"], ["scale", "held", "--nnodes", "2"]):
            refused = safepoint(command[0], "--json", *command[1:])
            assert refused.code == 11, refused.stderr
            assert "a save takes about 48 s" in refused.exit_error["message"]
            assert refused.exit_error["message"].endswith("nothing was done")
            assert "--yes" in refused.exit_error["hint"]
        untouched = safepoint("status", "held", "--json").document
        assert (untouched["wanted"], untouched["num_nodes"]) == ("run", 1)
        asked = safepoint("suspend", "held", "--yes", "--timeout", "0.1")
        assert asked.code == 15, asked.stderr  # no process does it
        assert "warning: newest save: step 30" in asked.stderr
        assert safepoint("status", "held", "--json").document["wanted"] == "suspend"


def test_the_curve_of_the_loss() -> None:
    """Lowest to highest over the eight heights; one value is a line."""
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([0.0, 3.5, 7.0]) == "▁▅█"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_curve_takes_what_the_terminal_has_left(width: int) -> None:
    """Its newest end; no other column shrinks, and no line is longer than the terminal."""
    head = ("JOB", "STATE", "STEP", "DONE", "LEFT", "LOSS", "SAFE STEP", "AGE")
    full = ["train-it-1a2b", "Running", "12400/50000", "25 %", "2 h 10 m", "0.01234", "12400", "3 h"]
    short = ["b", "Queued", "-", "-", "-", "-", "-", "5 s"]
    losses = [*([9.0] * 400), *map(float, range(100))]
    lines = picture(head, [full, short], [losses, []], width)
    assert max(map(len, lines)) <= width
    for line, cells in zip(lines, (head, full, short), strict=True):
        assert all(cell in line for cell in cells)
    curve = lines[1].split()[-1]
    if width == 200:
        assert len(curve) > 90
    if width > 80:
        assert curve == sparkline(losses[-len(curve) :])
        assert len(lines[1]) == width


def test_a_terminal_too_narrow_for_the_table_has_all_of_it_and_no_curve() -> None:
    """It wraps there; nothing is cut."""
    head, row = ("JOB", "STATE"), ["a" * 40, "Suspending"]
    assert picture(head, [row], [[1.0, 2.0]], 40) == ["JOB".ljust(40) + "  STATE", "a" * 40 + "  Suspending"]


def test_watch_for_a_program() -> None:
    """A document in a line for each change, and the end with the job's; no terminal is needed."""
    add("done", JobState.COMPLETE)
    report("done")
    outcome = safepoint("watch", "do", "--json")
    assert outcome.code == 0, outcome.stderr
    (document,) = map(json.loads, outcome.stdout.splitlines())
    assert (document["version"], document["name"], document["state"]) == (1, "done", "Complete")
    assert document["progress"]["step"] == 40


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("n", 1, "error: not confirmed; nothing was done\n"),
        (EOFError, 1, "error: the question was not answered; nothing was done\n"),
        (KeyboardInterrupt, 130, ""),
    ],
)
def test_an_answer_is_taken_for_what_it_is(
    answer: str | type[BaseException], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal, where deleting checkpoints is asked about: no, the end of the input, and Ctrl-C."""

    def reply(_: str) -> str:
        if isinstance(answer, str):
            return answer
        raise answer

    add("a", JobState.COMPLETE, settings=RunSettings(output_dir="out"))
    monkeypatch.setattr("safepoint.foundation.events.console.is_interactive", lambda: True)
    monkeypatch.setattr("typer._click.termui.visible_prompt_func", reply)
    outcome = safepoint("delete", "a", "--checkpoints")
    assert (outcome.code, outcome.stderr.partition("safepoint: ")[2]) == (code, said)
    with History() as history:
        assert history.find("a") is not None


def test_a_job_that_is_scaled_beyond_the_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "2")
    add("a", JobState.FAILED)
    outcome = safepoint("scale", "a", "--nnodes", "3")
    assert (outcome.code, "its ranks share the" in outcome.stderr) == (0, True)
