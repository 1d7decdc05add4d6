"""Steps per second of a Trainer job that saves every few steps, against the same job without saves.

The same script with the same settings, a small language model with real steps, runs with and without saves, under
`safepoint run` and, as the peer, with the Trainer's own synchronous saves under plain `python` or `torchrun`. The
four take turns within a round. Once there is a core to spare, one rank with one thread, and once there is none: as
many ranks as cores, one thread each.

With `--parts` (the default) one more run tells where the training thread's time goes in a save.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from figures import print_load, print_machine, row, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import Job, environment, no_orphans, read_events

PROGRAM = Path(__file__).parent / "trainer_program.py"
SAFEPOINT, PLAIN = "safepoint", "trainer"
GOAL_SHARE = 0.97


def command(product: str, num_ranks: int) -> list[str]:
    ranks = ["--nproc-per-node", str(num_ranks)]
    if product == SAFEPOINT:
        return [sys.executable, "-m", "safepoint.cli.main", "run", *ranks]
    return [sys.executable, *(["-m", "torch.distributed.run", "--standalone", *ranks] if num_ranks > 1 else [])]


def run_job(
    product: str, num_ranks: int, save_steps: int, folder: Path, options: argparse.Namespace, *more: str
) -> list[float]:
    """Run a job; returns the time at which each step ended."""
    output, times = folder / "output", folder / "times"
    program = [str(PROGRAM), "--out", str(output), "--mb", str(options.mb), "--tokens", str(options.tokens)]
    program += ["--max-steps", str(warm_steps(options) + options.steps), "--save-steps", str(save_steps)]
    program += ["--times", str(times), *more]
    log = folder / "log.txt"
    job = Job([*command(product, num_ranks), *program], output, log=log, env=environment(PYTHONUNBUFFERED="1"))
    with no_orphans(job):
        code = job.wait(options.limit_s)
    if code != 0:
        raise SystemExit(f"{product}: exit code {code}\n{job.text[-2000:]}")
    if product == SAFEPOINT and save_steps:
        saved = len(read_events(output, "saved"))
        if saved * 2 < options.steps // save_steps:
            print(f"   note: {saved} saves became durable of {options.steps // save_steps}: the disk is slower")
    return [float(line.split()[1]) for line in times.read_text().splitlines()]


def warm_steps(options: argparse.Namespace) -> int:
    """The steps up to the first save, which are not measured."""
    return 2 * options.save_steps


def rate(moments: list[float], options: argparse.Namespace) -> float:
    """Steps per second after the warm ones; whole intervals between saves."""
    first = warm_steps(options)
    return (len(moments) - first) / (moments[-1] - moments[first - 1])


def compare(num_ranks: int, options: argparse.Namespace, root: Path) -> None:
    variants = [(product, saves) for product in (SAFEPOINT, PLAIN) for saves in (0, options.save_steps)]
    rates: dict[tuple[str, int], list[float]] = {variant: [] for variant in variants}
    for turn in range(options.rounds):
        first = turn % len(variants)
        for product, saves in variants[first:] + variants[:first]:
            folder = Path(tempfile.mkdtemp(dir=root))
            rates[product, saves].append(rate(run_job(product, num_ranks, saves, folder, options), options))
            shutil.rmtree(folder)
            os.sync()  # so that no measurement includes the dirty pages of another
    spare = (os.cpu_count() or 1) - num_ranks
    cores = f"{spare} of {os.cpu_count()} cores to spare" if spare > 0 else "no core to spare"
    print(f"\n   {num_ranks} rank{'s' if num_ranks > 1 else ''} of one thread, {cores}; steps per second")
    for (product, saves), found in rates.items():
        print(row(f"{product}, {f'a save every {saves} steps' if saves else 'no saves'}", found, unit="/s"))
    shares = {
        product: statistics.median(
            saving / idle for saving, idle in zip(rates[product, options.save_steps], rates[product, 0], strict=True)
        )
        for product in (SAFEPOINT, PLAIN)
    }
    label = "share of the speed without saves, Safepoint"
    if spare > 0:
        print(verdict(label, value=shares[SAFEPOINT], goal=GOAL_SHARE, at_most=False, unit=""))
    else:
        print(f"   {label:<46} {shares[SAFEPOINT]:.3f}")
    print(f"   {'share of the speed without saves, Trainer':<46} {shares[PLAIN]:.3f}")
    lost = [1 / max(shares[product], 1e-6) - 1 for product in (PLAIN, SAFEPOINT)]
    if lost[1] > 0:
        print(f"   {'time lost to saves (Trainer ÷ Safepoint)':<46} {lost[0] / lost[1]:.1f} times")


def report_parts(options: argparse.Namespace, root: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=root))
    target = folder / "parts.json"
    run_job(SAFEPOINT, 1, options.save_steps, folder, options, "--parts", str(target))
    found = json.loads(target.read_text())
    num_saves = found["num_saves"]
    print(f"\n   training thread, ms: the first save, and the median of {num_saves - 1} later ones; own time")
    rows = []
    for part, calls in found["own"].items():
        clock_s, processor_s = [0.0] * num_saves, [0.0] * num_saves
        for save, call_s, call_processor_s in calls:
            if save < num_saves:  # after the last one
                clock_s[save] += call_s
                processor_s[save] += call_processor_s
        middle_s = statistics.median(clock_s[1:])
        rows.append((middle_s, statistics.median(processor_s[1:]), min(clock_s[1:]), clock_s[0], part))
    rows.sort(reverse=True)
    rows.append((*(sum(column) for column in zip(*(row[:4] for row in rows), strict=True)), "all of it"))
    for middle_s, processor_s, least_s, first_s, part in rows:
        print(
            f"   {part:<40} first {first_s * 1000:8.2f}   later: median {middle_s * 1000:7.2f}, "
            f"of it processor {processor_s * 1000:6.2f}, minimum {least_s * 1000:6.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=120, help="of model and optimizer")
    parser.add_argument("--tokens", type=int, default=192, help="in a step; they make its length")
    parser.add_argument("--steps", type=int, default=60, help="measured, a multiple of --save-steps")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit-s", type=float, default=600, help="for one job")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    print_machine(f"training with saves of {options.mb} MB")
    print(f"   {options.rounds} rounds of {options.steps} steps, a save every {options.save_steps}")
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
        for num_ranks in dict.fromkeys(options.ranks):
            compare(num_ranks, options, Path(temporary))
        if options.parts:
            report_parts(options, Path(temporary))
    print_load("after")


if __name__ == "__main__":
    main()
