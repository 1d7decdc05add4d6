"""The Trainer script of `restart_jobs.py`: it notes when each start of a rank passed which phase.

For each start, a rank appends one JSON line to `marks-RANK` in the folder `--marks`, after its first step: its pid,
and times of the monotonic clock, which all processes of the machine share. Nothing in it knows of Safepoint.
"""

import time

BEGUN_S = time.monotonic()
import argparse  # noqa: E402  the first line of a rank's script is what is timed
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

from trainer_program import Blocks, model_of  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

IMPORTED_S = time.monotonic()


class Marks(TrainerCallback):
    """Writes the times of this start when its first step is done."""

    def __init__(self, folder: Path, least_s: float) -> None:
        self._file = folder / f"marks-{os.environ.get('RANK', '0')}"
        self._least_s = least_s
        self._times = {"begun_s": BEGUN_S, "imported_s": IMPORTED_S}
        self._is_written = False
        self._step_began_s = 0.0

    def called(self) -> None:
        self._times["called_s"] = time.monotonic()

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
    options = parser.parse_args()
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
        use_cpu=True,
        dataloader_num_workers=0,
        seed=7,
    )
    trainer = Trainer(model_of(options.mb), args, train_dataset=Blocks(50_000, 16))
    marks = Marks(options.marks, options.step_ms / 1000)
    trainer.add_callback(marks)
    found = get_last_checkpoint(options.out) if options.resume and os.path.isdir(options.out) else None
    marks.called()
    trainer.train(resume_from_checkpoint=found)


if __name__ == "__main__":
    main()
