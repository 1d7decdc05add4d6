"""Runs one benchmark in two checkouts, in turns, and prints the median ratio of each figure: the cost of a change.

    python benchmarks/against.py OTHER_CHECKOUT bench_vote.py --pairs 10 -- --blocks 8

Both checkouts run with this interpreter, each with its own `src` and its own copy of the benchmark; which one begins
changes from pair to pair. A figure is a line that prints a median, or a cell of a table that a row's first cell and
the head name; the ratio is this checkout's figure over the other's, of one pair. At most 1.05 is the rule for a
change that is not about speed.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_FIGURE = re.compile(r"^\s+(?P<label>\S.*?)\s+median\s+(?P<median>[0-9.]+) ")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_HERE = Path(__file__).parent.parent


def medians(checkout: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    """The medians that `benchmark` prints in `checkout`, by label; a label that comes again gets a number.

    Raises:
        RuntimeError: the benchmark failed.
    """
    (name,) = {path.parent.name for path in checkout.glob("src/*/__init__.py")}
    arguments = [name if word == "safepoint" else word for word in arguments]  # it may have had another name
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
    command = [sys.executable, str(checkout / "benchmarks" / benchmark), *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{benchmark} in {checkout} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, float] = {}
    head: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            head = head or cells
            for title, cell in zip(head[1:], cells[1:], strict=False):
                if median := _NUMBER.match(cell):  # its minimum may follow
                    found[f"{cells[0]}: {title}"] = float(median[0])
        elif match := _FIGURE.match(line):
            label = match["label"]
            number = sum(known.split(" #")[0] == label for known in found)
            found[f"{label} #{number + 1}" if number else label] = float(match["median"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the commit to compare with, such as a git worktree")
    parser.add_argument("benchmark", help="its file name, in both checkouts")
    parser.add_argument("--pairs", type=int, default=10)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # what follows is the benchmark's
    options, arguments = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    other = options.other.resolve()
    names = {path.name for path in (other / "src").iterdir() if (path / "__init__.py").exists()}
    ratios: dict[str, list[float]] = defaultdict(list)
    for number in range(options.pairs):
        turn = (_HERE, other) if number % 2 == 0 else (other, _HERE)
        found = {checkout: medians(checkout, options.benchmark, arguments) for checkout in turn}
        theirs = dict(found[other])
        for name in names:  # the product was called something else there
            theirs = {
                label.replace(name, "safepoint").replace(name.title(), "Safepoint"): value
                for label, value in theirs.items()
            }
        for label, value in found[_HERE].items():
            if theirs.get(label, 0) > 0:  # a difference below the noise can be negative
                ratios[label].append(value / theirs[label])
        print(f"   pair {number + 1} of {options.pairs}, load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    print(f"\n== {options.benchmark} {' '.join(arguments)}: this checkout ÷ {other}")
    for label, values in ratios.items():
        print(
            f"   {label:<56} median ratio {statistics.median(values):6.3f}   "
            f"{min(values):.3f} to {max(values):.3f}   n {len(values)}"
        )


if __name__ == "__main__":
    main()
