"""Jobs on this machine in a test's own state folder, without processes left behind."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safepoint.foundation.processes import identify, kill, processes_of
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings
from tests.support.jobs import environment
from tests.support.patience import PATIENCE
from tests.support.supervisors import supervisor_pid

LOOP = Path(__file__).parent.parent / "programs" / "loop.py"
_POLL_S = 0.02


class Place:
    """A state folder, and outputs beside it.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._exit = contextlib.ExitStack()
        self.jobs = self._exit.enter_context(LocalJobs(actor="test"))

    def output(self, name: str) -> Path:
        return self.root / "out" / name

    def training(self, name: str, *arguments: str, **fields: Any) -> JobSpec:
        """A job that runs the hand-written loop, slowly until it is resumed; `settings` are options of the run."""
        settings = {"output_dir": str(self.output(name)), **fields.pop("settings", {})}
        program = (
            str(LOOP),
            "--out",
            str(self.output(name)),
            "--step-ms",
            "600",
            "--resumed-step-ms",
            "20",
            *arguments,
        )
        return self._spec(name, program, settings, fields)

    def script(self, name: str, code: str, **fields: Any) -> JobSpec:
        """A job that runs a few lines of Python without training."""
        path = self.root / f"{name}.py"
        path.write_text(code)
        return self._spec(name, (str(path),), fields.pop("settings", {"grace_s": 2.0}), fields)

    def _spec(self, name: str, program: Sequence[str], settings: dict[str, Any], fields: dict[str, Any]) -> JobSpec:
        fields = {"python": sys.executable, "working_dir": str(self.root)} | fields
        return JobSpec(name=name, program=tuple(program), settings=RunSettings(**settings), **fields)

    def wait_for(self, what: str, found: Callable[[], Any], name: str, timeout_s: float = 120) -> Any:
        """Wait until `found` returns a value, and return it; the job must not end before."""
        deadline = time.monotonic() + timeout_s * PATIENCE
        while True:
            is_over = self.jobs.job(name).state.is_over
            if result := found():
                return result
            assert not is_over, f"{name} ended before {what}\n{self.story(name)}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{self.story(name)}"
            time.sleep(_POLL_S)

    def wait_for_mark(self, name: str, step: int, rank: int = 0) -> None:
        """Wait until the loop has begun the step for the first time."""

        def found() -> bool:
            with contextlib.suppress(OSError):
                return f"train {step}" in (self.output(name) / f"marks-{rank}").read_text().split("\n")
            return False

        self.wait_for(f"step {step}", found, name)

    def wait_for_saved(self, name: str, step: int = 1) -> int:
        """Wait until this step, or a later one, is committed; returns the newest."""
        return self.wait_for(f"a checkpoint of step {step}", lambda: max(self.steps(name, step), default=0), name)

    def steps(self, name: str, least: int = 1) -> list[int]:
        found = self.output(name).glob("checkpoint-*/safepoint-manifest.json")
        return sorted(step for path in found if (step := int(path.parent.name.split("-")[1])) >= least)

    def complete(self, name: str, timeout_s: float = 150) -> JobRecord:
        """Wait until the job is complete, and check that none of its processes is left."""
        try:
            job = self.jobs.wait(name, [JobState.COMPLETE], timeout_s=timeout_s * PATIENCE)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.story(name)}") from error
        assert processes_of(job_folder(name)) == []
        assert [attempt.number for attempt in self.jobs.attempts(name)] == list(range(1, job.attempt + 1))
        assert all(attempt.ended for attempt in self.jobs.attempts(name))
        return job

    def launchers(self, name: str) -> list[int]:
        """The launchers of the current attempt, by node."""
        with History() as history:
            return [node.process.pid for node in history.nodes(name, self.jobs.job(name).attempt)]

    def processes(self, name: str, kind: str) -> list[int]:
        """All processes of one kind: `supervisor`, `launcher`, `keeper`, `rank`, `uploader`, or `all` of them."""
        if kind == "supervisor":
            return [pid for pid in [supervisor_pid(name)] if pid is not None]
        if kind == "launcher":
            return [pid for pid in self.launchers(name) if identify(pid) is not None]
        if kind == "all":
            return [*self.processes(name, "supervisor"), *processes_of(job_folder(name))]
        module = {
            "keeper": b"safepoint.snapshot.keeper",
            "rank": b"safepoint.training",
            "uploader": b"safepoint.checkpoint.remote.uploader_process",
        }[kind]
        found: list[int] = []
        for pid in processes_of(job_folder(name)):
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def kill(self, name: str, *kinds: str) -> list[int]:
        """Send SIGKILL to all processes of these kinds."""
        pids = [pid for kind in kinds for pid in self.processes(name, kind)]
        assert pids, f"{name} has no {kinds}\n{self.story(name)}"
        kill(pids)
        return pids

    def printed(self, name: str, rank: int = 0) -> list[str]:
        """The lines that a rank has printed."""
        return [line.text for line in self.jobs.logs(name) if line.source == f"rank {rank}"]

    def story(self, name: str) -> str:
        """All that is known of a job, for the message of a failed test."""
        lines = [str(self.jobs.job(name))]
        lines += [
            f"{event.time} {event.actor}: {event.name} {event.cause} {event.detail}"
            for event in self.jobs.events(name)
        ]
        lines += [str(attempt) for attempt in self.jobs.attempts(name)]
        lines += [f"{line.source} | {line.text}" for line in self.jobs.logs(name)]
        with contextlib.suppress(OSError):
            lines.append((job_folder(name) / "supervisor.log").read_text())
        return "\n".join(lines)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The events that the ranks wrote into the output folder."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.output(name) / ".safepoint" / "events.jsonl").read_text().split("\n")[:-1]
            return [record for line in lines if (record := json.loads(line))["event"] == event]
        return []

    def end(self) -> list[str]:
        """End all remaining processes; returns the jobs that had ended and still had processes."""
        guilty: list[str] = []
        for job in self.jobs.jobs():
            pids = processes_of(job_folder(job.name))
            if pids and not job.needs_supervisor:
                guilty.append(job.name)
            while pids or supervisor_pid(job.name) is not None:
                kill([*pids, *self.processes(job.name, "supervisor")])
                pids = processes_of(job_folder(job.name))
        self._exit.close()
        return guilty


@contextlib.contextmanager
def jobs_in(root: Path, *, cpu_slots: int = 8) -> Iterator[Place]:
    """Jobs below `root`, on a machine with a given number of cores; no process of them survives the block."""
    before = dict(os.environ)
    places = {"XDG_STATE_HOME": root / "state", "XDG_CONFIG_HOME": root / "config", "XDG_CACHE_HOME": root / "cache"}
    slots = {"SAFEPOINT_CPU_SLOTS": str(cpu_slots), "SAFEPOINT_GPU_SLOTS": "0"}
    ours = environment(**{name: str(path) for name, path in places.items()}, **slots)
    os.environ.clear()
    os.environ.update(ours)
    try:
        place = Place(root)
        try:
            yield place
        finally:
            guilty = place.end()
        assert not guilty, f"processes outlived jobs that were over: {guilty}"
    finally:
        os.environ.clear()
        os.environ.update(before)


def tell_to_stop(pid: int) -> None:
    """Send the signal that a machine sends at shutdown."""
    os.kill(pid, signal.SIGTERM)
