"""What all benchmarks print: the machine, its load, medians, minima and ratios."""

import os
import platform
import statistics
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
