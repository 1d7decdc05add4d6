"""The Trainer script of `restart_jobs.py`: it notes when each start of a rank passed which phase.

For each start, a rank appends one JSON line to `marks-RANK` in the folder `--marks`, after its first step: its pid,
and times of the monotonic clock, which all processes of the machine share. Nothing in it knows of Safepoint. With
`--device`, the rank makes its CUDA context at once, and then its group does a first all-reduce: so both are phases of
their own. Otherwise they come where a Trainer happens to need them. With `--progress`, rank 0 keeps the number of its
last step in the file `progress`, and appends to `saves` how long each save took.
"""

import time

BEGUN_S = time.monotonic()
import argparse  # noqa: E402  the first line of a rank's script is what is timed
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from trainer_program import Blocks, model_of  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

IMPORTED_S = time.monotonic()


class Progress(TrainerCallback):
    """Writes the number of the last step, and the times that saves take."""

    def __init__(self, folder: Path) -> None:
        self._steps = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
        self._saves = (folder / "saves").open("a", buffering=1)
        self._ended_s = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        os.pwrite(self._steps, b"%-12d\n" % state.global_step, 0)
        self._ended_s = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        self._saves.write(f"{time.monotonic() - self._ended_s:.4f}\n")


class Marks(TrainerCallback):
    """Writes the times of this start when its first step is done."""

    def __init__(self, folder: Path, least_s: float) -> None:
        self._file = folder / f"marks-{os.environ.get('RANK', '0')}"
        self._least_s = least_s
        self._times = {"begun_s": BEGUN_S, "imported_s": IMPORTED_S}
        self._is_written = False
        self._step_began_s = 0.0

    def note(self, phase: str) -> None:
        self._times[phase] = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        self._times["loaded_s"] = time.monotonic()

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began_s = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(max(0.0, self._step_began_s + self._least_s - time.monotonic()))

    def on_optimizer_step(self, args, state, control, **kwargs):
        if not self._is_written:
            self._is_written = True
            line = {"pid": os.getpid(), "step": state.global_step, **self._times, "stepped_s": time.monotonic()}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--mb", type=int, required=True, help="of model and optimizer")
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--save-steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true", help="the Trainer's own, if there is a checkpoint")
    parser.add_argument("--progress", action="store_true", help="keep the step, and the times of saves")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", help="of the process group, if not the device's own")
    options = parser.parse_args()
    marks = Marks(options.marks, options.step_ms / 1000)
    if options.device == "cuda":
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        marks.note("context_s")
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=1_000_000,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
        ddp_backend=options.backend,
        dataloader_num_workers=0,
        seed=7,
    )
    if options.device == "cuda":
        device = args.device  # makes the group of the ranks, which connects them in its first collective
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize()
        marks.note("group_s")
    trainer = Trainer(model_of(options.mb), args, train_dataset=Blocks(50_000, 16))
    trainer.add_callback(marks)
    if options.progress and os.environ.get("RANK", "0") == "0":
        trainer.add_callback(Progress(options.marks))
    found = get_last_checkpoint(options.out) if options.resume and os.path.isdir(options.out) else None
    marks.note("called_s")
    trainer.train(resume_from_checkpoint=found)


if __name__ == "__main__":
    main()
