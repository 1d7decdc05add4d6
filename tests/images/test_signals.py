"""A signal to `safepoint freeze` and `safepoint thaw`, at several moments: nothing stays frozen, no part of an image
stays, and the exit code is that of the signal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation.processes import tree_of
from safepoint.transparent.criu.program import VARIABLE
from tests.support.criu import environment
from tests.support.patience import PATIENCE

_MEMORY = """
import os, sys, time
kept = os.urandom(int(sys.argv[2]) << 20)
open(sys.argv[1], "w").close()
while True:
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.01)
"""
_SLOW = """#!/bin/sh
# Runs CRIU. The files `began` and `ended` show how far it has come, and `go` lets it continue.
criu={criu}
case $1 in dump|restore) ;; *) exec "$criu" "$@" ;; esac
touch {folder}/began
if [ {moment} = before ]; then while [ ! -e {folder}/go ]; do sleep 0.02; done; fi
"$criu" "$@"
code=$?
touch {folder}/ended
if [ {moment} = after ]; then while [ ! -e {folder}/go ]; do sleep 0.02; done; fi
exit $code
"""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Commands get SIGINT, also if a shell ignores it for tests in the background."""
    shell = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, shell)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60 * PATIENCE
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)


def slow_criu(folder: Path, moment: str) -> dict[str, str]:
    """The environment with a CRIU that waits `before` or `after` its work."""
    script = folder / "slow-criu"
    script.write_text(_SLOW.format(criu=environment()[VARIABLE], folder=folder, moment=moment))
    script.chmod(0o755)
    return {**environment(), VARIABLE: str(script)}


def states(root: int) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in tree_of(root)}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes to `beats` all the time, and has 100 MB of memory."""
    beats = tmp_path / "beats"
    with subprocess.Popen(
        [sys.executable, "-c", _MEMORY, str(beats), "100"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        while not beats.exists():
            time.sleep(0.01)
        yield process
        process.kill()


def assert_runs_on(process: subprocess.Popen[bytes], beats: Path) -> None:
    before, deadline_s = beats.stat().st_size, time.monotonic() + 30 * PATIENCE
    while beats.stat().st_size == before:
        assert process.poll() is None
        assert time.monotonic() < deadline_s, "the program does not run"
        time.sleep(0.01)
    assert "T" not in states(process.pid)


def left_in(images: Path) -> list[str]:
    """What is left of images, without locks, logs and empty folders."""
    control = images / ".safepoint" / "images"
    found = [path.name for path in images.glob("image-*")]
    return found + [path.name for path in control.glob("*") if path.name.startswith("work-")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["before", "after", "storing"])
@pytest.mark.parametrize("options", [("--leave-running",), ()])
def test_a_freeze(
    number: signal.Signals,
    moment: str,
    options: tuple[str, ...],
    program: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    images, beats = tmp_path / "images", tmp_path / "beats"
    command = [
        sys.executable,
        "-m",
        "safepoint.cli.main",
        "freeze",
        "--pid",
        str(program.pid),
        "--to",
        str(images),
        *options,
    ]
    with subprocess.Popen(
        command, env=slow_criu(tmp_path, moment), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as freeze:
        wait_for(tmp_path / {"before": "began"}.get(moment, "ended"), freeze)
        if moment == "storing":
            while not list(images.glob(".safepoint/images/work-*/**/*.regions")):
                assert freeze.poll() is None, freeze.communicate()
        freeze.send_signal(number)
        freeze.send_signal(number)  # an impatient person
        output, errors = freeze.communicate(timeout=60 * PATIENCE)
        (tmp_path / "go").touch()
    assert freeze.returncode == 128 + number, errors
    assert f"interrupted by {number.name}: an incomplete image is deleted" in errors
    assert output == ""
    assert left_in(images) == []
    assert_runs_on(program, beats)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_thaw(moment: str, program: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """None of the processes is left, and the image can be restored after that."""
    images = tmp_path / "images"
    safepoint = [sys.executable, "-m", "safepoint.cli.main"]
    command = [*safepoint, "freeze", "--pid", str(program.pid), "--to", str(images)]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    program.wait()
    with subprocess.Popen(
        [*safepoint, "thaw", str(images)], env=slow_criu(tmp_path, moment), stderr=subprocess.PIPE, text=True
    ) as thaw:
        wait_for(tmp_path / "began", thaw)
        thaw.send_signal(signal.SIGTERM)
        _, errors = thaw.communicate(timeout=60 * PATIENCE)
        (tmp_path / "go").touch()
    if thaw.returncode:
        assert thaw.returncode == 143, errors
        assert not Path(f"/proc/{program.pid}").exists()
    else:
        os.kill(program.pid, signal.SIGKILL)  # the restore was complete before the signal arrived
        pytest.fail("the command was too fast for the signal")
    done = subprocess.run(
        [*safepoint, "thaw", str(images), "--json"], env=environment(), check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    os.kill(program.pid, signal.SIGKILL)
