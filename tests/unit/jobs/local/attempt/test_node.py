"""A launcher leaves its exit code behind, whatever happens to it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ExitCode
from safepoint.jobs.local.attempt.launchers import Launchers
from safepoint.jobs.local.attempt.node import _code_after, read_exit_code, write_plan
from safepoint.settings.run_settings import RunSettings
from tests.support.job_values import job_spec


def leaves(plan: Path) -> tuple[int | None, str]:
    """What the node says in its file, and on its console; both are the same."""
    done = subprocess.run(
        [sys.executable, "-m", "safepoint.jobs.local.attempt.node", str(plan)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == read_exit_code(plan)
    return read_exit_code(plan), done.stderr


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    """With the message, and without a traceback."""
    write_plan(tmp_path / "node-0.json", {"program": ["absent.py"]}, RunSettings())
    code, said = leaves(tmp_path / "node-0.json")
    assert code == ExitCode.USAGE
    assert "there is no script absent.py" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("content", ["{}", "torn", '{"plan": {"program": ["x"], "unknown": 1}, "settings": {}}'])
def test_what_nobody_has_foreseen(tmp_path: Path, content: str) -> None:
    """Such as a plan of another release: 1, and where it happened."""
    (tmp_path / "node-0.json").write_text(content)
    code, said = leaves(tmp_path / "node-0.json")
    assert code == ExitCode.FAILED
    assert "Traceback" in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("The server socket has failed to listen (errno: 98): EADDRINUSE"), ExitCode.TERMINATED_UNSAVED),
        (RuntimeError("anything"), ExitCode.FAILED),
        (SystemExit(0), ExitCode.FAILED),
        (SystemExit(9), 9),
        (KeyboardInterrupt(), ExitCode.SIGINT),
    ],
)
def test_codes(error: BaseException, code: int) -> None:
    """A port that was taken meanwhile is no failure of the job: it is started again, with another port."""
    assert _code_after(error) == code


def test_the_nodes_meet_at_a_port_that_is_held_for_the_first_one(tmp_path: Path) -> None:
    """Chosen when it starts, not minutes before; the others have the same one."""
    launchers = Launchers(job_spec(num_nodes=2, python="/bin/sleep"), tmp_path, 1)
    launchers.reserve_port(lambda: True)
    for node in (0, 1):
        launchers.start(node, {}, ())
    plans: list[dict[str, Any]] = [
        json.loads((tmp_path / "attempt-1" / f"node-{node}.json").read_bytes())["plan"] for node in (0, 1)
    ]
    assert len({plan["master_port"] for plan in plans}) == 1
    assert [plan["listening"] is None for plan in plans] == [False, True]
    while launchers.are_alive:
        pass


def test_what_was_just_started_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no variables yet is not found by them."""
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 100\n")
    sleeper.chmod(0o700)
    launchers = Launchers(job_spec(python=str(sleeper)), tmp_path, 1)
    monkeypatch.setattr("safepoint.foundation.processes.processes_of", lambda _: [])
    process = launchers.start(0, {}, ()).process
    assert process.is_alive
    launchers.kill()
    launchers.wait_until_gone()
    assert not process.is_alive
    assert not Path(f"/proc/{process.pid}").exists(), "the process was not reaped"
