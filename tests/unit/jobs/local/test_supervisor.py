"""A supervisor and what becomes of its job, with launchers that do what a test orders.

Real launchers are in tests/ranks/test_jobs.py; here are the ends, races and faults that these do not show on demand.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import StorageError
from safepoint.foundation.processes import kill, processes_of
from safepoint.jobs.local import supervisor as module
from safepoint.jobs.local.history import History, HistoryError
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.local.supervisor import Supervisor, supervise
from safepoint.jobs.local.supervisor_start import start_missing_supervisors, start_supervisor
from safepoint.jobs.model.outcome import MAX_SETBACKS
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.job_values import job_spec
from tests.support.supervisors import supervisor_pid

LAUNCHER = Path(__file__).parents[4] / "tests" / "support" / "launcher.sh"
COMPLETE, FAILED, RUNNING, RESTARTING = JobState.COMPLETE, JobState.FAILED, JobState.RUNNING, JobState.RESTARTING
SUSPENDED, SUSPENDING, PREEMPTED, QUEUED = (
    *(JobState.SUSPENDED, JobState.SUSPENDING, JobState.PREEMPTED, JobState.QUEUED),
)


def wait_until(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return result


@dataclass
class Place:
    """Jobs in a state folder of their own."""

    folder: Path
    history: History

    def add(self, name: str, *orders: str, env: dict[str, str] | None = None, **fields: Any) -> None:
        """A job without a supervisor yet, with what its launchers are to do, one after the other."""
        self._orders(name).write_text("".join(f"{order}\n" for order in orders))
        env = {"ORDERS": str(self._orders(name)), "NODES": str(fields.get("num_nodes", 1)), **(env or {})}
        self.history.add(job_spec(name, python=str(LAUNCHER), env=env, **fields), actor="me")
        job_folder(name).mkdir(parents=True)

    def _orders(self, name: str) -> Path:
        return self.folder / f"orders-{name}"

    def job(self, name: str = "a") -> JobRecord:
        return self.history.job(name)

    def running(self, name: str = "a") -> list[int]:
        """The launchers that have come to wait, of all attempts."""
        path = self._orders(name).with_name(f"{self._orders(name).name}.running")
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for_launchers(self, count: int = 1, name: str = "a") -> list[int]:
        """Until they run and are written down; a supervisor that is killed in between has started none."""
        pids = wait_until(lambda: pids if len(pids := self.running(name)) >= count else None)
        wait_until(lambda: self._written_down(name).issuperset(pids))
        return pids

    def _written_down(self, name: str) -> set[int]:
        attempts = self.history.attempts(name)
        return {node.process.pid for one in attempts for node in self.history.nodes(name, one.number)}

    def states(self, name: str = "a") -> list[str]:
        return [event.name for event in self.history.events(name) if not event.name.endswith("_requested")][1:]

    def wait_for(self, *states: JobState, name: str = "a") -> JobRecord:
        return wait_until(lambda: job if (job := self.job(name)).state in states else None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SAFEPOINT_CPU_SLOTS", "2")
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "4")
    monkeypatch.setattr(
        module, "start_missing_supervisors", lambda *_, **__: []
    )  # supervisors on threads hold no lock
    with History() as history:
        yield Place(tmp_path, history)
        names = [job.name for job in history.jobs()]
    for name in names:
        kill(pid for pid in [supervisor_pid(name)] if pid is not None)
    left = {name: processes_of(job_folder(name)) for name in names}
    for pids in left.values():
        kill(pids)
    assert not any(left.values()), f"processes of jobs were left: {left}"


class Thread:
    """A supervisor on a thread of this process."""

    def __init__(self, name: str = "a") -> None:
        self._name = name
        self._error: BaseException | None = None
        self.supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with History() as history:
                self.supervisor = Supervisor(self._name, history)
                self.supervisor.run()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self._error = error

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def run(place: Place, name: str = "a") -> JobRecord:
    Supervisor(name, place.history).run()
    return place.job(name)


class TestEnds:
    def test_complete(self, place: Place) -> None:
        """One attempt, written down; its folder of plans is gone."""
        place.add("a", "0")
        job = run(place)
        assert (job.state, job.exit_code, job.attempt) == (COMPLETE, 0, 1)
        [attempt] = place.history.attempts("a")
        assert (attempt.outcome, attempt.exit_code) == ("Complete", 0)
        assert place.states() == ["running", "complete"]
        assert not (job_folder("a") / "attempt-1").exists()

    def test_a_programs_own_failure_is_not_tried_again(self, place: Place) -> None:
        """Its exit code is the job's."""
        place.add("a", "3", "0")
        job = run(place)
        assert (job.state, job.exit_code, job.attempt) == (FAILED, 3, 1)
        assert job.message == "exit code 3; see its logs"

    @pytest.mark.parametrize("order", ["75", "143", "killed"])
    def test_what_was_interrupted_from_outside_is_started_again(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, order: str
    ) -> None:
        """As a pod would be; it keeps its slots meanwhile."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", order, "0")
        job = run(place)
        assert (job.state, job.attempt) == (COMPLETE, 2)
        assert place.states() == ["running", "restarting", "resuming", "complete"]

    def test_without_progress_it_ends_some_time(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """And says how often it was tried."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", *["killed"] * 9)
        job = run(place)
        assert (job.state, job.attempt, job.exit_code) == (FAILED, MAX_SETBACKS + 1, None)
        assert f"killed {MAX_SETBACKS + 1} times without progress" in job.message

    def test_with_progress_it_is_started_as_often_as_it_takes(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step more each time."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", *["75"] * (MAX_SETBACKS + 3), "0")
        steps = iter(range(1, 100))
        monkeypatch.setattr(module.rank_reports, "newest_step", lambda folder: (next(steps), False))
        job = run(place)
        assert (job.state, job.attempt, job.setbacks) == (COMPLETE, MAX_SETBACKS + 4, 0)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"working_dir": "/nowhere"}, "/nowhere"),
            ({"data_connection": "missing"}, "no data connection 'missing'"),
        ],
    )
    def test_what_cannot_be_started_has_failed(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
    ) -> None:
        """With the reason, in the job and in its attempt."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(place.folder))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        place.add("a", "0", **fields)
        job = run(place)
        assert (job.state, job.attempt) == (FAILED, 1)
        assert message in job.message
        assert message in place.history.attempts("a")[0].outcome

    @pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("exit 0", 1), ("exec /nowhere/python", 127)])
    def test_a_launcher_that_ends_without_a_word_was_not_killed(self, place: Place, command: str, code: int) -> None:
        """An interpreter without Safepoint, for example: the same would happen six times more."""
        python = place.folder / "python"
        python.write_text(f"#!/bin/sh\n{command} 2>&-\n")
        python.chmod(0o700)
        place.history.add(job_spec("a", python=str(python)), actor="me")
        job_folder("a").mkdir(parents=True)
        job = run(place)
        assert (job.state, job.exit_code, job.attempt) == (FAILED, code, 1)

    def test_an_interpreter_that_is_gone(self, place: Place) -> None:
        """It may have been removed since the job was submitted."""
        place.history.add(job_spec("a", python="/nowhere/python"), actor="me")
        job_folder("a").mkdir(parents=True)
        assert "/nowhere/python" in run(place).message
        assert place.job().state is FAILED


class TestAsked:
    def test_suspended_and_gone_on(self, place: Place) -> None:
        """A signal, a save, no process; and again."""
        place.add("a", "wait 75", "0")
        thread = Thread()
        place.wait_for_launchers()
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()
        job = place.job()
        assert (job.state, job.exit_code, job.setbacks) == (SUSPENDED, 75, 0)
        place.history.request("a", RequestedAction.RUN, actor="me")
        assert run(place).state is COMPLETE
        assert place.states() == ["running", "suspending", "suspended", "resuming", "complete"]

    def test_whoever_changes_his_mind_while_it_stops_has_it_go_on(self, place: Place) -> None:
        """What has begun is done first, and does not count as a setback."""
        place.add("a", "wait 75", "0")
        thread = Thread()
        place.wait_for_launchers()
        with place.history.transaction():
            place.history.request("a", RequestedAction.RUN, actor="me")
            place.history.become("a", SUSPENDING, actor="supervisor that was killed")
        thread.end()
        assert place.job().state is COMPLETE
        assert place.job().setbacks == 0
        assert "restarting" not in place.states()

    def test_another_number_of_nodes_needs_nobody_but_the_supervisor(self, place: Place) -> None:
        """The command may have ended: the request is one entry of the history."""
        place.add("a", "wait 75", "unused", "0", "0", env={"NODES": "2"})
        thread = Thread()
        place.wait_for_launchers()
        place.history.request_nodes(place.job(), 2, actor="me")
        thread.end()
        job = place.job()
        assert (job.state, job.attempt, job.spec.num_nodes, job.target_nodes) == (COMPLETE, 2, 2, None)
        assert place.states() == ["running", "suspending", "changed", "queued", "resuming", "complete"]

    def test_another_number_of_nodes_between_two_attempts(self, place: Place) -> None:
        """There is nothing to stop, and whether that many fit is checked again."""
        place.add("a", "killed", "unused", "0", "0", env={"NODES": "2"}, priority=-1)
        thread = Thread()
        place.wait_for(RESTARTING)
        place.history.request_nodes(place.job(), 2, actor="me")
        thread.end()
        assert (place.job().state, place.job().attempt) == (COMPLETE, 2)
        assert [attempt.num_nodes for attempt in place.history.attempts("a")] == [1, 2]

    def test_what_fails_while_it_stops_is_not_changed_and_rests(self, place: Place) -> None:
        """Only a person resumes it."""
        place.add("a", "wait 3")
        thread = Thread()
        place.wait_for_launchers()
        place.history.request_nodes(place.job(), 2, actor="me")
        thread.end()
        job = place.job()
        assert (job.state, job.attempt, job.spec.num_nodes, job.target_nodes) == (FAILED, 1, 1, None)

    def test_suspended_while_it_is_scaled(self, place: Place) -> None:
        """Both are done."""
        place.add("a", "wait 75")
        thread = Thread()
        place.wait_for_launchers()
        with place.history.transaction():
            place.history.request_nodes(place.job(), 2, actor="me")
            place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()
        assert (place.job().state, place.job().spec.num_nodes) == (SUSPENDED, 2)

    def test_what_outlives_its_grace_period_is_killed(self, place: Place) -> None:
        """Two seconds later: launchers end their ranks before."""
        place.add("a", "stubborn", settings={"grace_s": 0.2})
        thread = Thread()
        [pid] = place.wait_for_launchers()
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()
        assert (place.job().state, place.job().exit_code) == (SUSPENDED, None)
        assert "without a save" in place.job().message
        assert not Path(f"/proc/{pid}/stat").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()

    def test_preempted_it_waits_and_goes_on_by_itself(self, place: Place) -> None:
        """A stronger one needs both slots."""
        place.add("weak", "wait 75", "0")
        weak = Thread("weak")
        place.wait_for_launchers(name="weak")
        place.add("strong", f"until {place.folder}/go", cpu_per_node=2, priority=1)
        strong = Thread("strong")
        place.wait_for_launchers(name="strong")
        waiting = wait_until(lambda: job if "waits for" in (job := place.job("weak")).message else None)
        assert (waiting.state, waiting.wanted) == (PREEMPTED, RequestedAction.RUN)
        (place.folder / "go").touch()
        strong.end()
        weak.end()
        assert place.job("weak").state is place.job("strong").state is COMPLETE
        assert place.states("weak")[:3] == ["running", "suspending", "preempted"]
        [request] = [event for event in place.history.events("weak") if event.name == "preempt_requested"]
        assert (request.actor, request.cause) == ("job strong", "job strong has priority 1")

    def test_preempted_between_two_attempts_it_is_started_once(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has no processes then, and gives its slots away; every attempt that is written down was made."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 1.0)
        place.add("a", "killed", "0", "0", "0")
        thread = Thread()
        place.wait_for(RESTARTING)
        place.history.request("a", RequestedAction.PREEMPT, actor="job b")
        thread.end()
        assert (place.job().state, place.job().attempt) == (COMPLETE, 2)
        attempts = place.history.attempts("a")
        assert [(attempt.number, attempt.exit_code) for attempt in attempts] == [(1, None), (2, 0)]
        assert "preempted" in place.states()

    def test_suspended_between_two_attempts(self, place: Place) -> None:
        """There is nothing to stop."""
        place.add("a", "killed", "0")
        thread = Thread()
        place.wait_for(RESTARTING)
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()
        assert (place.job().state, place.job().attempt) == (SUSPENDED, 1)

    def test_told_to_leave_it_stops_the_job_which_goes_on_with_the_next_command(self, place: Place) -> None:
        """As when the machine shuts down."""
        place.add("a", "wait 75", "0")
        thread = Thread()
        place.wait_for_launchers()
        assert thread.supervisor is not None
        thread.supervisor.leave(signal.SIGTERM, None)
        thread.end()
        job = place.job()
        assert (job.state, job.wanted, job.exit_code) == (PREEMPTED, RequestedAction.RUN, 75)
        assert run(place).state is COMPLETE

    def test_deleted_while_it_runs(self, place: Place) -> None:
        """Stopped as by any request, then forgotten; the process says that nothing is there any more."""
        place.add("a", "wait 75")
        start_supervisor("a")
        place.wait_for_launchers()
        with LocalJobs() as jobs:
            jobs.delete("a", timeout_s=60)
        assert not place.history.knows("a")
        assert not job_folder("a").exists()

    def test_packages_are_not_waited_for(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """A job that is suspended while they are installed."""
        monkeypatch.setenv("ORDERS", f"{place.folder}/orders-a")
        monkeypatch.setenv("NODES", "1")
        place.add("a", "stubborn", packages=("anything",))
        thread = Thread()
        wait_until(place.running)  # pip is run by the job's interpreter, which waits
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()
        assert (place.job().state, place.job().exit_code) == (SUSPENDED, None)
        assert place.history.nodes("a", 1) == []


class TestBeginning:
    """Where to begin is asked of the first launcher whose ranks begin, and of no later one."""

    def settings_of(self, place: Place, attempt: int) -> dict[str, Any]:
        place.wait_for_launchers(attempt)
        return json.loads((job_folder("a") / f"attempt-{attempt}" / "node-0.json").read_bytes())["settings"]

    def report(self, event: str) -> None:
        with (job_folder("a") / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"event": event}) + "\n")

    @pytest.mark.parametrize(
        ("asked", "later"),
        [
            ({"from_scratch": True}, (False, "auto")),
            ({"resume": "never"}, (False, "auto")),
            ({"resume": "/some/checkpoint-4"}, (False, "/some/checkpoint-4")),
        ],
    )
    def test_asked_until_it_was_done(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], later: tuple[bool, str]
    ) -> None:
        """An attempt that ended before its ranks began has not done it."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", "wait 143", "wait 75", "wait 75", settings=asked)
        seen: list[tuple[bool, bool, str]] = []
        for attempt in (1, 2, 3):
            place.history.request("a", RequestedAction.RUN, actor="me")
            thread = Thread()
            settings = self.settings_of(place, attempt)
            seen.append((settings["has_begun"], settings["from_scratch"], settings["resume"]))
            if attempt == 2:
                self.report("attempt_started")
            place.history.request("a", RequestedAction.SUSPEND, actor="me")
            thread.end()
        asked |= {"resume": "auto", "from_scratch": True} if asked.get("resume") == "never" else {}
        first = (False, asked.get("from_scratch", False), asked.get("resume", "auto"))
        assert seen == [first, first, (True, *later)]


class TestNodes:
    def test_one_that_fails_takes_the_others_with_it(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """They may notice by themselves for a while; then they are asked to stop."""
        monkeypatch.setattr("safepoint.jobs.local.attempt.launchers._AFTER_A_LOSS_S", 0.2)
        place.add("a", "wait 75", "3", num_nodes=2)
        job = run(place)
        assert (job.state, job.exit_code) == (FAILED, 3)

    def test_one_that_was_killed_has_all_started_again(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other one says 1, because its ranks lost their peers."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", "killed", "1", "0", "0", num_nodes=2)
        job = run(place)
        assert (job.state, job.attempt) == (COMPLETE, 2)

    def test_each_has_devices_of_its_own(self, place: Place) -> None:
        """Two jobs of two nodes that start at the same moment share none."""
        for name in ("a", "b"):
            place.add(name, "wait 75", "wait 75", num_nodes=2, gpu_per_node=1, cpu_per_node=0)
        threads = [Thread(name) for name in ("a", "b")]
        seen: list[str] = []
        for name in ("a", "b"):
            for pid in place.wait_for_launchers(2, name):
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                seen += [text for text in variables if text.startswith("CUDA_VISIBLE_DEVICES=")]
            assert [node.gpus for node in place.history.nodes(name, 1)]
        assert sorted(seen) == [f"CUDA_VISIBLE_DEVICES={number}" for number in range(4)]
        for name, thread in zip(("a", "b"), threads, strict=True):
            place.history.request(name, RequestedAction.SUSPEND, actor="me")
            thread.end()

    def test_one_that_has_asked_for_none_sees_none(self, place: Place) -> None:
        """It would take the memory of those that were given to others."""
        place.add("a", "wait 75")
        thread = Thread()
        [pid] = place.wait_for_launchers()
        assert "CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()

    def test_devices_are_taken_from_a_persons_own(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others are somebody else's."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
        place.add("a", "wait 75", "wait 75", num_nodes=2, gpu_per_node=1)
        thread = Thread()
        place.wait_for_launchers(2)
        nodes = wait_until(lambda: found if len(found := place.history.nodes("a", 1)) == 2 else None)
        assert [node.gpus for node in nodes] == [("6",), ("7",)]
        place.history.request("a", RequestedAction.SUSPEND, actor="me")
        thread.end()


class TestKilled:
    def test_the_next_one_adopts_what_runs(self, place: Place) -> None:
        """The launchers are not its children: it reads how they ended."""
        place.add("a", f"until {place.folder}/go")
        start_supervisor("a")
        [launcher] = place.wait_for_launchers()
        first = wait_until(lambda: supervisor_pid("a"))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: supervisor_pid("a") is None)
        assert start_missing_supervisors(place.history) == ["a"]
        wait_until(lambda: supervisor_pid("a") not in {None, first})
        (place.folder / "go").touch()
        job = place.wait_for(COMPLETE)
        assert (job.attempt, job.exit_code) == (1, 0)
        assert place.running() == [launcher]

    def test_another_jobs_supervisor_notices(self, place: Place) -> None:
        """No command is needed as long as any job runs."""
        for name in ("a", "b"):
            place.add(name, f"until {place.folder}/go")
            start_supervisor(name)
            place.wait_for_launchers(name=name)
        pid = wait_until(lambda: supervisor_pid("a"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: supervisor_pid("a") not in {None, pid})
        (place.folder / "go").touch()
        place.wait_for(COMPLETE)
        place.wait_for(COMPLETE, name="b")

    def test_with_its_launcher_the_job_is_started_again(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """No process has left an exit code."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", "wait 75", "0")
        start_supervisor("a")
        [launcher] = place.wait_for_launchers()
        kill([wait_until(lambda: supervisor_pid("a")), launcher])
        wait_until(lambda: supervisor_pid("a") is None and not processes_of(job_folder("a")))
        assert place.job().state is RUNNING
        job = run(place)
        assert (job.state, job.attempt) == (COMPLETE, 2)
        assert "was killed" in place.history.attempts("a")[0].outcome

    def test_while_it_started_them_those_that_wait_for_the_others_are_ended(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of two was written down, and a third process is not even that."""
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", "stubborn", "stubborn", "0", "0", num_nodes=2)
        job = place.job()
        supervisor = Supervisor("a", place.history)
        with place.history.transaction():
            supervisor._take(job)
        launchers = module.Launchers(job.spec, job_folder("a"), 1)
        launchers.reserve_port(lambda: True)
        environ = {**os.environ, **job.spec.env}
        place.history.add_node("a", 1, launchers.start(0, environ, ()))
        launchers.start(1, environ, ())
        wait_until(lambda: len(place.running()) == 2)
        supervisor.run()
        assert (place.job().state, place.job().attempt) == (COMPLETE, 2)
        assert not launchers.are_alive

    def test_what_it_was_asked_before_is_done_by_the_next(self, place: Place) -> None:
        """The request is in the history, not in the supervisor."""
        place.add("a", "wait 75")
        start_supervisor("a")
        place.wait_for_launchers()
        pid = wait_until(lambda: supervisor_pid("a"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: supervisor_pid("a") is None)
        with LocalJobs() as jobs:
            assert jobs.suspend("a", timeout_s=60).state is SUSPENDED
        assert place.job().exit_code == 75


class TestTrouble:
    def test_a_history_that_cannot_be_used_for_a_while_costs_nothing(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full disk: the launcher runs on, and is looked at again."""
        monkeypatch.setattr(module, "_NEXT_TRIAL_S", 0.0)
        place.add("a", f"until {place.folder}/go")
        find, count = History.find, iter(range(10**6))

        def fail(history: History, name: str) -> JobRecord | None:
            if (number := next(count)) in {1, 8, 12}:
                raise HistoryError("database or disk is full")
            if number == 20:
                (place.folder / "go").touch()
            return find(history, name)

        with monkeypatch.context() as patch:
            patch.setattr(History, "find", fail)
            module._run(Supervisor("a", place.history))
        assert place.job().state is COMPLETE
        assert place.job().attempt == 1

    def test_also_while_launchers_are_started(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """The job has not failed by it: what was started is ended, and started again."""
        monkeypatch.setattr(module, "_NEXT_TRIAL_S", 0.0)
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
        place.add("a", "stubborn", "0")
        add_node, count = History.add_node, iter(range(10**6))

        def fail(history: History, *arguments: Any) -> None:
            if next(count) == 0:
                raise HistoryError("database or disk is full")
            add_node(history, *arguments)

        monkeypatch.setattr(History, "add_node", fail)
        module._run(Supervisor("a", place.history))
        assert (place.job().state, place.job().attempt) == (COMPLETE, 2)

    def test_it_gives_up_after_a_minute(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next command tries again, and says what is wrong."""
        monkeypatch.setattr(module, "_NEXT_TRIAL_S", 0.0)
        place.add("a", "0")

        def fail(history: History, name: str) -> None:
            raise HistoryError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(History, "find", fail)
            with pytest.raises(HistoryError):
                module._run(Supervisor("a", place.history))

    def test_without_locks_nobody_looks_after_a_job_and_that_is_said(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two supervisors would not notice each other."""
        place.add("a", "0")
        monkeypatch.setattr(module.FolderLock, "acquire", lambda *_: None)
        with pytest.raises(StorageError, match="does not support file locks"):
            supervise("a")

    def test_a_job_that_is_removed_by_force_leaves_no_process(self, place: Place) -> None:
        """No process would ever read them again."""
        place.add("a", "stubborn")
        start_supervisor("a")
        [pid] = place.wait_for_launchers()
        place.history.forget("a")
        wait_until(lambda: not processes_of(job_folder("a")))
        wait_until(lambda: not job_folder("a").exists())
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()

    def test_no_thread_or_zombie_stays_with_whoever_started_it(self, place: Place) -> None:
        """A notebook starts many."""
        place.add("a", f"until {place.folder}/go")
        start_supervisor("a")
        pid = wait_until(lambda: supervisor_pid("a"))
        assert "safepoint-a" in [thread.name for thread in threading.enumerate()]
        (place.folder / "go").touch()
        place.wait_for(COMPLETE)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        wait_until(lambda: "safepoint-a" not in [thread.name for thread in threading.enumerate()])
