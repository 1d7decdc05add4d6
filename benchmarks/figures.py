"""What all benchmarks print: the machine, its load, medians, minima and ratios."""

import mmap
import os
import platform
import statistics
import time
from collections.abc import Sequence

import torch


def print_machine(title: str) -> None:
    """Print the heading with the machine and its load."""
    print(f"\n== {title}")
    print(
        f"   {os.cpu_count()} cores, {platform.machine()}, {'GPU' if torch.cuda.is_available() else 'no GPU'}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    print_load("before")


def print_load(when: str) -> None:
    """Print the load average. Above the number of cores, other work has slowed the figures down."""
    one, five, fifteen = os.getloadavg()
    print(f"   load average {when}: {one:.2f} {five:.2f} {fifteen:.2f}")


def row(label: str, values: Sequence[float], *, unit: str, scale: float = 1.0) -> str:
    """One line: median, minimum, 90th percentile and count of `values`, each times `scale`."""
    if not values:
        return f"   {label:<46} no figure"
    ordered = sorted(value * scale for value in values)
    tail = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return (
        f"   {label:<46} median {statistics.median(ordered):9.3f} {unit}   minimum {ordered[0]:9.3f}   "
        f"p90 {tail:9.3f}   n {len(ordered)}"
    )


def verdict(label: str, *, value: float, goal: float, at_most: bool, unit: str) -> str:
    """Print whether a goal is met; a goal that is missed is no failure."""
    met = value <= goal if at_most else value >= goal
    sign = "≤" if at_most else "≥"
    return f"   {label:<46} {value:.3f} {unit} (goal {sign} {goal:g} {unit}): {'met' if met else 'MISSED'}"


def touch_memory(spare_bytes: int = 2 << 30) -> None:
    """Write to all available memory but `spare_bytes` once, and print how long each GB took.

    The host of a virtual machine may provide memory only at its first use, which can take several seconds for each
    GB. Otherwise, these seconds are part of the figures of any program that gets such memory.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    taken_s: list[float] = []
    block = bytes([1]) * (1 << 30)
    with mmap.mmap(-1, max(1 << 30, available - spare_bytes)) as memory:
        for offset in range(0, len(memory) - len(block) + 1, len(block)):
            began_s = time.monotonic()
            memory[offset : offset + len(block)] = block
            taken_s.append(time.monotonic() - began_s)
    print(row("first use of memory, each GB", taken_s, unit="s"))
