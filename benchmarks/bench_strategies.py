"""A checkpoint of each strategy: its bytes, and how long it holds the training up; and going on in mid-epoch.

The same Trainer script, a small language model with AdamW, under `safepoint run` and, as the peer, with the Trainer's
own saves under `python` or `torchrun`; the two take turns. A save's pause is the interval between the optimizer's
steps around it less the median interval without one; the first save is not counted. Bytes are those of the newest
checkpoint. Limit: the bytes of weights and moments, `--mb`.

Then a stream of which each sample takes some milliseconds of work, left in mid-epoch: from the beginning of training
to the end of the first step. Both run with a loader that keeps its own state. Limit: a step.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from figures import print_load, print_machine, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.programs.strategies import SHARDED
from tests.support.jobs import Job, environment, no_orphans, read_events

PROGRAM = Path(__file__).parent / "trainer_program.py"
SAFEPOINT, TRAINER = "safepoint", "trainer"
STRATEGIES = ("single", "ddp", *SHARDED)
GOAL_LORA = 20.0
SAVE_STEPS = 5


def start(product: str, num_ranks: int, output: Path, times: Path, *arguments: str, deepspeed: bool = False) -> Job:
    ranks = ["--nproc-per-node", str(num_ranks)]
    if product == SAFEPOINT:
        command = [sys.executable, "-m", "safepoint.cli.main", "run", *ranks]
    else:
        command = [
            sys.executable,
            *(["-m", "torch.distributed.run", "--standalone", *ranks] if num_ranks > 1 else []),
        ]
    program = [str(PROGRAM), "--out", str(output), "--times", str(times), *arguments]
    variables = {"PYTHONUNBUFFERED": "1"}
    if deepspeed:
        variables["PYTHONPATH"] = str(Path(sys.prefix) / "deepspeed")
    return Job([*command, *program], output, log=times.with_suffix(".log"), env=environment(**variables))


def finish(job: Job, limit_s: float) -> None:
    with no_orphans(job):
        code = job.wait(limit_s)
    if code != 0:
        raise SystemExit(f"exit code {code}\n{job.text[-3000:]}")


def moments(times: Path) -> list[tuple[int, float]]:
    return [(int(step), float(at)) for step, at in map(str.split, times.read_text().splitlines())]


class Save:
    """What saves of one strategy by one product cost.

    Args:
        num_bytes: of the newest checkpoint.
        pause_s: of each save but the first.
        durable_s: from the call until it was durable; empty where unknown.
    """

    def __init__(self, num_bytes: int, pause_s: list[float], durable_s: list[float]) -> None:
        self.num_bytes, self.pause_s, self.durable_s = num_bytes, pause_s, durable_s


def measure(product: str, strategy: str, *, lora: bool, folder: Path, options: argparse.Namespace) -> Save:
    output, times = folder / "output", folder / "times"
    steps = SAVE_STEPS * (options.saves + 1) + 2
    arguments = ["--mb", str(options.mb), "--max-steps", str(steps), "--save-steps", str(SAVE_STEPS)]
    arguments += ["--strategy", strategy] if strategy in SHARDED else []
    arguments += ["--lora"] if lora else []
    num_ranks = 1 if strategy == "single" else 2
    finish(
        start(product, num_ranks, output, times, *arguments, deepspeed=strategy.startswith("zero")), options.limit_s
    )
    at = dict(moments(times))
    intervals = {step: at[step + 1] - at[step] for step in range(2, steps)}
    usual = statistics.median(length for step, length in intervals.items() if step % SAVE_STEPS > 1)
    pauses = [intervals[step] - usual for step in intervals if step % SAVE_STEPS == 0 and step > SAVE_STEPS]
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    num_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    events = read_events(output, "saved") if product == SAFEPOINT else []
    return Save(num_bytes, pauses, [event["duration_s"] for event in events[1:]])


def compare(strategies: list[str], root: Path, options: argparse.Namespace) -> None:
    print(
        "\n   MB of a checkpoint; its pause, ms, median (minimum); s until durable, which the Trainer's saves are not"
    )
    print("   | strategy | Safepoint MB | Trainer MB | Safepoint pause | Trainer pause | Safepoint durable |")
    print("   |---|---|---|---|---|---|")
    sizes: dict[tuple[str, bool], int] = {}
    for strategy in strategies:
        for lora in (False, True):
            found: dict[str, list[Save]] = {SAFEPOINT: [], TRAINER: []}
            for turn in range(options.rounds):
                for product in (SAFEPOINT, TRAINER)[:: 1 if turn % 2 == 0 else -1]:
                    folder = Path(tempfile.mkdtemp(dir=root))
                    found[product].append(measure(product, strategy, lora=lora, folder=folder, options=options))
                    shutil.rmtree(folder)
                    os.sync()
            pauses = {
                product: [pause * 1000 for save in saves for pause in save.pause_s]
                for product, saves in found.items()
            }
            durable = [one for save in found[SAFEPOINT] for one in save.durable_s]
            sizes[strategy, lora] = found[SAFEPOINT][-1].num_bytes
            columns = [
                f"{strategy}{', LoRA' if lora else ''}",
                *(f"{found[product][-1].num_bytes / 1e6:.2f}" for product in found),
                *(f"{statistics.median(one):.0f} ({min(one):.0f})" for one in pauses.values()),
                f"{statistics.median(durable):.2f}" if durable else "-",
            ]
            print("   | " + " | ".join(columns) + " |", flush=True)
    for strategy in strategies:
        ratio = sizes[strategy, False] / sizes[strategy, True]
        print(
            verdict(
                f"{strategy}: all weights over LoRA, bytes", value=ratio, goal=GOAL_LORA, at_most=False, unit="times"
            )
        )


def compare_resumes(root: Path, options: argparse.Namespace) -> None:
    seen = options.stream_steps
    found: dict[str, list[float]] = {SAFEPOINT: [], TRAINER: []}
    steps: list[float] = []
    for _ in range(options.rounds):
        for product, values in found.items():
            folder = Path(tempfile.mkdtemp(dir=root))
            output, times, again = folder / "output", folder / "times", folder / "again"
            shape = ["--mb", "12", "--tokens", "32", "--save-steps", str(seen), "--stream"]
            finish(start(product, 1, output, times, *shape, "--max-steps", str(seen)), options.limit_s)
            more = ["--resume"] if product == TRAINER else []
            finish(start(product, 1, output, again, *shape, *more, "--max-steps", str(seen + 3)), options.limit_s)
            (_, began_s), (_, first_s), *_ = moments(again)
            values.append(first_s - began_s)
            at = [moment for _, moment in moments(times)[5:]]
            steps += [later - sooner for sooner, later in itertools.pairwise(at)]
            shutil.rmtree(folder)
    print(f"\n   going on after {seen} steps of a stream; s until the first step was done, median (minimum)")
    for product, values in found.items():
        print(f"   {product:<20} {statistics.median(values):.2f} ({min(values):.2f})")
    print(f"   {'limit: a step':<20} {statistics.median(steps):.2f}")
    ratio = statistics.median(found[TRAINER]) / statistics.median(found[SAFEPOINT])
    print(f"   {'sooner than the Trainer':<46} {ratio:.1f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=240, help="of model and optimizer")
    parser.add_argument("--saves", type=int, default=4, help="counted, in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--stream-steps", type=int, default=300)
    parser.add_argument("--only", choices=("strategies", "resumes"), help="one of the comparisons")
    parser.add_argument("--limit-s", type=float, default=600, help="for one job")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    print_machine(f"checkpoints of {options.mb} MB in every strategy")
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
        if options.only in {None, "strategies"}:
            compare(options.strategies, Path(temporary), options)
        if options.only in {None, "resumes"}:
            compare_resumes(Path(temporary), options)
    print_load("after")


if __name__ == "__main__":
    main()
