"""The history: many writers, all or nothing, and what it does with a file that is not its own."""

import contextlib
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ConflictError, NotFoundError, StorageError
from safepoint.foundation.processes import ProcessId
from safepoint.jobs.local.history import _FIRST_SCHEMA, SCHEMA_VERSION, History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import NodeRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.job_values import job_record, job_spec

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "safepoint" / "jobs.sqlite3"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    with History(path) as history:
        yield history


def fill(history: History, name: str) -> None:
    """A job with everything that can be known of one."""
    history.add(job_spec(name), actor="me")
    history.begin_attempt(name, 1, 2)
    for node in range(2):
        process = ProcessId(pid=100 + node, start_ticks=7, boot="b")
        history.add_node(name, 1, NodeRecord(node=node, process=process, gpus=(str(node), "5")))
    history.end_attempt(name, 1, outcome="Failed", exit_code=3)
    history.become(name, JobState.FAILED, actor="supervisor 1", message="exit code 3", exit_code=3, attempt=1)


def test_what_was_written_is_read(history: History) -> None:
    """All tables, and the events in order."""
    fill(history, "a")
    job = history.job("a")
    assert (job.state, job.wanted, job.exit_code, job.attempt) == (JobState.FAILED, RequestedAction.RUN, 3, 1)
    assert job.spec == job_spec("a")
    [attempt] = history.attempts("a")
    assert (attempt.number, attempt.num_nodes, attempt.outcome, attempt.exit_code) == (1, 2, "Failed", 3)
    assert attempt.ended is not None
    assert [node.gpus for node in history.nodes("a", 1)] == [("0", "5"), ("1", "5")]
    assert [(event.name, event.actor, event.cause) for event in history.events("a")] == [
        ("submitted", "me", ""),
        ("failed", "supervisor 1", "exit code 3"),
    ]
    assert history.events("a")[1].detail == {"exit_code": 3, "attempt": 1}


def test_the_file_and_its_folder_are_private(history: History, path: Path) -> None:
    """Commands and variables of jobs are readable by their owner alone; the write-ahead log has them too."""
    history.add(job_spec(), actor="me")
    assert path.parent.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir() if file.stat().st_mode & 0o077] == []


def test_a_column_that_does_not_exist_is_a_mistake_of_ours(history: History) -> None:
    """Names are put into the statement: none may come from anywhere else."""
    fill(history, "a")
    with pytest.raises(ValueError, match="colour"):
        history.become("a", JobState.FAILED, actor="me", colour="green")


def test_a_second_job_of_the_same_name_is_refused(history: History) -> None:
    """And leaves the first as it is."""
    fill(history, "a")
    with pytest.raises(ConflictError, match="there is already a job 'a'"):
        history.add(job_spec("a", priority=9), actor="you")
    assert history.job("a").spec.priority == 0
    assert len(history.events("a")) == 2


class TestNames:
    def test_the_beginning_of_a_name_is_enough(self, history: History) -> None:
        """As long as it fits one job."""
        for name in ("train-1", "train-2", "eval"):
            history.add(job_spec(name), actor="me")
        assert history.job("e").name == "eval"
        assert history.job("train-2").name == "train-2"
        with pytest.raises(ConflictError, match="matches 2 jobs: train-1, train-2"):
            history.job("train")

    def test_the_whole_name_counts_more_than_a_beginning(self, history: History) -> None:
        """`train` is `train`, also when there is a `train-2`."""
        for name in ("train", "train-2"):
            history.add(job_spec(name), actor="me")
        assert history.job("train").name == "train"

    @pytest.mark.parametrize("name", ["", "x", "%", "_", "train-12", "'"])
    def test_what_no_name_begins_with_is_not_found(self, history: History, name: str) -> None:
        """No pattern means anything, and nothing is not a beginning."""
        history.add(job_spec("train-1"), actor="me")
        with pytest.raises(NotFoundError):
            history.job(name)

    def test_one_that_looks_up_itself_never_gets_another(self, history: History) -> None:
        """`find` takes whole names only: a supervisor whose job was removed must not adopt its namesake."""
        history.add(job_spec("train-2"), actor="me")
        assert history.find("train") is None


def test_removing_a_job_removes_all_that_is_known_of_it(history: History, path: Path) -> None:
    """And nothing of the others."""
    fill(history, "a")
    fill(history, "b")
    history.forget("a")
    with contextlib.closing(sqlite3.connect(path)) as db:
        for table, column in (("job", "name"), ("attempt", "job"), ("node", "job"), ("event", "job")):
            assert {row[0] for row in db.execute(f"SELECT {column} FROM {table}")} == {"b"}, table


@pytest.mark.parametrize(
    "change",
    [
        lambda history: history.request("a", RequestedAction.SUSPEND, actor="me"),
        lambda history: history.become("a", JobState.RUNNING, actor="me"),
        lambda history: history.change_nodes(job_record("a"), 2, actor="me"),
    ],
    ids=["want", "become", "change_nodes"],
)
def test_what_is_said_of_a_removed_job_is_an_error_and_leaves_nothing(
    history: History, change: Callable[[History], None]
) -> None:
    """It may be removed by another process at any time."""
    fill(history, "a")
    history.forget("a")
    with pytest.raises(NotFoundError):
        change(history)
    assert history.events("a") == []


def test_an_error_within_a_transaction_undoes_all_of_it(history: History) -> None:
    """And the history can be used afterwards."""
    fill(history, "a")

    def fail() -> None:
        with history.transaction():
            history.request("a", RequestedAction.DELETE, actor="me")
            with history.transaction():  # one inside another belongs to it
                history.become("a", JobState.RUNNING, actor="me")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    job = history.job("a")
    assert (job.state, job.wanted) == (JobState.FAILED, RequestedAction.RUN)
    assert len(history.events("a")) == 2
    history.request("a", RequestedAction.SUSPEND, actor="me")
    assert history.job("a").wanted is RequestedAction.SUSPEND


def test_a_change_and_its_event_are_one(history: History, path: Path) -> None:
    """A change whose event cannot be written is not made."""
    fill(history, "a")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TRIGGER full BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    with pytest.raises(StorageError, match="disk full"):
        history.request("a", RequestedAction.DELETE, actor="me")
    assert history.job("a").wanted is RequestedAction.RUN


def _add_many(path: str, prefix: str, count: int) -> None:
    with History(Path(path)) as history:
        for number in range(count):
            history.add(job_spec(f"{prefix}-{number}"), actor=prefix)
            with history.transaction():
                detail = history.job("counter").safe_step or 0
                history.become("counter", JobState.QUEUED, actor=prefix, safe_step=detail + 1)


def test_two_processes_write_at_once_and_nothing_is_lost(history: History, path: Path) -> None:
    """Rows of both, and a count that each of them reads and writes."""
    history.add(job_spec("counter"), actor="me")
    writers = [SPAWN.Process(target=_add_many, args=(str(path), prefix, 25)) for prefix in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(history.jobs()) == 51
    assert history.job("counter").safe_step == 50


def _open_at_once(path: str, gate: Any, name: str) -> None:
    gate.wait(30)
    with History(Path(path)) as history:
        history.add(job_spec(name), actor="me")


def test_many_processes_make_the_file_at_once(path: Path) -> None:
    """The first command on a machine may be several."""
    for trial in range(6):
        target = path.with_name(f"{trial}.sqlite3")
        gate = SPAWN.Barrier(6)
        makers = [SPAWN.Process(target=_open_at_once, args=(str(target), gate, f"job-{n}")) for n in range(6)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(60)
            assert maker.exitcode == 0
        with History(target) as history:
            assert len(history.jobs()) == 6


def _write_for_ever(path: str) -> None:
    with History(Path(path)) as history:
        while True:
            with history.transaction():
                for state in (JobState.RUNNING, JobState.QUEUED):
                    history.become("a", state, actor="me", setbacks=0)


def test_a_writer_that_is_killed_leaves_all_or_nothing(history: History, path: Path) -> None:
    """SIGKILL at any moment, ten times: no half transaction, no lock that stays."""
    history.add(job_spec("a"), actor="me")
    for _ in range(10):
        before = len(history.events("a"))
        writer = SPAWN.Process(target=_write_for_ever, args=(str(path),))
        writer.start()
        deadline = time.monotonic() + 30
        while len(history.events("a")) < before + 10:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        names = [event.name for event in history.events("a")][1:]
        assert names == ["running", "queued"] * (len(names) // 2)
        assert history.job("a").state is JobState.QUEUED
    history.request("a", RequestedAction.SUSPEND, actor="me")


def test_others_changes_are_noticed(history: History, path: Path) -> None:
    """One's own are known anyway."""
    number = history.change_number()
    assert history.change_number() == number
    with History(path) as other:
        other.add(job_spec("a"), actor="me")
    assert history.change_number() != number


def test_a_file_of_a_newer_release_is_refused_untouched(history: History, path: Path) -> None:
    """The message says which, and what to do."""
    fill(history, "a")
    history.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    with pytest.raises(ConflictError, match=f"schema {SCHEMA_VERSION + 1}.*was not changed"):
        History(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_said_to_be_one_and_not_replaced(path: Path, content: bytes) -> None:
    """Its owner may know what to do with it."""
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"cannot be used.*move it aside"):
        History(path)
    assert path.read_bytes() == content


def test_a_file_that_is_damaged_in_the_middle_is_noticed_where_it_is_read(history: History, path: Path) -> None:
    """A page of zeros in place of the jobs."""
    for number in range(200):
        history.add(job_spec(f"job-{number}"), actor="me")
    history.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(StorageError), History(path) as damaged:
        damaged.jobs()


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("spec", "{"),
        ("spec", "{}"),
        ("spec", job_spec("a").to_json().replace('"priority": 0', '"priority": "high"')),
        ("spec", job_spec("a").to_json().replace('["train.py"]', '"train.py"')),
        ("state", "Dancing"),
        ("wanted", "rest"),
    ],
)
def test_one_entry_that_was_altered_keeps_the_others_from_nothing(
    history: History, path: Path, column: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with one warning; asked for by name it is an error that names it."""
    fill(history, "a")
    fill(history, "b")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"UPDATE job SET {column} = ? WHERE name = 'a'", (text,))
    for _ in range(3):
        assert [job.name for job in history.jobs()] == ["b"]
    assert len(caplog.records) == 1
    assert "'a' cannot be read" in caplog.text
    with pytest.raises(StorageError, match="'a' cannot be read"):
        history.job("a")
    assert history.knows("a")
    with pytest.raises(ConflictError):
        history.add(job_spec("a"), actor="me")
    history.forget(history.name_of("a"))
    assert not history.knows("a")


def test_a_spec_of_a_newer_release_is_read(history: History, path: Path) -> None:
    """Fields that this release does not know."""
    fill(history, "a")
    record = json.loads(job_spec("a").to_json()) | {"colour": "green"}
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE job SET spec = ?", (json.dumps(record),))
    assert history.job("a").spec == job_spec("a")


_OPEN = """
import os, sys
from pathlib import Path
from safepoint.errors import SafepointError
from safepoint.jobs.local.history import History
if os.getuid() == 0:
    os.setuid(65534)
try:
    with History(Path(sys.argv[1])) as history:
        history.forget("missing")
except SafepointError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("what", ["folder", "file", "parent"])
def test_a_folder_that_cannot_be_written_is_said_to_be_one(what: str) -> None:
    """By a user without rights; a process of root gives its own away first."""
    with tempfile.TemporaryDirectory() as name:  # not below pytest's folder, which no other user may enter
        folder = Path(name) / "safepoint"
        if what != "parent":
            History(folder / "jobs.sqlite3").close()
            folder.chmod(0o555 if what == "folder" else 0o777)
            (folder / "jobs.sqlite3").chmod(0o444)
        Path(name).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, str(folder / "jobs.sqlite3")], capture_output=True, text=True, check=True
        )
        Path(name).chmod(0o700)
    assert done.stdout.startswith(("StorageError", "HistoryError")), done.stderr
    assert str(folder) in done.stdout


def test_a_thousand_jobs_are_listed(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    """How long it takes is printed."""
    with history.transaction():
        for number in range(1000):
            history.add(job_spec(f"job-{number:04d}", env={"A": "b" * 50}), actor="me")
    began = time.perf_counter()
    jobs = history.jobs()
    took_s = time.perf_counter() - began
    began = time.perf_counter()
    with history.transaction():
        for job in jobs[10:]:
            history.become(job.name, JobState.COMPLETE, actor="me")
    began = time.perf_counter()
    unfinished = history.unfinished()
    unfinished_s = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n1000 jobs listed in {took_s * 1000:.0f} ms, 10 unfinished ones in {unfinished_s * 1000:.1f} ms")
    assert [job.name for job in jobs] == [f"job-{number:04d}" for number in range(1000)]
    assert unfinished == jobs[:10]


def test_a_history_of_an_older_release_is_brought_up_to_date(tmp_path: Path) -> None:
    """With all that is in it, and once only."""
    path = tmp_path / "old.sqlite3"
    spec = job_spec("a")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(f"{_FIRST_SCHEMA}PRAGMA user_version = 1;")
        now = "2026-01-01T00:00:00.000Z"
        row = ("a", spec.to_json(), "Running", "run", now, now)
        db.execute("INSERT INTO job (name, spec, state, wanted, created, changed) VALUES (?, ?, ?, ?, ?, ?)", row)
        db.commit()
    for _ in range(2):
        with History(path) as history:
            job = history.job("a")
            assert (job.spec, job.state, job.target_nodes) == (spec, JobState.RUNNING, None)
            assert (job.image, job.from_checkpoint) == (None, False)


class TestForgetting:
    @pytest.fixture(autouse=True)
    def _own_state_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def test_a_job_goes_with_its_folder(self) -> None:
        """And no others."""
        with History() as history:
            for name in ("a", "a-2"):
                history.add(job_spec(name), actor="me")
                job_folder(name).mkdir(parents=True)
                (job_folder(name) / "file").write_text(name)
            history.remove("a")
            assert [job.name for job in history.jobs()] == ["a-2"]
        assert not job_folder("a").exists()
        assert (job_folder("a-2") / "file").exists()

    def test_only_what_nobody_knows_are_remains(self) -> None:
        """A job of the same name may just have been submitted."""
        with History() as history:
            history.add(job_spec("a"), actor="me")
            job_folder("a").mkdir(parents=True)
            job_folder("b").mkdir(parents=True)
            history.remove_remains("a")
            history.remove_remains("b")
        assert job_folder("a").exists()
        assert not job_folder("b").exists()
