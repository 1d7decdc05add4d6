"""A Lightning Trainer with everything that a resume can get wrong: dropout, shuffling, accumulation, validation.

Writes `marks-RANK` (a line for each step that begins) into the output folder, and `final-RANK.pt` at the end.
"""

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from safepoint.lightning import SafepointCallback


class Stream(IterableDataset):
    """The same samples in the same order, and no length."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        for sample in self.samples:
            yield (sample,)


class Module(pl.LightningModule):
    """Learns its input; the validation's loss moves a plateau scheduler and an average."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        norm = nn.Identity() if options.no_norm else nn.BatchNorm1d(64)
        self.net = nn.Sequential(nn.Linear(32, 64), norm, nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 32))
        self.register_buffer("validated", torch.zeros(3))
        self.marks = os.open(
            options.out / f"marks-{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_APPEND | os.O_CREAT
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx % 2 == 0:
            os.write(self.marks, f"train {self.global_step}\n".encode())
        time.sleep(self.options.step_ms / 2000)
        if self.options.two_loaders:
            batch, other = batch
            batch = [batch[0][: len(other[0])] + other[0][: len(batch[0])]]
        return (self.net(batch[0]) - batch[0]).square().mean()

    def on_train_epoch_start(self) -> None:
        self.validated[2] += torch.rand(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        os.write(self.marks, b"validate\n")
        time.sleep(self.options.step_ms / 1000)
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.validated[0] += 1
        self.validated[1] += loss
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.options.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        # Asking for the number of steps makes Lightning set its data up early.
        steps = 40 if self.options.stream else int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=30)
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--validate", type=float, default=1.0, help="validate after this part of an epoch")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--two-loaders", action="store_true")
    parser.add_argument("--fit-twice", action="store_true")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--average", action="store_true", help="the weights of the second epoch and of later ones")
    parser.add_argument("--no-norm", action="store_true", help="no BatchNorm: with --average, no additional epoch")
    parser.add_argument("--stop-early", action="store_true", help="at the second validation; a ModelCheckpoint, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    pl.seed_everything(5)
    samples = torch.randn(88, 32)
    data = Stream(samples) if options.stream else TensorDataset(samples)
    shape = {"batch_size": 8 // ranks, "shuffle": not options.stream, "num_workers": options.workers}
    loader: Any = DataLoader(data, **shape)
    if options.two_loaders:
        loader = [loader, DataLoader(TensorDataset(torch.randn(40, 32)), **shape)]
    module = Module(options)
    more: list[Any] = []
    if options.stop_early:
        more.append(EarlyStopping("val_loss", min_delta=1e6, patience=1))
        more.append(ModelCheckpoint(options.out / "best", monitor="val_loss"))
    if options.average:
        more.append(StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=3))
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        accumulate_grad_batches=2,
        val_check_interval=options.validate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SafepointCallback(output_dir=options.out, save_steps=options.save_steps), *more],
    )
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.randn(16, 32)), batch_size=8))
    if options.fit_twice:
        trainer.fit(module, loader)
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    torch.save(
        {
            "model": module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": {name: value for name, value in scheduler.items() if not name.startswith("_")},
            "random": torch.get_rng_state(),
            "averages": [one.state_dict() for one in more if isinstance(one, StochasticWeightAveraging)],
        },
        options.out / f"final-{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    main()
