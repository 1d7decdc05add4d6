"""What the Trainer does not save and an exact continuation needs, one small file per rank.

- random number states of the epoch's beginning: samplers and worker seeds are drawn from them, so a resume in
  mid-epoch must begin the epoch from the same ones;
- the loss accumulated since the last log line, and what is needed for the average at the end;
- work that was due at the step but given up for a prompt exit: an evaluation, the end of an epoch;
- what TRL's trainers count for themselves (`counted`);
- states of generators that belong to the data loader and its samplers, by which these draw their order;
- training time so far.

`Moment` is the same in memory, with what changes inside a step: the Trainer can go back to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from safepoint.training.integrations.transformers.resume.stateful_callbacks import CallbackCounts
from safepoint.training.integrations.transformers.resume.trl_counters import TrlCounters
from safepoint.training.state.base_model import frozen_buffers
from safepoint.training.state.rng import capture_rng, restore_rng

_NAME = "safepoint_state_{rank}.pt"
_PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What was due after the step and is done first on resume.

    Args:
        evaluate: the evaluation of this step.
        save: the save that follows this evaluation, because its result belongs into the checkpoint.
        epoch_end: everything that follows the last step of an epoch.
        complete: training ended before its last step; no further one is due.
        grad_norm: of the step, for a log line at the epoch's end; on its device until it is written, because reading
            it waits for the step.
        learning_rate: of the step, likewise.
    """

    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    complete: bool = False
    grad_norm: float | torch.Tensor | None = None
    learning_rate: float | None = None

    @classmethod
    def after_step(cls, trainer: Any, grad_norm: Any, learning_rate: Any) -> "Pending":
        """What is due when a step has ended and nothing was left for later; all ranks call it."""
        if hasattr(grad_norm, "full_tensor"):
            grad_norm = grad_norm.full_tensor()  # of FSDP2's parts now, when no rank waits in vain for another one
        return cls(
            epoch_end=float(trainer.state.epoch).is_integer(),
            grad_norm=grad_norm,
            learning_rate=None if learning_rate is None else float(learning_rate),
        )

    def record(self) -> dict[str, Any]:
        """Plain values; waits for the device to finish the step."""
        values = {name: getattr(self, name) for name in Pending.__slots__}
        return {**values, "grad_norm": None if self.grad_norm is None else float(self.grad_norm)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSoFar:
    """The Trainer's loss bookkeeping.

    Args:
        since_log: sum over the steps since the last log line, on this rank.
        total: sum over all steps up to it, averaged over ranks.
        last_logged_step: the step of that line.
        first_step: the step at which the run began.
    """

    since_log: float
    total: float
    last_logged_step: int
    first_step: int

    @classmethod
    def of(cls, trainer: Any) -> "LossSoFar":
        """Read it; waits for the device to finish the last step."""
        return cls(
            since_log=float(trainer._tr_loss.item()),
            total=float(trainer._total_loss_scalar),
            last_logged_step=int(trainer._globalstep_last_logged),
            first_step=int(trainer._initial_global_step),
        )

    def restore(self, trainer: Any) -> None:
        """Give it to a Trainer whose loop is about to begin."""
        trainer._tr_loss = torch.full_like(trainer._tr_loss, self.since_log)
        trainer._total_loss_scalar = self.total
        trainer._globalstep_last_logged = self.last_logged_step
        trainer._initial_global_step = self.first_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The contents of one rank's file.

    Args:
        loss: see `LossSoFar`.
        pending: see `Pending`.
        epoch_rng: random number states when the running epoch began; empty at an epoch's boundary.
        elapsed_s: seconds of training up to here, over all attempts.
        loader: the data loader's own state, where it has one.
        generators: states of the generators of loader and samplers: when the running epoch began, or now at an
            epoch's boundary.
        counted: see `Counted`.
        asked_accumulation: micro-batches per step that the script asks for, which may not be those in force; 0 when
            that was not saved.
        is_irregular: whether the run has steps of several sizes, so that their number does not tell the place in the
            data.
        rng: random number states of now. The Trainer's own file has those of all devices that the rank saw, and does
            not say which is the rank's.
    """

    loss: LossSoFar
    pending: Pending
    epoch_rng: dict[str, Any]
    elapsed_s: float
    loader: Any = None
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    counted: TrlCounters = field(default_factory=TrlCounters)
    asked_accumulation: int = 0
    is_irregular: bool = False
    rng: dict[str, Any] = field(default_factory=capture_rng)

    def write(self, folder: Path, rank: int) -> None:
        """Write the file of `rank` into `folder`; plain values and tensors only, so that loading runs no code."""
        record = {
            "loss": {name: getattr(self.loss, name) for name in LossSoFar.__slots__},
            "pending": self.pending.record(),
            "epoch_rng": self.epoch_rng,
            "elapsed_s": self.elapsed_s,
            "loader": self.loader,
            "generators": self.generators,
            "counted": {
                "figures": _plain_ones(self.counted.figures),
                "cycle": self.counted.cycle if is_plain(self.counted.cycle) else {},
                "is_training": self.counted.is_training,
            },
            "asked_accumulation": self.asked_accumulation,
            "is_irregular": self.is_irregular,
            "rng": self.rng,
        }
        torch.save(record, folder / _NAME.format(rank=rank))

    @classmethod
    def read(cls, folder: Path, *, rank: int, ranks_before: int, world_size: int) -> "RankState | None":
        """Read the state for `rank` from a verified checkpoint that `ranks_before` ranks wrote.

        With another number of ranks the losses are averaged, as the log line does. None when the file is not
        there.
        """
        own = folder / _NAME.format(rank=rank % ranks_before)
        if not own.is_file():
            return None
        state = cls._read(own)
        if ranks_before == world_size:
            return state
        losses = [cls._read(folder / _NAME.format(rank=other)).loss.since_log for other in range(ranks_before)]
        loss = LossSoFar(
            since_log=sum(losses) / len(losses),
            total=state.loss.total,
            last_logged_step=state.loss.last_logged_step,
            first_step=state.loss.first_step,
        )
        return cls(
            loss=loss,
            pending=state.pending,
            epoch_rng=state.epoch_rng,
            elapsed_s=state.elapsed_s,
            generators=state.generators,
            counted=TrlCounters(figures=state.counted.figures, is_training=state.counted.is_training),
            is_irregular=state.is_irregular,
            rng=state.rng,
        )

    @classmethod
    def _read(cls, path: Path) -> "RankState":
        record = load_plain(path)
        return cls(
            loss=LossSoFar(**record["loss"]),
            pending=Pending(**record["pending"]),
            epoch_rng=record["epoch_rng"],
            elapsed_s=record["elapsed_s"],
            loader=record.get("loader"),
            generators=record.get("generators", []),
            counted=TrlCounters(**record.get("counted", {})),
            asked_accumulation=record.get("asked_accumulation", 0),
            is_irregular=record.get("is_irregular", False),
            rng=record.get("rng", {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place in the data at a step boundary; while a step goes on, the loader is ahead of it.

    Args:
        epoch_rng: see `RankState`.
        loader: likewise.
        generators: likewise.
    """

    epoch_rng: dict[str, Any]
    loader: Any
    generators: list[torch.Tensor]


class Moment:
    """A step boundary that the Trainer can go back to within the next step.

    Parameters and optimizer state change in `optimizer.step` only and are not copied. Buffers that a forward
    pass may change are (a quantized model below adapters is not copied), and so is everything that counts.

    Args:
        trainer: at a step boundary.
        pending: what is due at it.
        place: in the data.
        with_buffers: whether forward passes will follow before anybody goes back.
    """

    def __init__(self, trainer: Any, pending: Pending, place: Place, *, with_buffers: bool) -> None:
        self.step = int(trainer.state.global_step)
        self.pending = pending
        self.place = place
        self._rng = capture_rng()
        self._loss = trainer._tr_loss.clone()
        self._flos = trainer.current_flos
        self._num_tokens = trainer.state.num_input_tokens_seen
        self._num_logged = len(trainer.state.log_history)
        self._callbacks = CallbackCounts(trainer)
        self._counted = TrlCounters.of(trainer)
        self._buffers = {name: tensor.clone() for name, tensor in _saved_buffers(trainer)} if with_buffers else {}

    def go_back(self, trainer: Any) -> None:
        """Undo what part of a step, or an evaluation, has changed."""
        restore_rng(self._rng)
        trainer._tr_loss = self._loss
        trainer.current_flos = self._flos
        trainer.state.num_input_tokens_seen = self._num_tokens
        # Of several evaluation sets, those that were done before it was left are evaluated again.
        del trainer.state.log_history[self._num_logged :]
        self._callbacks.restore(trainer)
        self._counted.restore(trainer)
        with torch.no_grad():
            for name, tensor in _saved_buffers(trainer):
                if name in self._buffers:
                    tensor.copy_(self._buffers[name])


def _saved_buffers(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in trainer.model.named_modules():
        left_out = module._non_persistent_buffers_set | frozen_buffers(module)
        for name, tensor in module.named_buffers(recurse=False):
            if name not in left_out:
                yield f"{prefix}.{name}", tensor


def is_plain(value: Any) -> bool:
    """Whether `load_plain` can read it back."""
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(type(key) in {str, int} for key in mapping) and all(map(is_plain, mapping.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, cast("list[Any]", value)))
    return type(value) in _PLAIN


def _plain_ones(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_plain(value)}


def load_plain(path: Path) -> dict[str, Any]:
    """Read a file of plain values, tensors and numpy arrays; anything else in it is refused, never run."""
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return torch.load(path, map_location="cpu", weights_only=True)
