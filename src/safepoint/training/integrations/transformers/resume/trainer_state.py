"""The state that an exact resume needs, and that the Trainer does not save: one small file for each rank.

- the random number states at the start of the epoch: the order of the data and the seeds of workers are drawn from
  them, so a resume in the middle of an epoch starts the epoch from the same states;
- the loss accumulated since the last log line, and the totals for the average at the end;
- the work that was due at the step, and that was deferred for a quick exit: an evaluation, the end of an epoch;
- the counts of trainers that are based on the Trainer (`counters`);
- the settings with which the model generates text, because an evaluation may change them;
- the states of generators of the data loader and its samplers, which determine the order of the data;
- the random number states for the batches that were read ahead, and not trained on yet;
- the training time so far.

A `RollbackPoint` holds the same values in memory, and also the values that change within a step. With it, the Trainer
can go back to the last boundary, which is the point between two steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from safepoint.checkpoint.foreign import layout
from safepoint.errors import CheckpointError
from safepoint.foundation.field_types import COUNT, FLAG, NAMED, NUMBER, Kind, check_fields, finite
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import Peers
from safepoint.training.integrations.transformers.resume.counters import (
    CallbackCounters,
    TrainerCounters,
    check_figures,
)
from safepoint.training.integrations.transformers.resume.generation_settings import (
    generation_settings,
    restore_generation_settings,
)
from safepoint.training.integrations.transformers.resume.state_fields import check_trainer_state, check_weights
from safepoint.training.start.copies import ResumePoint
from safepoint.training.state.base_model import frozen_buffers
from safepoint.training.state.plain_values import TENSORS, is_plain, load_plain
from safepoint.training.state.rng import capture_rng, restore_rng

_NAME = "safepoint_state_{rank}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredWork:
    """Work that was due after a step, and that a resume from this step does first.

    Args:
        evaluate: whether the evaluation of this step is due.
        save: whether a save is due after this evaluation. The checkpoint contains the result of the evaluation.
        epoch_end: whether the work that follows the last step of an epoch is due.
        complete: whether the run had decided to end before its last step. If so, no further step is due.
        grad_norm: the gradient norm of the step, for a log line at the epoch's end. The value stays on its device
            until it is written, because a read of the value waits until the device has finished the step.
        learning_rate: the learning rate of the step, for the same log line.
    """

    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    complete: bool = False
    grad_norm: float | torch.Tensor | None = None
    learning_rate: float | None = None

    @classmethod
    def after_step(cls, trainer: Any, grad_norm: Any, learning_rate: Any) -> "DeferredWork":
        """Return the work that is due when a step has ended; all ranks call this method."""
        if hasattr(grad_norm, "full_tensor"):
            grad_norm = grad_norm.full_tensor()  # a collective call under FSDP2, at a point that all ranks reach
        return cls(
            epoch_end=float(trainer.state.epoch).is_integer(),
            grad_norm=grad_norm,
            learning_rate=None if learning_rate is None else float(learning_rate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """The Trainer's sums of the losses.

    Args:
        since_log: the sum of the losses of the steps since the last log line, on this rank.
        total: the sum of the losses of all steps up to the last log line, averaged over ranks.
        last_logged_step: the step of the last log line.
        first_step: the step at which the run started.
    """

    since_log: float
    total: float
    last_logged_step: int
    first_step: int

    @classmethod
    def of(cls, trainer: Any) -> "LossTotals":
        """Read the totals. This call waits until the device has finished the last step."""
        return cls(
            since_log=float(trainer._tr_loss.item()),
            total=float(trainer._total_loss_scalar),
            last_logged_step=int(trainer._globalstep_last_logged),
            first_step=int(getattr(trainer, "_initial_global_step", 0)),  # older releases average over all steps
        )

    def restore(self, trainer: Any) -> None:
        """Set the totals on a Trainer before its loop starts."""
        trainer._tr_loss = torch.full_like(trainer._tr_loss, self.since_log)
        trainer._total_loss_scalar = self.total
        trainer._globalstep_last_logged = self.last_logged_step
        trainer._initial_global_step = self.first_step


_KINDS_OF_WORK: dict[str, Kind] = {
    **dict.fromkeys(("evaluate", "save", "epoch_end", "complete"), FLAG),
    "grad_norm": NUMBER.optional,
    "learning_rate": NUMBER.optional,
}
_KINDS_OF_LOSS: dict[str, Kind] = {
    "since_log": NUMBER,
    "total": NUMBER,
    "last_logged_step": COUNT,
    "first_step": COUNT,
}
_KINDS_OF_COUNTS: dict[str, Kind] = {
    **dict.fromkeys(("numbers", "figures", "cycle"), NAMED),
    "is_training": FLAG,
}
_KINDS: dict[str, Kind] = {
    "epoch_rng": NAMED,
    "elapsed_s": finite(0),
    "generators": TENSORS,
    "asked_accumulation": COUNT,
    "is_irregular": FLAG,
    "rng": NAMED,
    "fetched": NAMED,
    "generation": NAMED,
}
"""Which values the fields of a file may have. All other fields are checked by the code that uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The contents of one rank's file. The names of the fields are the keys in the file.

    Args:
        loss: the totals of the loss so far.
        pending: the work that was due at the step, and that a resume does first.
        epoch_rng: random number states at the start of the running epoch; empty between two epochs.
        elapsed_s: seconds of training so far, over all attempts.
        loader: the data loader's own state; None if the loader keeps no state.
        generators: states of the generators of loader and samplers at the start of the running epoch. Between two
            epochs, these are their current states.
        counted: what the trainer has counted so far.
        asked_accumulation: micro-batches per step that the script requests; the run may use another number. 0 in
            files of older releases.
        is_irregular: whether the run has steps of several sizes. If so, the number of steps does not determine the
            position in the data.
        rng: the current random number states. They are saved here because the Trainer's own file has the states of
            all devices that were visible to the rank, and does not say which device the rank used.
        fetched: the random number states for the batches that were read ahead; see `Fetches.state`.
        generation: the settings with which the model generates text; see `generation_settings`.
    """

    loss: LossTotals
    pending: DeferredWork
    epoch_rng: dict[str, Any]
    elapsed_s: float
    loader: Any = None
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    counted: TrainerCounters = field(default_factory=TrainerCounters)
    asked_accumulation: int = 0
    is_irregular: bool = False
    rng: dict[str, Any] = field(default_factory=capture_rng)
    fetched: dict[str, Any] = field(default_factory=dict[str, Any])
    generation: dict[str, Any] = field(default_factory=dict[str, Any])

    def write(self, folder: Path, rank: int) -> None:
        """Write the file of `rank` into `folder`. This call waits until the device has finished the step.

        The file has plain values and tensors only, so no code runs when it is loaded.
        """
        grad_norm = self.pending.grad_norm
        record = {
            **_values_of(self),
            "loss": _values_of(self.loss),
            "pending": {**_values_of(self.pending), "grad_norm": None if grad_norm is None else float(grad_norm)},
            "counted": {
                "figures": {name: one for name, one in self.counted.figures.items() if _can_be_restored(name, one)},
                "numbers": self.counted.numbers,
                "cycle": self.counted.cycle if is_plain(self.counted.cycle) else {},
                "is_training": self.counted.is_training,
            },
        }
        torch.save(record, folder / _NAME.format(rank=rank))

    @classmethod
    def read(cls, folder: Path, *, rank: int, ranks_before: int, world_size: int) -> "RankState | None":
        """Read the state for `rank` from a verified checkpoint that `ranks_before` ranks wrote.

        If the number of ranks has changed, the losses are averaged, as in the Trainer's log line. The result is None
        if the file does not exist.

        Raises:
            CheckpointError: a file is invalid, or the file of another rank is missing.
        """
        own = folder / _NAME.format(rank=rank % ranks_before)
        if not own.is_file():
            return None
        state = cls._read(own)
        if ranks_before == world_size:
            return state
        losses = [cls._read(folder / _NAME.format(rank=other)).loss.since_log for other in range(ranks_before)]
        loss = replace(state.loss, since_log=sum(losses) / len(losses))
        return replace(state.without_batches(), loss=loss, asked_accumulation=0)

    def without_batches(self) -> "RankState":
        """The state for a run with other batches, without the states and counts that fit only the old batches."""
        return replace(self, loader=None, fetched={}, counted=replace(self.counted, numbers={}, cycle={}))

    @classmethod
    def _read(cls, path: Path) -> "RankState":
        if not path.is_file():
            raise CheckpointError(f"the checkpoint lacks {path}, the state of one of the ranks that wrote it")
        try:
            record: dict[str, Any] = {"rng": {}, **load_plain(path)}
            record["loss"] = LossTotals(**record["loss"])
            record["pending"] = DeferredWork(**record["pending"])
            record["counted"] = TrainerCounters(**record.get("counted", {}))
            state = cls(**{name: record[name] for name in cls.__slots__ if name in record})
            parts = (state, state.loss, state.pending, state.counted)
            for part, kinds in zip(parts, (_KINDS, _KINDS_OF_LOSS, _KINDS_OF_WORK, _KINDS_OF_COUNTS), strict=True):
                check_fields(part, kinds)
            check_figures(state.counted.figures)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path} is not the state of a rank: {error!r}") from error
        return state


def contradiction_in(point: ResumePoint, peers: Peers, *, may_dispatch: bool = False) -> str:
    """Why the ranks cannot continue together from a checkpoint: their files contradict each other.

    The ranks would wait for each other in different calls until a time limit, or train at different positions in the
    data. The first rank also checks the state of the Trainer, and the headers of the files of weights. All ranks call
    this function, and it returns the same on every rank.

    What may differ between ranks is not compared: random numbers, losses, times, the settings with which the model
    generates text, and the numbers that the script's trainer counts. A rank may count its own samples.

    Args:
        point: a verified checkpoint.
        peers: all ranks.
        may_dispatch: whether the first rank may read the data for all ranks. If so, the loaders of the other ranks
            may have read nothing.

    Returns:
        The reason; empty if the files contain no contradiction.

    Raises:
        CheckpointError: the file of a rank, the Trainer's state or a file of weights is invalid.
    """
    place, ranks_before = peers.place, point.manifest.world_size

    def read() -> _Stated | None:
        if place.is_first:
            if (point.path / layout.STATE).is_file():
                check_trainer_state(point.path / layout.STATE, step=point.manifest.step)
            check_weights(point.path, {entry.path for entry in point.manifest.files})
        state = RankState.read(point.path, rank=place.rank, ranks_before=ranks_before, world_size=place.world_size)
        if state is None:
            return None
        _check_steps(state.loss, point.manifest.step)
        return _Stated.of(state)

    found = on_all_ranks(peers, read)
    for rank, one in enumerate(found):
        subject = _difference(found[0], one, may_dispatch=may_dispatch)
        if subject:
            return f"the files of the ranks 0 and {rank} contradict each other about {subject}"
    return ""


def _check_steps(loss: LossTotals, step: int) -> None:
    if not loss.first_step <= loss.last_logged_step <= step:
        raise CheckpointError(
            f"the file of a rank is not of step {step}: it says that the run started at step {loss.first_step}, and "
            f"wrote its last log line at step {loss.last_logged_step}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """What the file of a rank states that decides in which collective calls the rank takes part.

    Args:
        work: the work that is due, and the settings of the steps.
        steps: the step at which the run started, and the step of the last log line.
        is_training: whether the model was in training mode.
        cycle: the micro-batches that a trainer of TRL has done, and how many micro-batches of completions are left;
            None if there is no such number.
        data: whether an epoch had begun, how many generators there are, whether the loader has a state, and whether
            the loader's pass had ended.
        counts: the counts in the loader's state that are not 0, by their names.
    """

    work: tuple[bool | int, ...]
    steps: tuple[int, int]
    is_training: bool
    cycle: tuple[int | None, int | None]
    data: tuple[bool | int, ...]
    counts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, state: RankState) -> "_Stated":
        work, cycle, loader = state.pending, state.counted.cycle, state.loader
        completions: Any = cycle.get("_buffered_inputs")
        fields = cast("dict[Any, Any]", loader if isinstance(loader, dict) else {})
        return cls(
            work=(
                *(work.evaluate, work.save, work.epoch_end, work.complete),
                *(state.asked_accumulation, state.is_irregular),
            ),
            steps=(state.loss.first_step, state.loss.last_logged_step),
            is_training=state.counted.is_training,
            cycle=(
                cycle["_step"] if type(cycle.get("_step")) is int else None,
                len(cast("list[Any]", completions)) if isinstance(completions, list) else None,
            ),
            data=(
                *(bool(state.epoch_rng), len(state.generators), loader is not None),
                bool(fields.get("_iterator_finished")),
            ),
            counts=tuple(sorted(_counts_in(fields))),
        )


_COUNTS = {"_num_yielded", "_sampler_iter_yielded", "samples_yielded", "_snapshot_step", "_steps_since_snapshot"}
_PARTS = {"_snapshot", "_main_snapshot", "_sampler_iter_state", "_index_sampler_state"}
"""Names in the state of torchdata's loader. The states of data sets and of workers may differ between ranks."""
_MOST_PARTS = 4


def _counts_in(fields: dict[Any, Any], *above: str) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if name in _COUNTS and type(value) is int and value:
            yield ".".join((*above, name)), value
        elif name in _PARTS and isinstance(value, dict) and len(above) < _MOST_PARTS:
            yield from _counts_in(cast("dict[Any, Any]", value), *above, name)


def _difference(first: _Stated | None, other: _Stated | None, *, may_dispatch: bool) -> str:
    """What two files contradict each other about; empty if they do not."""
    if first is None or other is None:
        return "" if first is other else _WORK
    pairs = (
        (first.work, other.work, _WORK),
        (first.steps, other.steps, "the last log line"),
        (first.is_training, other.is_training, "the mode of the model"),
        (first.cycle, other.cycle, "the completions that are to be trained on"),
        (first.data, other.data, _POSITION),
    )
    for mine, theirs, subject in pairs:
        if mine != theirs:
            return subject
    return "" if first.counts == other.counts or (may_dispatch and not other.counts) else _POSITION


_WORK = "the work that is due"
_POSITION = "the position in the data"


def _can_be_restored(name: str, figures: Any) -> bool:
    try:
        check_figures({name: figures})
    except ValueError:
        return False
    return is_plain(figures)


def _values_of(one: RankState | LossTotals | DeferredWork) -> dict[str, Any]:
    return {name: getattr(one, name) for name in type(one).__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The position in the data at a step boundary. Within a step, the loader is ahead of this position.

    Args:
        epoch_rng: see `RankState`.
        loader: see `RankState`.
        generators: see `RankState`.
        fetched: see `RankState`.
    """

    epoch_rng: dict[str, Any]
    loader: Any
    generators: list[torch.Tensor]
    fetched: dict[str, Any] = field(default_factory=dict[str, Any])


class RollbackPoint:
    """A step boundary that the Trainer can go back to within the next step.

    Parameters and optimizer state are not copied, because they change only in `optimizer.step`. This object copies
    all counters, and the buffers that a forward pass may change. The buffers of a quantized base model are left out.

    Args:
        trainer: the Trainer, at a step boundary.
        pending: the work that is due at this boundary.
        loader_state: the position in the data.
        with_buffers: whether to copy buffers. An evaluation does not change them.
    """

    def __init__(self, trainer: Any, pending: DeferredWork, loader_state: LoaderState, *, with_buffers: bool) -> None:
        self.step = int(trainer.state.global_step)
        self.pending = pending
        self.loader_state = loader_state
        self._rng = capture_rng()
        self._loss = trainer._tr_loss.clone()
        self._flos = trainer.current_flos
        self._num_tokens = trainer.state.num_input_tokens_seen
        self._num_logged = len(trainer.state.log_history)
        self._callbacks = CallbackCounters(trainer)
        self._counted = TrainerCounters.of(trainer)
        self._generation = generation_settings(trainer.model)
        self._buffers = {name: tensor.clone() for name, tensor in _saved_buffers(trainer)} if with_buffers else {}

    def restore(self, trainer: Any) -> None:
        """Undo the changes of an unfinished step or an unfinished evaluation."""
        restore_rng(self._rng)
        trainer._tr_loss = self._loss
        trainer.current_flos = self._flos
        trainer.state.num_input_tokens_seen = self._num_tokens
        # Drop what an unfinished evaluation on several data sets has logged: the evaluation is repeated as a whole.
        del trainer.state.log_history[self._num_logged :]
        self._callbacks.restore(trainer)
        self._counted.restore(trainer, is_trusted=True)
        restore_generation_settings(trainer.model, self._generation)
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
