"""Gives the engine (the code that all training loops share) access to the Trainer, as a `TrainingLoop`.

The Trainer's own `_save_checkpoint` decides which files are saved.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import ManifestFacts
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.training.collective.peers import Peers
from safepoint.training.compatibility.accelerate_releases import innermost
from safepoint.training.compatibility.transformers_releases import build_mappings, writes_safetensors
from safepoint.training.engine.streams import Streams
from safepoint.training.integrations.transformers.own_save import has_own_model_save, redirected_output_dir
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume
from safepoint.training.integrations.transformers.resume.trainer_state import RankState
from safepoint.training.integrations.transformers.sharding.final_model import UnplannableError, plan_final_model
from safepoint.training.integrations.transformers.sharding.trainer_strategy import splits_weights, strategy_of
from safepoint.training.start.claim import Attempt
from safepoint.training.state.strategy import (
    shards_in_place,
    writes_shards,
    zero_stage_of,
)

_log = logging.getLogger("safepoint")
_TRAINER_STATE = "trainer_state.json"
_MOMENTS = {"adafactor": 0, "sgd": 0, "lion": 1, "lomo": 0, "rmsprop": 1, "adagrad": 1}
"""A part of an optimizer's name → how many tensors the optimizer keeps for each parameter. Others keep two."""


class TrainerLoop:
    """See `engine.loop.TrainingLoop`.

    Args:
        trainer: the `transformers.Trainer` whose `train()` is running; its optimizer may not exist yet.
        peers: all ranks.
        resume: how this training started.
        rank_state: returns the current state that the Trainer itself does not save.
        base: identifies the base model of adapters, see `Manifest.base`. None if the whole model is saved.
    """

    def __init__(
        self,
        trainer: Any,
        peers: Peers,
        resume: TrainerResume,
        rank_state: Callable[[], RankState],
        *,
        base: Mapping[str, str] | None,
    ) -> None:
        self._trainer = trainer
        self._peers = peers
        self._resume = resume
        self._rank_state = rank_state
        self._base = base
        self._save: Callable[[Any, Any], None] = trainer._save_checkpoint  # the subclass's method, if it has its own
        self.step_being_saved: int | None = None
        _build_mappings(trainer)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self._trainer.state.global_step)

    @property
    def strategy(self) -> str:
        """See `ManifestFacts`."""
        return strategy_of(self._trainer)

    @property
    def has_callbacks(self) -> bool:
        """See `TrainingLoop` and `SaveCallbacks`."""
        return True

    @property
    def written_fraction(self) -> float:
        """See `TrainingLoop`."""
        if self.strategy == "deepspeed" or writes_shards(self._trainer.accelerator):
            return 1 / self._peers.place.world_size
        return 1.0 if self._trainer.args.should_save else 0.0

    def parameters(self) -> Iterable[torch.Tensor]:
        """The model's parameters. If only adapters are saved, only the trainable parameters.

        A checkpoint of adapters contains almost nothing else.
        """
        every: Iterable[torch.nn.Parameter] = self._trainer.model.parameters()
        return every if self._base is None else [one for one in every if one.requires_grad]

    def moments_per_parameter(self) -> int:
        """See `TrainingLoop`; estimated from the optimizer's name, because the optimizer does not exist yet."""
        name = str(getattr(self._trainer.args.optim, "value", self._trainer.args.optim))
        return next((count for part, count in _MOMENTS.items() if part in name), 2)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The Trainer's optimizer, without the wrappers of Accelerate and DeepSpeed."""
        return [innermost(self._trainer.optimizer)]

    def manifest_facts(self, attempt: Attempt) -> ManifestFacts:
        """See `TrainingLoop`. The facts include the position in the data, and the metrics of this step."""
        geometry, epoch = self._resume.geometry, float(self._trainer.state.epoch or 0.0)
        return ManifestFacts(
            run_id=attempt.run_id,
            attempt=attempt.attempt,
            step=self.step,
            epoch=epoch,
            world_size=geometry.world_size,
            global_batch=geometry.global_batch,
            gradient_accumulation=geometry.accumulation,
            samples_seen=geometry.samples_seen(step=self.step, epoch=epoch, regular=self._resume.is_regular),
            strategy=self.strategy,
            zero_stage=zero_stage_of(self._trainer.accelerator),
            metrics=_metrics_at(self._trainer.state, self.step),
            base=self._base,
        )

    def retention(self) -> tuple[int | None, set[int]]:
        """How many checkpoints the script keeps (`save_total_limit`; None for all), and which steps it never deletes.

        The set contains the step of the best checkpoint. It is empty if there is no best checkpoint.
        """
        best, limit = best_step(self._trainer), self._trainer.args.save_total_limit
        return limit if limit is not None and limit > 0 else None, set() if best is None else {best}

    def write(self, parent: Path, folder: Path) -> None:
        """See `TrainingLoop`."""
        place = self._peers.place
        with (
            self._writing_below(parent),
            redirected_output_dir(self._trainer, parent),
            shards_in_place(self._trainer.accelerator),
            self._without_base(),
        ):
            self._save(self._trainer.model_wrapped, None)
        self._finish_trainer_state(folder)
        if writes_shards(self._trainer.accelerator) and place.is_first:
            self._write_config(folder)
        if self._trainer.args.should_save:
            self._resume.kept.write(folder)
        self._rank_state().write(folder, place.rank)

    def _without_base(self) -> contextlib.AbstractContextManager[None]:
        """Keep the base model out of a checkpoint of adapters.

        DeepSpeed itself leaves out the frozen weights. If they are quantized, they add further entries (scales and
        tables) under their names. DeepSpeed does not leave out these entries. They belong to the base model, and are
        loaded with it.
        """
        if self._base is None or not self._trainer.is_deepspeed_enabled:
            return contextlib.nullcontext()
        engine = self._trainer.model_wrapped
        original = engine.module_state_dict

        def module_state_dict(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
            state = original(*args, exclude_frozen_parameters=exclude_frozen_parameters, **kwargs)
            weights = engine.module.named_parameters() if exclude_frozen_parameters else ()
            frozen = tuple(f"{name}." for name, weight in weights if not weight.requires_grad)
            for entry in [entry for entry in state if entry.startswith(frozen)]:
                del state[entry]
            return state

        return temporarily(engine, module_state_dict=module_state_dict)

    def _write_config(self, folder: Path) -> None:
        """Write the model's configuration, which an export needs. The Trainer writes none in a sharded checkpoint."""
        model = self._trainer.model
        for part in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if part is not None and self._base is None:
                part.save_pretrained(str(folder))

    def write_final(self, folder: Path) -> Streams | None:
        """Plan or write the model in the layout that `from_pretrained` reads; see `TrainingLoop`."""
        trainer = self._trainer
        # Adapters are small. If they are whole on one rank, PEFT writes them.
        is_whole_adapter = self._base is not None and not splits_weights(trainer)
        if has_own_model_save(trainer) or is_whole_adapter or not writes_safetensors(trainer.args):
            return self._save_model(folder)
        try:
            return plan_final_model(
                trainer.model,
                folder,
                self._peers,
                lambda state: trainer._save(str(folder), state_dict=state),
                step=self._step_of_final(),
            )
        except UnplannableError as error:
            _log.info("the final model cannot be streamed (%s); the Trainer gathers and writes it", error)
            return self._save_model(folder)

    def _save_model(self, folder: Path) -> None:
        # Without `_internal_call`, the model would also be pushed to the Hub.
        self._trainer.save_model(str(folder), _internal_call=True)

    def _step_of_final(self) -> int:
        """The step of the checkpoint with the same weights as the final model."""
        step = best_step(self._trainer) if self._trainer.args.load_best_model_at_end else None
        return self.step if step is None else step

    @contextlib.contextmanager
    def _writing_below(self, root: Path) -> Generator[None]:
        """Make the Trainer write below `root`, and hide `best_global_step` from the Trainer."""

        def output_dir(trial: Any = None) -> str:
            return str(root)

        # If `best_global_step` were set, the Trainer would wait at a barrier. If the disk of one rank were full, the
        # other ranks would hang there. The Trainer would also look for the best checkpoint in the working folder.
        # `_finish_trainer_state` sets the best checkpoint instead.
        with (
            temporarily(self._trainer, _get_output_dir=output_dir),
            temporarily(self._trainer.state, best_global_step=None),
        ):
            yield

    def _finish_trainer_state(self, folder: Path) -> None:
        state = self._trainer.state
        if state.best_global_step:
            best = Path(self._trainer.args.output_dir) / f"checkpoint-{state.best_global_step}"
            if state.best_global_step in {state.global_step, self.step_being_saved} or best.is_dir():
                state.best_model_checkpoint = str(best)
        if (folder / _TRAINER_STATE).exists():
            state.save_to_json(str(folder / _TRAINER_STATE))


def best_step(trainer: Any) -> int | None:
    """The step of the best checkpoint so far; None if the Trainer has not chosen one yet."""
    best = trainer.state.best_model_checkpoint
    return step_of(Path(best)) if best else None


def _metrics_at(state: Any, step: int) -> dict[str, float]:
    """The metrics of this step's evaluations."""
    return {
        name: float(value)
        for entry in state.log_history
        if entry.get("step") == step
        for name, value in entry.items()
        if name.startswith("eval_") and isinstance(value, int | float) and math.isfinite(value)
    }


def _build_mappings(trainer: Any) -> None:
    """Make transformers build its mappings of names now, so that the first save does not take 0.2 s longer."""
    with contextlib.suppress(AttributeError):  # another kind of model
        build_mappings(trainer.model.config.model_type)
