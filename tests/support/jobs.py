"""Starts real `safepoint run` jobs, reads their events, sends signals, and leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.copies.copied_program import CopiedProgram
from tests.support.job_environment import environment
from tests.support.patience import PATIENCE

__all__ = [
    "TINY",
    "Job",
    "committed_steps",
    "environment",
    "is_alive",
    "no_orphans",
    "read_events",
    "safepoint",
    "tiny",
]
__all__ += ["wait_until_gone"]

TINY = Path(__file__).parent.parent / "programs" / "tiny.py"
_POLL_S = 0.01


class Job:
    """One running command with an output folder.

    `fresh` says why launcher and ranks must not be copied from a template (`tests.support.copies`).
    """

    def __init__(
        self,
        command: list[str],
        output: Path,
        *,
        log: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        fresh: str = "",
    ) -> None:
        self.output = output
        self.log = log
        start = subprocess.Popen if fresh or "--preload" in command else CopiedProgram
        with log.open("ab") as stream:
            self.process = start(
                command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=env or environment(), cwd=cwd
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return read_events(self.output, name)

    def wait_for(self, what: str, found: Callable[[], Any], timeout_s: float = 90) -> Any:
        deadline = time.monotonic() + timeout_s * PATIENCE
        while time.monotonic() < deadline:
            result = found()
            if result:
                return result
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended with {self.process.returncode} before {what}\n{self.text}")
            time.sleep(_POLL_S)
        raise AssertionError(f"no {what} within {timeout_s} s\n{self.text}")

    def wait_for_event(self, name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            matching = [event for event in self.events(name) if fields.items() <= event.items()]
            return matching[count - 1] if len(matching) >= count else None

        return self.wait_for(f"event {name} {fields or ''}", found)

    def wait_for_step(self, step: int) -> int:
        def found() -> int:
            with contextlib.suppress(OSError, ValueError):
                progress = json.loads((self.output / ".safepoint" / "progress.json").read_text())
                return progress["step"] if progress["step"] >= step else 0
            return 0

        return self.wait_for(f"step {step}", found)

    def wait_for_mark(self, mark: str, count: int = 1, rank: int = 0) -> None:
        """Wait until `rank` of the tiny script has begun its `count`th micro-batch of `mark`: `train 3`, `eval 4`."""

        def found() -> bool:
            with contextlib.suppress(OSError):
                lines = (self.output / f"marks-{rank}").read_text().split("\n")[:-1]
                return lines.count(mark) >= count
            return False

        self.wait_for(f"{mark} ({count})", found)

    def rank_pids(self, attempt: int | None = None) -> list[int]:
        """The pids of the ranks of an attempt, by default the newest."""
        started = self.events("attempt_started")
        if attempt is not None:
            started = [event for event in started if event["attempt"] == attempt]
        return [rank["pid"] for rank in started[-1]["ranks"]]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 90) -> int:
        try:
            return self.process.wait(timeout_s * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s} s\n{self.text}") from None

    def keeper_pids(self) -> list[int]:
        """The keepers of the launcher that run."""
        folder = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            pids = map(int, folder.read_text().split())
            return [pid for pid in pids if b"safepoint.snapshot.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return []

    def kill_everything(self) -> None:
        """Send SIGKILL to the launcher, every rank and the keeper."""
        pids = [self.process.pid, *self.keeper_pids()]
        with contextlib.suppress(IndexError):
            pids += self.rank_pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_until_gone(pids)


def safepoint(
    output: Path,
    *options: str,
    program: list[str] | None = None,
    log: Path | None = None,
    cwd: Path | None = None,
    fresh: str = "",
    **env: str,
) -> Job:
    """Start `safepoint run` with the tiny script, or with another program; for the rest, see `Job`."""
    program = program or [str(TINY), "--out", str(output)]
    command = [sys.executable, "-m", "safepoint.cli.main", "run", *options, *program]
    output.parent.mkdir(parents=True, exist_ok=True)
    return Job(
        command, output, log=log or output.parent / f"{output.name}.log", env=environment(**env), cwd=cwd, fresh=fresh
    )


def tiny(output: Path, *arguments: str) -> list[str]:
    """The tiny script with arguments, as a program for `safepoint`."""
    return [str(TINY), "--out", str(output), *arguments]


def read_events(output: Path, name: str | None = None) -> list[dict[str, Any]]:
    path = output / ".safepoint" / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [event for line in lines if (event := json.loads(line)) and name in {None, event["event"]}]


def committed_steps(output: Path) -> list[int]:
    """The steps of the folders with a manifest."""
    return sorted(int(path.parent.name.split("-")[1]) for path in output.glob("checkpoint-*/safepoint-manifest.json"))


def is_alive(pid: int) -> bool:
    """Whether the process has a running thread: a killed process keeps its files until its last thread has ended."""
    try:
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s * PATIENCE
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"processes {[pid for pid in pids if is_alive(pid)]} are still there"
        time.sleep(_POLL_S)


@contextlib.contextmanager
def no_orphans(*jobs: Job) -> Iterator[None]:
    """No process of the jobs survives the block."""
    try:
        yield
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.kill_everything()
