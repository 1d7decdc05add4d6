"""`safepoint watch --on` learns changes from watches; it does not ask again and again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.test_killed import submission
from tests.support.cluster import killed
from tests.support.cluster.workspace import Workspace
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE


@pytest.mark.timeout(200)
def test_changes_arrive_without_requests(team: Workspace, tmp_path: Path) -> None:
    on = ("--on", ".", "--namespace", team.namespace)
    assert submission(team, tmp_path / "train.py").run().code == 0
    log, output = tmp_path / "log", tmp_path / "output"
    command = [sys.executable, "-P", killed.__file__, str(log), "--", "watch", "a", "--json", *on]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}

    def states() -> list[str]:
        return [json.loads(line)["state"] for line in output.read_text().splitlines()]

    def wait(state: str) -> None:
        deadline_s = time.monotonic() + 40 * PATIENCE
        while state not in states():
            assert time.monotonic() < deadline_s, (states(), log.read_text())
            assert watcher.poll() is None or state in states()
            time.sleep(0.2)

    with output.open("w") as stream:
        watcher = subprocess.Popen(command, env=environ, stdout=stream, stdin=subprocess.DEVNULL)
        try:
            wait("Inadmissible")  # the node has no such image
            # The requests for what it has just learned may still be on the way. Then there are no further ones.
            before: list[str] | None = None
            while before != (now := log.read_text().splitlines()):
                assert len(now) <= 30, now
                before = now
                time.sleep(5)
            assert safepoint("suspend", *on, "a").code == 0
            assert watcher.wait(30 * PATIENCE) == 0
        finally:
            watcher.kill()
            watcher.wait()
    assert states()[-1] == "Suspended"
    assert len(log.read_text().splitlines()) <= len(before) + 2
