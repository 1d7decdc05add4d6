"""Programs in containers that podman runs: frozen and restored inside of the container, bit for bit.

make test-images-long
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from safepoint.foundation.processes import number_inside
from tests.images.test_one_tree import ENVIRONMENT, PROGRAM, Trainings, safepoint, wait_for
from tests.support.podman import PRIVILEGED, RIGHTS, Container, container, unavailable

_UNAVAILABLE = unavailable()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_UNAVAILABLE is not None, reason=f"nothing was tested in containers: {_UNAVAILABLE}"),
]
TRAINING = [sys.executable, str(PROGRAM)]
PAIR = [sys.executable, str(PROGRAM.with_name("frozen_pair.py"))]
STEPS = "400"


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    """Their processes end with their container."""
    return Trainings(tmp_path)


def expected_of(folder: Path, command: list[str]) -> list[str]:
    """What a program writes that is never frozen, outside of containers."""
    (folder / "reference.fast").touch()
    subprocess.run([*command, folder / "reference", STEPS, "0"], check=True)
    return (folder / "reference").read_text().splitlines()


def start(there: Container, trainings: Trainings, command: Sequence[str]) -> int:
    """Start a program in a container; its number on this machine, when it has made a few steps."""
    out = trainings.folder / "out"
    there.start([*command, out, STEPS, "0.5"], trainings.folder / "out.log", ENVIRONMENT)
    trainings.has_reached("out", 5)
    return min(found(out))


def found(out: Path) -> list[int]:
    """The processes with this file among their arguments, by their numbers on this machine."""
    numbers: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(out) in (path / "cmdline").read_bytes().split(b"\0"):
                numbers.append(int(path.name))
    return numbers


@pytest.mark.parametrize(
    ("options", "command"),
    [
        pytest.param(PRIVILEGED, PAIR, id="privileged"),
        pytest.param(RIGHTS, PAIR, id="few rights"),
        pytest.param(RIGHTS, TRAINING, id="few rights, with torch"),
    ],
)
def test_a_program_goes_on_in_its_container(
    trainings: Trainings, tmp_path: Path, options: tuple[str, ...], command: list[str]
) -> None:
    """Frozen twice, the first time while it runs on; restored where it was."""
    expected = expected_of(tmp_path, command)
    with container(tmp_path, *options) as there:
        pid = number_inside(start(there, trainings, command))
        there.safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", "--leave-running")
        trainings.has_reached("out", len(trainings.output("out")) + 3)
        frozen = there.safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
        assert frozen["needs"] == ["image-1"]
        wait_for(lambda: found(tmp_path / "out") == [], "the end of the processes")
        assert len(trainings.output("out")) < int(STEPS)
        assert there.safepoint("thaw", tmp_path / "images")["pid"] == pid
        assert trainings.has_ended("out") == expected


def test_two_processes_go_on_in_another_container(trainings: Trainings, tmp_path: Path) -> None:
    """With the connection between them, on the loopback interface of a container that does not exist any more."""
    expected = expected_of(tmp_path, PAIR)
    with container(tmp_path, *RIGHTS) as there:
        pid = number_inside(start(there, trainings, PAIR))
        frozen = there.safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", "--encrypt")
        assert frozen["num_processes"] == 2
        assert len(trainings.output("out")) < int(STEPS)
    with container(tmp_path, *RIGHTS) as there:
        there.safepoint("thaw", tmp_path / "images")
        assert trainings.has_ended("out") == expected


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        pytest.param((), "--privileged", id="no rights"),
        pytest.param(("--cap-add", "ALL"), "seccomp=unconfined", id="a seccomp filter"),
    ],
)
def test_a_container_without_the_rights_is_named(
    trainings: Trainings, tmp_path: Path, options: tuple[str, ...], hint: str
) -> None:
    """The program runs on; the hint says with which options the container has to be started."""
    with container(tmp_path, *options) as there:
        pid = number_inside(start(there, trainings, PAIR))
        error = there.safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", code=1)
        assert hint in error["hint"], error
        trainings.has_reached("out", len(trainings.output("out")) + 3)


def test_the_first_process_of_a_container_is_refused_inside(tmp_path: Path) -> None:
    """The kernel does not stop it for a process of the container."""
    with container(tmp_path, *RIGHTS) as there:
        error = there.safepoint("freeze", "--pid", 1, "--to", tmp_path / "images", code=2)
        assert "first process" in error["message"], error


def test_a_program_in_a_container_is_not_frozen_from_outside(trainings: Trainings, tmp_path: Path) -> None:
    """Another program of the container could be at the path of CRIU. The program runs on."""
    with container(tmp_path, *RIGHTS) as there:
        outside = start(there, trainings, PAIR)
        error = safepoint("freeze", "--pid", outside, "--to", tmp_path / "images", code=1)
        assert "container" in error["message"]
        assert "in the container" in error["hint"]
        trainings.has_reached("out", len(trainings.output("out")) + 3)
