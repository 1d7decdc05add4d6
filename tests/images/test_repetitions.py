"""Each way to freeze and restore, ten times: every trial is frozen at another step, and equal bit for bit.

make test-images-long
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.places import assert_equal, marks
from tests.images.test_one_tree import ENVIRONMENT, LAUNCHER, PROGRAM, Trainings, safepoint, wait_for
from tests.support.jobs_local import Place
from tests.support.s3_server import S3Server, free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
each_trial = pytest.mark.parametrize("trial", range(10))
_WITHOUT_TORCH = """
import hashlib, os, sys, time
out, number_of_steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
state, memory = b"begin", bytearray(os.urandom(1) * (8 << 20))
with open(out, "a", buffering=1) as file:
    for step in range(number_of_steps):
        state = hashlib.sha256(state + step.to_bytes(4, "little")).digest()
        memory[step * 4096 : step * 4096 + 32] = state
        file.write(f"{step} {state.hex()}\\n")
        if not os.path.exists(f"{out}.fast"):
            time.sleep(pause_s)
    kept = hashlib.sha256(b"".join(memory[step * 4096 : step * 4096 + 32] for step in range(number_of_steps)))
    file.write(f"end {kept.hexdigest()}\\n")
"""
ALONE = [sys.executable, str(PROGRAM)]
PAIR = [sys.executable, "-c", LAUNCHER, str(PROGRAM)]
WITHOUT_TORCH = [sys.executable, "-c", _WITHOUT_TORCH]
STEPS = "200"


class References:
    """What programs write that are never frozen; each is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, list[str]] = {}

    def of(self, name: str, command: list[str]) -> list[str]:
        """The lines that the command writes."""
        if name not in self._known:
            path = self._folder / name
            environ = {**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_ports(1)[0])}
            (self._folder / f"{name}.fast").touch()
            subprocess.run([*command, path, STEPS, "0"], env=environ, check=True, capture_output=True)
            self._known[name] = path.read_text().splitlines()
        return self._known[name]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[Trainings]:
    found = Trainings(tmp_path)
    yield found
    found.end()


def freeze(trainings: Trainings, command: list[str], trial: int, images: Path) -> int:
    """Start a program, and freeze it in a step that depends on the trial. Returns how many lines it had written."""
    pid = trainings.run("out", [*command, str(trainings.folder / "out"), STEPS, "0.15"])
    trainings.has_reached("out", 3 + 2 * trial)
    safepoint("freeze", "--pid", pid, "--to", images)
    trainings.reap()
    num_lines = len(trainings.output("out"))
    assert num_lines < int(STEPS)
    return num_lines


def thaw(trainings: Trainings, image: object) -> None:
    trainings.restored.append(safepoint("thaw", image)["pid"])


SHAPES = [
    pytest.param("alone", ALONE, id="one process with torch"),
    pytest.param("pair", PAIR, id="two ranks of one launcher"),
    pytest.param("plain", WITHOUT_TORCH, id="without torch"),
]


@each_trial
@pytest.mark.parametrize(("name", "command"), SHAPES)
def test_restored_once(
    trainings: Trainings, references: References, tmp_path: Path, name: str, command: list[str], trial: int
) -> None:
    """Frozen in the middle of a step, ended and restored."""
    expected = references.of(name, command)
    freeze(trainings, command, trial, tmp_path / "images")
    thaw(trainings, tmp_path / "images")
    assert trainings.has_ended("out") == expected


@each_trial
def test_restored_twice(trainings: Trainings, references: References, tmp_path: Path, trial: int) -> None:
    """From one image. The second one repeats what the first one did after the freeze."""
    expected = references.of("alone", ALONE)
    num_lines = freeze(trainings, ALONE, trial, tmp_path / "images")
    thaw(trainings, tmp_path / "images")
    assert trainings.has_ended("out") == expected
    thaw(trainings, tmp_path / "images")
    wait_for(lambda: sum(line.startswith("end") for line in trainings.output("out")) == 2, "the second end")
    assert trainings.output("out") == [*expected, *expected[num_lines:]]


@each_trial
def test_a_chain_of_four(trainings: Trainings, references: References, tmp_path: Path, trial: int) -> None:
    """The last image needs the three before it."""
    expected = references.of("alone", ALONE)
    pid = trainings.run("out", [*ALONE, str(tmp_path / "out"), STEPS, "0.15"])
    for number in range(4):
        trainings.has_reached("out", 3 + trial + 4 * number)
        running = ["--leave-running"] if number < 3 else []
        frozen = safepoint("freeze", "--pid", pid, "--to", tmp_path / "images", *running)
    trainings.reap()
    assert frozen["needs"] == ["image-3", "image-2", "image-1"]
    assert len(trainings.output("out")) < int(STEPS)
    thaw(trainings, tmp_path / "images" / "image-4")
    assert trainings.has_ended("out") == expected


@each_trial
def test_after_a_copy_through_a_bucket(
    trainings: Trainings,
    references: References,
    bucket_server: S3Server,
    tmp_path: Path,
    trial: int,
) -> None:
    """From a folder to an object store, and from there to another folder."""
    expected = references.of("alone", ALONE)
    freeze(trainings, ALONE, trial, tmp_path / "images")
    place = f"{bucket_server.location(f'copies-{trial}')}"
    safepoint("images", "copy", tmp_path / "images" / "image-1", place)
    safepoint("images", "copy", f"{place}/image-1", tmp_path / "copied")
    (tmp_path / "images").rename(tmp_path / "gone")
    thaw(trainings, tmp_path / "copied")
    assert trainings.has_ended("out") == expected


@each_trial
def test_two_launchers_as_two_nodes(place: Place, reference: Place, trial: int) -> None:
    """A job with a rank on each node, frozen and restored together."""
    place.jobs.submit(place.training("frozen", "--step-ms", "300", num_nodes=2))
    place.wait_for_mark("frozen", 2 + trial)
    safepoint("freeze", "frozen")
    assert len(marks(place, "frozen")) < 18
    assert len(safepoint("thaw", "frozen")["trees"]) == 2
    assert place.complete("frozen").attempt == 1
    for rank in range(2):
        assert marks(place, "frozen", rank) == [f"train {step}" for step in range(18)]
    assert_equal(place.output("frozen"), reference.output("pair"), 2)
