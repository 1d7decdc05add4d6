"""The life of a job by the `safepoint` executable: every command is a process of its own."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.model.states import JobState
from tests.support.jobs_local import LOOP, Place, jobs_in
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
SAFEPOINT = Path(sys.executable).with_name("safepoint")
NAME = "tiny"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with jobs_in(tmp_path) as found:
        yield found


def ask(*arguments: object) -> str:
    """The output of a command, which must succeed."""
    command = [SAFEPOINT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150 * PATIENCE, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def submit(place: Place, *options: str) -> dict[str, Any]:
    output = place.output(NAME)
    slowly = ["--step-ms", str(round(600 * PATIENCE)), "--resumed-step-ms", "20"]
    return json.loads(
        ask("submit", "--json", "--name", NAME, "--output-dir", output, *options, LOOP, "--out", output, *slowly)
    )


class Screen:
    """A command on a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environ = {name: text for name, text in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [SAFEPOINT, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
        )
        os.close(theirs)

    def text(self) -> str:
        """Everything that was written, when the command has ended."""
        seen = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._ours, 1 << 16):
                seen += part
        os.close(self._ours)
        assert self.process.wait(30) == 0, seen
        return seen.decode()


def test_a_job_through_all_its_commands(place: Place) -> None:
    """Submit, list, watch, suspend, resume, list checkpoints, delete: each prints what is true."""
    submitted = submit(place)
    assert (submitted["version"], submitted["name"], submitted["num_nodes"]) == (1, NAME, 1)
    screen = Screen("watch", NAME, "--interval", "0.2")
    following = [
        subprocess.Popen([SAFEPOINT, *words], stdout=subprocess.PIPE, text=True)
        for words in (["logs", "-f", NAME, "--json"], ["watch", NAME, "--json", "--interval", "0.2"])
    ]
    place.wait_for_mark(NAME, 3)
    assert f"{NAME}: Running" in ask("status", NAME)
    assert "Running" in ask("list", "--active").splitlines()[1]

    suspended = json.loads(ask("suspend", NAME, "--yes", "--json"))
    assert suspended["state"] == "Suspended"
    assert suspended["safe_step"] in place.steps(NAME)
    # Those who looked on have seen it, and have ended with it.
    lines, changes = (
        [json.loads(line) for line in process.communicate(timeout=60 * PATIENCE)[0].splitlines()]
        for process in following
    )
    assert [process.returncode for process in following] == [0, 0]
    assert {line["source"] for line in lines} == {"node 0", "rank 0"}
    states = [change["state"] for change in changes]
    assert {"Running", "Suspended"} <= set(states)
    assert states[-1] == "Suspended"
    steps = [change["progress"]["step"] for change in changes if change["progress"] is not None]
    assert steps == sorted(steps)
    picture = screen.text()
    assert "LOSS CURVE" in picture
    assert "Suspended" in picture.rsplit("LOSS CURVE", 1)[1]

    assert ask("resume", NAME).strip() == f"job {NAME} resumes"
    ask("logs", "-f", NAME)
    done = json.loads(ask("status", NAME, "--json"))
    assert (done["state"], done["attempt"], done["progress"]["step"]) == ("Complete", 2, 18)
    assert [attempt["exit_code"] for attempt in done["attempts"]] == [75, 0]
    events = [event["event"] for event in json.loads(ask("events", NAME, "--json"))]
    wanted = ["submitted", "suspend_requested", "suspended", "run_requested", "complete"]
    assert [event for event in events if event in wanted] == wanted
    listed = json.loads(ask("checkpoints", "list", f"job:{NAME}", "--json"))
    assert [item["step"] for item in listed if item["step"] is not None][-1] == suspended["safe_step"]

    assert "its checkpoints stay in" in ask("delete", NAME)
    assert ask("list").strip() == "no jobs"
    assert place.steps(NAME)


@pytest.mark.long
def test_a_job_is_scaled_by_its_command(place: Place) -> None:
    """One command suspends the running job, changes its nodes and resumes it; the job completes."""
    submit(place, "--allow-batch-change")
    place.wait_for_mark(NAME, 2)
    scaled = json.loads(ask("scale", NAME, "--nnodes", "2", "--yes", "--json"))
    assert scaled["num_nodes"] == 2
    assert place.complete(NAME).state is JobState.COMPLETE
    attempts = json.loads(ask("status", NAME, "--json"))["attempts"]
    assert [attempt["num_nodes"] for attempt in attempts] == [1, 2]


def test_a_run_ends_with_a_line_for_programs(tmp_path: Path) -> None:
    """The JSON line follows the text on stderr; stdout belongs to the script."""
    script = tmp_path / "fails.py"
    script.write_text("print('mine')\nraise SystemExit(7)\n")
    command = [SAFEPOINT, "run", "--json", "--max-restarts", "0", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150 * PATIENCE, check=False)
    assert done.returncode == 7
    assert done.stdout == "mine\n"
    assert json.loads(done.stderr.splitlines()[-1])["code"] == 7
