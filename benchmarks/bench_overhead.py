"""What a step costs under `safepoint run`, against the same step under plain `python`.

Three programs are alive at once: the same Trainer script under plain `python`, under `safepoint run` without saves,
and under `safepoint run --snapshot-steps 1`. They take turns of some steps each, in a random order, and only one of
them trains at a time. So a pair of turns is seconds apart, and what else the machine does affects all of them alike.

Printed are the median ratio over all pairs and its 95 % interval from order statistics, which assumes nothing about
the distribution of the ratios (W. J. Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2).
"""

import argparse
import contextlib
import math
import random
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from figures import print_load, print_machine, row, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import Job, environment

PROGRAM = Path(__file__).parent / "trainer_program.py"
PLAIN, SAFEPOINT, SNAPSHOTS = "python", "safepoint run", "safepoint run --snapshot-steps 1"
GOALS = {SAFEPOINT: 1.02, SNAPSHOTS: 1.05}
GOAL_STEP_MS = 50
"""The goals are for steps of this length or longer."""
_START_S, _TURN_S = 300, 120
_PAUSE_S = 0.05
"""After a turn, before the next one: what the program does beside its training comes to an end."""


def command(name: str) -> list[str]:
    """How a program is started."""
    if name == PLAIN:
        return [sys.executable]
    # Without options, Safepoint takes snapshots at an interval of its own.
    every = ["--snapshot-steps", "1"] if name == SNAPSHOTS else []
    return [sys.executable, "-m", "safepoint.cli.main", "run", "--nproc-per-node", "1", *every]


def products(options: argparse.Namespace) -> list[str]:
    """What takes turns."""
    return [PLAIN, SAFEPOINT] if options.without_snapshots else [PLAIN, SAFEPOINT, SNAPSHOTS]


class Programs:
    """The programs, of which one at a time trains.

    Args:
        listener: they connect to it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connected: dict[str, socket.socket] = {}

    def wait_for(self, jobs: dict[str, Job]) -> None:
        """Wait until each one is about to train."""
        deadline_s = time.monotonic() + _START_S
        self._listener.settimeout(1)
        while len(self._connected) < len(jobs):
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(_TURN_S)
                self._connected[_line(connection)] = connection
            for name, job in jobs.items():
                if job.process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"{name} does not train\n{job.text[-2000:]}")

    def turn(self, name: str) -> float:
        """Let one train a block of steps; return the seconds that it took."""
        connection = self._connected[name]
        connection.sendall(b".")
        took_s = float(_line(connection))
        time.sleep(_PAUSE_S)
        return took_s

    def end(self) -> None:
        """Let all of them end."""
        for connection in self._connected.values():
            connection.close()


def _line(connection: socket.socket) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        text = b""
        while not text.endswith(b"\n"):
            if not selector.select(_TURN_S) or not (found := connection.recv(4096)):
                raise SystemExit("a program has ended, or hangs")
            text += found
    return text.decode().strip()


@contextlib.contextmanager
def programs(tokens: int, options: argparse.Namespace) -> Generator[Programs]:
    """Start the programs, and end them."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        listener.bind(str(folder / "turns"))
        listener.listen()
        jobs: dict[str, Job] = {}
        try:
            for number, product in enumerate(products(options)):
                output = folder / str(number)
                output.mkdir()
                program = [str(PROGRAM), "--out", str(output), "--mb", str(options.mb), "--tokens", str(tokens)]
                program += ["--max-steps", "1000000", "--block", str(options.block)]
                program += ["--turns", str(folder / "turns"), product]
                variables = environment(OMP_NUM_THREADS="1")
                jobs[product] = Job([*command(product), *program], output, log=output / "log", env=variables)
            found = Programs(listener)
            found.wait_for(jobs)
            yield found
            found.end()
        finally:
            for job in jobs.values():
                job.process.terminate()
                job.process.wait(60)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval of the median, from order statistics: the narrowest that holds with at least this confidence."""
    ordered, count = sorted(values), len(values)
    chance, low = 0.0, 0
    for number in range(count // 2):
        chance += math.comb(count, number) / 2**count
        if 2 * chance > 1 - confidence:
            break
        low = number + 1
    return (ordered[low - 1], ordered[count - low]) if low else (-math.inf, math.inf)


def measure(tokens: int, options: argparse.Namespace) -> None:
    """Measure steps of one length, and print what was found."""
    times: dict[str, list[float]] = {name: [] for name in products(options)}
    with programs(tokens, options) as running:
        for number in range(options.warm + options.pairs):
            for name in random.sample(list(times), len(times)):
                took_s = running.turn(name) / options.block
                if number >= options.warm:
                    times[name].append(took_s)
    step_ms = 1000 * statistics.median(times[PLAIN])
    print_machine(f"steps of {step_ms:.0f} ms, {options.pairs} pairs of turns of {options.block} steps")
    for name, values in times.items():
        print(row(name, values, unit="ms a step", scale=1000))
    for name in products(options)[1:]:
        goal = GOALS[name]
        ratios = [mine / plain for mine, plain in zip(times[name], times[PLAIN], strict=True)]
        least, most = interval(ratios)
        print(f"   {name}: ratio {statistics.median(ratios):.4f}, 95 % interval {least:.4f} to {most:.4f}")
        if step_ms >= 0.9 * GOAL_STEP_MS:
            print(verdict("   its upper end", value=most, goal=goal, at_most=True, unit=""))
    print_load("after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 48], help="in a step; they make its length")
    parser.add_argument("--mb", type=int, default=12, help="of model and optimizer")
    parser.add_argument("--block", type=int, default=20, help="steps in a turn")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--without-snapshots", action="store_true", help="only plain python and `safepoint run`")
    parser.add_argument("--warm", type=int, default=3, help="turns of each program that do not count")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    for tokens in options.tokens:
        measure(tokens, options)


if __name__ == "__main__":
    main()
