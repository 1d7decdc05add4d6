"""How long commands take that somebody types and waits for, each in a process of its own, interleaved.

- `safepoint --help`;
- `safepoint list` and `safepoint list --json` with finished jobs in the history;
- `safepoint status` of one of them.

Modules are compiled before, as those of an installed package are.

Limits: Python that does nothing, and Python that imports Typer. On the clock and, hardly changed by other work on the
machine, as processor time of the process and its children.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from figures import print_load, print_machine, row, verdict

from safepoint.errors import ExitCode
from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import PROGRESS_NAME, Progress, State
from safepoint.settings.run_settings import RunSettings

HELP_GOAL_S, LIST_GOAL_S = 0.3, 0.5


def fill(num_jobs: int, folder: Path) -> None:
    """Finished jobs, as `safepoint submit` leaves them."""
    with History() as history, history.transaction():
        for number in range(num_jobs):
            spec = JobSpec(
                name=f"job-{number:04d}",
                program=("train.py", "--lr", "1e-4"),
                python=sys.executable,
                working_dir=str(folder),
                settings=RunSettings(output_dir=str(folder / f"out-{number}")),
            )
            history.add(spec, actor="bench")
            history.begin_attempt(spec.name, 1, 1)
            history.end_attempt(spec.name, 1, outcome=str(JobState.COMPLETE), exit_code=0)
            history.become(spec.name, JobState.COMPLETE, actor="bench", exit_code=ExitCode.OK, attempt=1)
            job_folder(spec.name).mkdir(parents=True)
            progress = Progress(time=clock.utc_now(), state=State.FINISHED, step=1000, max_steps=1000, loss=0.5)
            (job_folder(spec.name) / PROGRESS_NAME).write_bytes(progress.to_bytes())


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_s = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    took_s = time.perf_counter() - begun_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="finished jobs in the history")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    safepoint = str(Path(sys.executable).with_name("safepoint"))
    commands = {
        "limit: python": [sys.executable, "-c", "pass"],
        "limit: python that imports typer": [sys.executable, "-c", "import typer"],
        "safepoint --help": [safepoint, "--help"],
        f"safepoint list, {options.jobs} jobs": [safepoint, "list"],
        f"safepoint list --json, {options.jobs} jobs": [safepoint, "list", "--json"],
        "safepoint status": [safepoint, "status", "job-0000"],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_STATE_HOME": folder, "XDG_CONFIG_HOME": folder}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in commands.values():
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        fill(options.jobs, Path(folder))
        print_machine("commands")
        clock_s, processor_s = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for _ in range(options.rounds):
            for name, command in commands.items():
                on_the_clock_s, of_processor_s = timed(command)
                clock_s[name].append(on_the_clock_s)
                processor_s[name].append(of_processor_s)
    for name in commands:
        print(row(name, clock_s[name], unit="ms", scale=1000))
        print(row("  processor", processor_s[name], unit="ms", scale=1000))
    listed = f"safepoint list, {options.jobs} jobs"
    for name, goal_s in (("safepoint --help", HELP_GOAL_S), (listed, LIST_GOAL_S)):
        middle_s = sorted(clock_s[name])[options.rounds // 2]
        print(verdict(name, value=middle_s, goal=goal_s, at_most=True, unit="s"))
    print_load("after")


if __name__ == "__main__":
    main()
