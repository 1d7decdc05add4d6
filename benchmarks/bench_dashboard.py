"""How fast the dashboard answers, and what it costs while no one looks: 1,000 jobs, 10,000 steps, 500 events.

- each page: the time until its last byte, the processor time of the dashboard (hardly changed by other work on the
  machine), and the bytes over the wire (gzip);
- an event: from its write by a rank until a viewer has received the change, with 20 viewers connected;
- processor time and memory, with 20 viewers and nothing that changes, and without viewers;
- memory with this machine and a cluster of as many jobs;
- with Debian's Chromium (`make install-browser`): until a page accepts keys and clicks.

A sixth of the jobs is active, as on a machine with a long history. The jobs have no processes.
"""

import argparse
import contextlib
import http.client
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_stand_in import stand_in
from figures import print_load, print_machine, row, verdict

from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import METRICS_NAME, MetricHistory, MetricPoint
from safepoint.progress.record import PROGRESS_NAME, Progress, State
from safepoint.settings.run_settings import RunSettings

PAGE_GOAL_MS, WIRE_GOAL_KB, EVENT_GOAL_S, IDLE_GOAL_PERCENT, MEMORY_GOAL_MB = 100.0, 150.0, 1.0, 1.0, 80.0
CLUSTER_GOAL_MB, INTERACTIVE_GOAL_MS = 150.0, 1000.0
BROWSER = Path("/usr/bin/chromium")
NUM_JOBS, NUM_STEPS, NUM_EVENTS, NUM_VIEWERS = 1000, 10_000, 500, 20
STATES = (
    JobState.COMPLETE,
    JobState.COMPLETE,
    JobState.SUSPENDED,
    JobState.FAILED,
    JobState.COMPLETE,
    JobState.RUNNING,
)
LARGE = "job-0005"
# The jobs have no supervisors, so the dashboard must start none.
SERVER = """
import sys
from safepoint.jobs.local import local_jobs
local_jobs.start_missing_supervisors = lambda history: []
from safepoint.cli.main import main
sys.argv[:1] = ["safepoint", "dashboard", "--port", "0"]
main()
"""


def progress_at(step: int, folder: Path) -> Progress:
    """A report of a training."""
    now = clock.utc_now()
    return Progress(
        time=now,
        state=State.TRAINING,
        step=step,
        max_steps=20_000,
        loss=2.0 / (1 + step / 1000),
        train_metrics={"learning_rate": 1e-4, "grad_norm": 1.0},
        step_s=0.5,
        attempt=1,
        started=now,
        output_dir=str(folder),
        safe_step=step - 10,
        safe_time=now,
    )


def fill(folder: Path) -> None:
    """The jobs, with the files that their ranks write."""
    with History() as history, history.transaction():
        for number in range(NUM_JOBS):
            name, state = f"job-{number:04d}", STATES[number % len(STATES)]
            settings = RunSettings(output_dir=str(folder / f"out-{number}"))
            program = ("train.py", "--lr", "1e-4", "--seed", str(number))
            spec = JobSpec(
                name=name, program=program, python=sys.executable, working_dir=str(folder), settings=settings
            )
            history.add(spec, actor="bench")
            history.begin_attempt(name, 1, 1)
            if state is not JobState.RUNNING:
                history.end_attempt(name, 1, outcome=str(state), exit_code=0)
            history.become(name, state, actor="bench", attempt=1, safe_step=900)
            job_folder(name).mkdir(parents=True)
            (job_folder(name) / PROGRESS_NAME).write_bytes(progress_at(1000, folder).to_bytes())
            values = [(step, 2.0 / (1 + step / 100)) for step in range(1, 200)]
            points = [MetricPoint(time="", attempt=1, step=step, values={"loss": loss}) for step, loss in values]
            (job_folder(name) / METRICS_NAME).write_bytes(b"".join(point.to_line() for point in points))
    metrics = job_folder(LARGE) / METRICS_NAME
    metrics.unlink()
    history_of_steps = MetricHistory([metrics])
    for step in range(1, NUM_STEPS + 1):
        history_of_steps.add(progress_at(step, folder))
    begun_s = clock.wall_s() - NUM_EVENTS
    events = [
        {
            "time": clock.as_utc(begun_s + index),
            "event": "saved",
            "actor": "keeper",
            "cause": "periodic",
            "step": index,
            "path": f"{folder}/checkpoint-{index}",
            "num_files": 8,
            "size_bytes": 1000,
            "duration_s": 0.1,
        }
        for index in range(NUM_EVENTS)
    ]
    (job_folder(LARGE) / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (job_folder(LARGE) / "logs").mkdir()
    lines = "".join(f"step {step}: loss {2.0 / step:.4f}, lr 1.0e-04\n" for step in range(1, NUM_STEPS + 1))
    (job_folder(LARGE) / "logs" / "rank-0.log").write_text(lines)


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """The dashboard: its process, its port, and the cookie of a visitor."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)(/enter\?token=\S+)", process.stdout.readline())
        assert found is not None
        port = int(found[1])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", found[2])
        cookie = connection.getresponse().headers["set-cookie"].split(";")[0]
        yield process, port, cookie
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def get(port: int, cookie: str, path: str) -> tuple[float, int]:
    """Seconds and bytes of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    begun_s = time.perf_counter()
    connection.request("GET", path, headers={"Cookie": cookie, "Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    body = answer.read()
    took_s = time.perf_counter() - begun_s
    assert answer.status == 200, (path, answer.status)
    connection.close()
    return took_s, len(body)


class Viewer(threading.Thread):
    """A page that is open: it notes when it has received a change."""

    def __init__(self, port: int, cookie: str) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, float] = {}
        self.connected = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._cookie = cookie

    def run(self) -> None:
        self._connection.request("GET", "/live", headers={"Cookie": self._cookie})
        answer = self._connection.getresponse()
        with contextlib.suppress(OSError, ValueError):
            while line := answer.readline():
                if line.startswith(b"event: hello"):
                    self.connected.set()
                if line.startswith(b"data: ["):
                    for key in json.loads(line[6:]):
                        self.seen.setdefault(key, time.perf_counter())


def processor_s(pid: int) -> float:
    """Processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Memory of a process that no other process shares, and its part of what they share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure_idle(pid: int, seconds: float) -> float:
    """Per cent of a core."""
    before_s = processor_s(pid)
    time.sleep(seconds)  # what is measured is the time in which nothing happens
    return 100 * (processor_s(pid) - before_s) / seconds


def measure_cluster(folder: Path) -> None:
    """Memory of a dashboard with this machine and a cluster, after all its pages were loaded."""
    with stand_in(folder, num_jobs=NUM_JOBS, num_running=NUM_JOBS // len(STATES)) as kubeconfig:
        os.environ["KUBECONFIG"] = str(kubeconfig)
        with served("--on", "local", "--on", "c") as (process, port, cookie):
            for page in ("/jobs", "/jobs/c/job-0000", "/storage", "/costs", "/jobs?place=c"):
                before_s = processor_s(process.pid)
                took_s, size = get(port, cookie, page)
                busy_ms = 1000 * (processor_s(process.pid) - before_s)
                print(
                    f"   {page}, with a cluster: {1000 * took_s:.0f} ms, processor {busy_ms:.0f} ms, "
                    f"{size / 1000:.1f} kB"
                )
            memory = resident_mb(process.pid)
            print(verdict("memory with a cluster", value=memory, goal=CLUSTER_GOAL_MB, at_most=True, unit="MB"))
            viewer = Viewer(port, cookie)
            viewer.start()
            viewer.connected.wait(30)
            busy = measure_idle(process.pid, 20)
            print(f"   a viewer of a cluster, nothing changes: {busy:.1f} % of a core")


def measure_browser(port: int, cookie: str, pages: tuple[str, ...], rounds: int) -> None:
    """Until a page in a real browser has run its scripts, from the beginning of the navigation."""
    from playwright.sync_api import sync_playwright

    script = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(BROWSER), args=["--no-sandbox"])
        context = browser.new_context()
        name, _, value = cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{port}"}])
        page = context.new_page()
        slowest_ms = 0.0
        for path in pages:
            found: list[float] = []
            for _ in range(rounds):
                page.goto(f"http://127.0.0.1:{port}{path}", wait_until="load")
                found.append(page.evaluate(script))
            print(row(f"{path}, until it is interactive", found, unit="ms"))
            slowest_ms = max(slowest_ms, sorted(found)[len(found) // 2])
        browser.close()
    label = "slowest page until interactive (median)"
    print(verdict(label, value=slowest_ms, goal=INTERACTIVE_GOAL_MS, at_most=True, unit="ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=20)
    options = parser.parse_args()
    print_machine(f"the dashboard: {NUM_JOBS} jobs, {NUM_STEPS} steps, {NUM_EVENTS} events")
    pages = (
        "/jobs",
        "/jobs?sort=name&page=7",
        "/jobs?q=seed+777",
        f"/jobs/local/{LARGE}",
        f"/jobs/local/{LARGE}/metrics",
        f"/jobs/local/{LARGE}/events",
        f"/jobs/local/{LARGE}/logs",
        f"/jobs/local/{LARGE}/suspend",
        "/storage",
        "/costs",
    )
    with tempfile.TemporaryDirectory() as text:
        for name in ("STATE", "CONFIG", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = text
        fill(Path(text))
        with served() as (process, port, cookie):
            slowest_ms, largest_kb = 0.0, 0.0
            print(f"   first page: {1000 * get(port, cookie, '/jobs')[0]:.0f} ms")
            for page in pages:
                get(port, cookie, page)
                before_s = processor_s(process.pid)
                answers = [get(port, cookie, page) for _ in range(options.rounds)]
                busy_ms = 1000 * (processor_s(process.pid) - before_s) / options.rounds
                size_kb = answers[0][1] / 1000
                label = f"{page} ({size_kb:.1f} kB)"
                print(
                    row(label, [took_s * 1000 for took_s, _ in answers], unit="ms"), f"  processor {busy_ms:.0f} ms"
                )
                slowest_ms = max(slowest_ms, busy_ms)
                largest_kb = max(largest_kb, size_kb)
            print(
                verdict(
                    "slowest page, as processor time", value=slowest_ms, goal=PAGE_GOAL_MS, at_most=True, unit="ms"
                )
            )
            print(verdict("largest page", value=largest_kb, goal=WIRE_GOAL_KB, at_most=True, unit="kB"))
            idle = measure_idle(process.pid, options.idle_s)
            print(verdict("idle, no viewer", value=idle, goal=IDLE_GOAL_PERCENT, at_most=True, unit="% of a core"))
            viewers = [Viewer(port, cookie) for _ in range(NUM_VIEWERS)]
            for viewer in viewers:
                viewer.start()
            for viewer in viewers:
                viewer.connected.wait(30)
            time.sleep(2)  # until the first look at all jobs is over
            delays: list[float] = []
            for number in range(options.rounds):
                name = f"job-{5 + 6 * (number + 1):04d}"
                written_s = time.perf_counter()
                with (job_folder(name) / "events.jsonl").open("a") as stream:
                    stream.write('{"event": "saved", "time": "2026-01-01T00:00:00.000Z", "step": 1}\n')
                deadline_s = written_s + 5
                while (
                    not all(f"local/{name}" in viewer.seen for viewer in viewers) and time.perf_counter() < deadline_s
                ):
                    time.sleep(0.005)
                seen = [viewer.seen.get(f"local/{name}", math.inf) - written_s for viewer in viewers]
                delays.append(max(seen))
            print(row(f"an event, until the last of {NUM_VIEWERS} viewers has it", delays, unit="s"))
            print(verdict("slowest event", value=max(delays), goal=EVENT_GOAL_S, at_most=True, unit="s"))
            busy = measure_idle(process.pid, options.idle_s)
            label = f"{NUM_VIEWERS} viewers, nothing changes"
            print(verdict(label, value=busy, goal=IDLE_GOAL_PERCENT, at_most=True, unit="% of a core"))
            memory = resident_mb(process.pid)
            print(verdict("memory", value=memory, goal=MEMORY_GOAL_MB, at_most=True, unit="MB"))
            if BROWSER.exists() and importlib.util.find_spec("playwright") is not None:
                measure_browser(port, cookie, (*pages[:1], pages[3], *pages[5:]), options.rounds)
        measure_cluster(Path(text))
    print_load("after")


if __name__ == "__main__":
    main()
