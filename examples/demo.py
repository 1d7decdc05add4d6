"""Interrupt a training run, resume it, and check that the result is the same as without the interruption.

One training script runs three times on two ranks: once uninterrupted, once until one rank gets SIGTERM in
the middle, and once more with the command of the second run. Then the two results are compared bit for bit.
The exit code is 0 only if every check passed. Needs Linux (it finds leftover processes in /proc), no GPU and no
network.
"""

from __future__ import annotations

import ctypes
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
SAFEPOINT = Path(sys.executable).with_name("safepoint")
SCRIPT = "examples/finetune.py"
SCRIPT_OPTIONS = [
    *("--cpu", "--max-bytes", "26000", "--block-size", "64", "--eval-blocks", "16", "--epochs", "3"),
    *("--batch-size", "2", "--grad-accum", "2", "--logging-steps", "5", "--eval-steps", "20"),
    *("--save-steps", "10"),
]
NUM_RANKS = 2
SIGNALLED_RANK = 1
SIGNAL_AT = 0.45  # of all steps: in the second of three epochs, and between two periodic checkpoints
INTERRUPTED = 75  # "interrupted, state saved, run again"
RUN_LIMIT_S = 240.0
EXIT_LIMIT_S = 60.0
POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36
SHOWN_DIFFERENCES = 10
LOSSES = ("loss", "eval_loss", "train_loss")

Event = dict[str, Any]


class DemoError(Exception):
    """A run did not get far enough for a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the final table; `held` is None for a line that only informs."""

    label: str
    value: str
    held: bool | None = None
    differences: list[str] = field(default_factory=list)


class Status:
    """A status line: rewritten in place on a terminal, printed from time to time elsewhere."""

    QUIET_S = 10.0

    def __init__(self) -> None:
        self.on_terminal = sys.stdout.isatty()
        self.last_shown = -self.QUIET_S

    def show(self, text: str, *, done: bool = False) -> None:
        now = time.monotonic()
        if self.on_terminal:
            print(f"\r\x1b[K{text}", end="\n" if done else "", flush=True)
        elif done or now - self.last_shown >= self.QUIET_S:
            self.last_shown = now
            print(text, flush=True)


class Run:
    """One start of `safepoint run`, and what it writes into its output folder."""

    def __init__(self, name: str, log_name: str, status: Status) -> None:
        self.folder = OUTPUT / name
        self.log = OUTPUT / f"{log_name}.log"
        self.title = log_name
        self.status = status
        self.num_events_before = len(read_events(self.folder))
        folder = str(self.folder.relative_to(ROOT))
        self.command = [
            str(SAFEPOINT),
            "run",
            "--nproc-per-node",
            str(NUM_RANKS),
            "--output-dir",
            folder,
            SCRIPT,
        ]
        self.command += ["--output-dir", folder, *SCRIPT_OPTIONS]
        # One thread a rank, as torchrun sets it: ranks that compete for cores take twice as long.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
        self.start = time.monotonic()
        with self.log.open("wb") as log:
            # In a session of its own: Ctrl-C reaches this process only, which then ends the others in order.
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def events(self, name: str) -> list[Event]:
        """Return this start's events of one kind, oldest first."""
        return [event for event in read_events(self.folder)[self.num_events_before :] if event["event"] == name]

    def event(self, name: str) -> Event:
        events = self.events(name)
        if not events:
            raise DemoError(f"{self.title}: the event stream has no '{name}'\n{self.log_tail()}")
        return events[-1]

    def progress(self) -> dict[str, Any]:
        path = self.folder / ".safepoint" / "progress.json"
        # The file of an earlier start stays until the first step of this one.
        if not path.exists() or not self.events("attempt_started"):
            return {}
        return json.loads(path.read_text())

    def wait(self, until: Callable[[], bool] = lambda: False, *, limit_s: float = RUN_LIMIT_S) -> int | None:
        """Return the exit code, or None as soon as `until` is true; show the progress meanwhile."""
        deadline = time.monotonic() + limit_s
        while (code := self.process.poll()) is None:
            if until():
                return None
            if time.monotonic() > deadline:
                raise DemoError(f"{self.title}: still running after {limit_s:.0f} s\n{self.log_tail()}")
            self.show()
            try:
                self.process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                continue
        self.show(f"exit code {code}")
        return code

    def show(self, outcome: str = "") -> None:
        progress = self.progress()
        where = f"step {progress['step']} of {progress['max_steps']}" if progress else "starting"
        loss = f", loss {progress['loss']:.3f}" if progress.get("loss") is not None else ""
        seconds = f"{time.monotonic() - self.start:4.0f} s"
        text = f"  {self.title:<10} {seconds}  {where}{loss}{', ' + outcome if outcome else ''}"
        self.status.show(text, done=bool(outcome))

    def log_tail(self, num_lines: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join([f"the last lines of {self.log.relative_to(ROOT)}:", *(f"  | {line}" for line in lines)])


def read_events(folder: Path) -> list[Event]:
    path = folder / ".safepoint" / "events.jsonl"
    if not path.exists():
        return []
    # A line without its newline is still being written.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def descendants() -> list[int]:
    """Return the living processes below this one, and orphans that the kernel has given to it."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def command_line(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return "(gone by now)"


def wait_for_descendants(limit_s: float) -> list[int]:
    """Return the processes that still run after `limit_s`, or an empty list as soon as all have ended."""
    deadline = time.monotonic() + limit_s
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


@contextmanager
def no_process_left() -> Iterator[None]:
    """End every process that this program started, whatever ends this program."""

    def interrupt(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # Ranks run in sessions of their own; as their subreaper we still find them if their launcher dies.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        for number, limit_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            for pid in descendants():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            wait_for_descendants(limit_s)


def past_signal_step(run: Run) -> bool:
    progress = run.progress()
    # Before training the number of steps is unknown, which is reported as 0.
    return bool(progress) and 0 < progress["max_steps"] * SIGNAL_AT <= progress["step"]


def logged_losses(folder: Path) -> dict[tuple[int, str, int], float]:
    """Return every logged loss by step, name and occurrence (the last step is evaluated twice)."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    seen: Counter[tuple[int, str]] = Counter()
    losses: dict[tuple[int, str, int], float] = {}
    for entry in history:
        for name in LOSSES:
            if name in entry:
                key = (entry["step"], name)
                losses[*key, seen[key]] = entry[name]
                seen[key] += 1
    return losses


def check_losses(reference: Path, preempted: Path, resumed_step: int) -> Check:
    expected, found = logged_losses(reference), logged_losses(preempted)
    keys = sorted(expected.keys() | found.keys())
    differing = [key for key in keys if expected.get(key) != found.get(key)]
    num_later = sum(step > resumed_step for step, _, _ in keys)
    return Check(
        label="logged losses equal to the uninterrupted run",
        value=f"{len(keys) - len(differing)} of {len(keys)} ({num_later} of them after the resume)",
        # A comparison of nothing proves nothing: there must be losses on both sides of the interruption.
        held=not differing and 0 < num_later < len(keys),
        differences=[
            f"step {step}, {name}: {expected.get((step, name, n))} uninterrupted, "
            f"{found.get((step, name, n))} resumed"
            for step, name, n in differing
        ],
    )


def check_weights(reference: Path, preempted: Path) -> Check:
    paths = [folder / "final" / "model.safetensors" for folder in (reference, preempted)]
    label = "final weights equal, bit for bit"
    if filecmp.cmp(*paths, shallow=False):
        return Check(label=label, value=f"{paths[0].stat().st_size / 1e6:.0f} MB", held=True)
    from safetensors.numpy import load_file

    expected, found = (load_file(path) for path in paths)
    names = sorted(expected.keys() | found.keys())
    equal = [n for n in expected.keys() & found.keys() if expected[n].tobytes() == found[n].tobytes()]
    differences = [f"{name} differs" for name in names if name not in equal]
    value = f"{len(differences)} of {len(names)} tensors differ"
    return Check(label=label, value=value, held=False, differences=differences or ["only the headers differ"])


def check_checkpoint(checkpoint: Path) -> Check:
    """Compare the files that the manifest lists with the files that exist."""
    files = json.loads((checkpoint / "safepoint-manifest.json").read_text())["files"]
    differences = [
        f"{entry['path']}: not {entry['size_bytes']} bytes, as its manifest says"
        for entry in files
        if not (checkpoint / entry["path"]).is_file()
        or (checkpoint / entry["path"]).stat().st_size != entry["size_bytes"]
    ]
    size_mb = sum(entry["size_bytes"] for entry in files) / 1e6
    value = f"{len(files)} files, {size_mb:.0f} MB"
    label = f"files in {checkpoint.name}"
    return Check(label=label, value=value, held=bool(files) and not differences, differences=differences)


def check_processes() -> Check:
    """Return the processes that outlive their run; wait a moment, because a parent may end before its children."""
    left = [f"{pid}: {command_line(pid)}" for pid in wait_for_descendants(5.0)]
    return Check(label="processes left behind", value=str(len(left)), held=not left, differences=left)


def preempt(run: Run) -> float:
    """Send SIGTERM to one rank in the middle of the run; return the seconds until `safepoint run` exited."""
    if run.wait(until=lambda: past_signal_step(run)) is not None:
        raise DemoError(f"{run.title}: ended before it was interrupted\n{run.log_tail()}")
    ranks = run.event("attempt_started")["ranks"]
    pid = next(rank["pid"] for rank in ranks if rank["rank"] == SIGNALLED_RANK)
    start = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    run.show(f"SIGTERM to rank {SIGNALLED_RANK} of {NUM_RANKS} (pid {pid})")
    run.wait(limit_s=EXIT_LIMIT_S)
    return time.monotonic() - start


def finished(run: Run) -> Run:
    if code := run.wait():
        raise DemoError(f"{run.title}: exit code {code} instead of 0\n{run.log_tail()}")
    return run


def demonstrate() -> list[Check]:
    start = time.monotonic()
    status = Status()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()

    if not SAFEPOINT.exists():
        raise DemoError(f"there is no {SAFEPOINT}: `make venv` installs it")
    reference = Run("reference", "reference", status)
    print(f"$ {' '.join(['safepoint', *reference.command[1:]])}")
    print(f"  output in {OUTPUT.relative_to(ROOT)}/reference.log, preempted.log and resumed.log\n", flush=True)
    finished(reference)
    preempted = Run("preempted", "preempted", status)
    exit_s = preempt(preempted)
    left_behind = check_processes()
    code = preempted.process.returncode
    if code != INTERRUPTED:
        raise DemoError(f"preempted: exit code {code} instead of {INTERRUPTED}\n{preempted.log_tail()}")
    saved = preempted.event("saved")
    reached = max(preempted.event("interrupted")["step"], preempted.progress()["step"])
    periodic = [event["step"] for event in preempted.events("saved") if event["trigger"] == "periodic"]
    # Taken now: the resumed run may prune this checkpoint later.
    checkpoint = check_checkpoint(ROOT / saved["path"])

    resumed = finished(Run("preempted", "resumed", status))
    resumed_step = resumed.event("resumed")["step"]
    num_lost = reached - resumed_step
    return [
        Check(label=f"exit code after SIGTERM to rank {SIGNALLED_RANK} alone", value=str(code), held=True),
        Check(label="exit code of the same command again", value="0", held=True),
        Check(label="seconds from the signal to the exit", value=f"{exit_s:.1f}"),
        Check(
            label="step saved / step resumed",
            value=f"{saved['step']} ({saved['trigger']}) / {resumed_step}",
            held=saved["step"] == resumed_step and saved["trigger"] == "jit",
        ),
        Check(
            label="steps lost",
            value=f"{num_lost} (with periodic checkpoints only: {reached - max(periodic, default=0)})",
            held=num_lost == 0,
        ),
        check_losses(reference.folder, preempted.folder, resumed_step),
        check_weights(reference.folder, preempted.folder),
        checkpoint,
        left_behind if left_behind.differences else check_processes(),
        Check(label="seconds in all", value=f"{time.monotonic() - start:.0f}"),
    ]


def print_table(checks: list[Check]) -> None:
    marks = {True: "ok", False: "FAILED", None: ""}
    label_width = max(len(check.label) for check in checks)
    value_width = max(len(check.value) for check in checks)
    print()
    for check in checks:
        print(f"  {check.label:<{label_width}}  {check.value:<{value_width}}  {marks[check.held]}".rstrip())
    for check in checks:
        if check.differences:
            print(f"\n{check.label}:")
            print("\n".join(f"  {difference}" for difference in check.differences[:SHOWN_DIFFERENCES]))
            if num_hidden := len(check.differences[SHOWN_DIFFERENCES:]):
                print(f"  and {num_hidden} more")


def main() -> int:
    with no_process_left():
        try:
            checks = demonstrate()
        except DemoError as error:
            print(f"\ndemo failed: {error}", file=sys.stderr)
            return 1
    print_table(checks)
    return 1 if any(check.held is False for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
