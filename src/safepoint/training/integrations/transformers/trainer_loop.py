"""The Trainer as the engine sees it; its own `_save_checkpoint` decides what is saved and how files are named."""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import ManifestFacts
from safepoint.training.collective.peers import Peers
from safepoint.training.engine.loop import Write
from safepoint.training.engine.run_facts import RunFacts
from safepoint.training.engine.streams import Streams
from safepoint.training.integrations.deepspeed.frozen import without_frozen_statistics
from safepoint.training.integrations.transformers.own_save import led_by_arguments, saves_in_its_own_way
from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry
from safepoint.training.integrations.transformers.resume.reference_model import ReferenceModel
from safepoint.training.integrations.transformers.resume.trainer_state import RankState
from safepoint.training.integrations.transformers.sharding.final_model import UnplannableError, plan_final_model
from safepoint.training.integrations.transformers.sharding.sharing import splits_weights, strategy_of
from safepoint.training.plain.state.accelerate import innermost, shards_in_place, writes_shards, zero_stage_of

_log = logging.getLogger("safepoint")
_TRAINER_STATE = "trainer_state.json"
_MOMENTS = {"adafactor": 0, "sgd": 0, "lion": 1, "lomo": 0, "rmsprop": 1, "adagrad": 1}
"""How many tensors of a parameter's size an optimizer keeps, by the beginning of its name; two for all others."""


class TrainerLoop:
    """See `engine.framework.Framework`.

    Args:
        trainer: a `transformers.Trainer` in its loop.
        save: its own `_save_checkpoint`, with whatever a subclass adds.
        geometry: the batch arithmetic in force.
        is_regular: whether every step of the run had this geometry.
        rank: of this process.
        rank_state: gives what the Trainer itself does not save, as it is now.
        reference: of TRL's, if there is one that changes.
        base: see `Manifest.base`.
        peers: all ranks.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        save: Callable[[Any, Any], None],
        geometry: BatchGeometry,
        is_regular: bool,
        rank: int,
        rank_state: Callable[[], RankState],
        reference: ReferenceModel,
        base: Mapping[str, str] | None,
        peers: Peers,
    ) -> None:
        self._trainer = trainer
        self._save = save
        self._geometry = geometry
        self._is_regular = is_regular
        self._rank = rank
        self._rank_state = rank_state
        self._reference = reference
        self._base = base
        self._peers = peers
        self.handed_step: int | None = None
        _build_ahead(trainer)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self._trainer.state.global_step)

    @property
    def strategy(self) -> str:
        """How the ranks share the model."""
        return strategy_of(self._trainer)

    @property
    def share(self) -> float:
        """By the way in which the Trainer shares the work."""
        if self.strategy == "deepspeed" or writes_shards(self._trainer.accelerator):
            return 1 / self._geometry.world_size
        return 1.0 if self._trainer.args.should_save else 0.0

    def parameters(self) -> Iterable[torch.Tensor]:
        """Of the model, trained or not; of one with adapters only what is trained, because nothing else is saved."""
        every: Iterable[torch.nn.Parameter] = self._trainer.model.parameters()
        return every if self._base is None else [one for one in every if one.requires_grad]

    def moments_per_parameter(self) -> int:
        """By the name of the optimizer, which does not exist yet."""
        name = str(getattr(self._trainer.args.optim, "value", self._trainer.args.optim))
        return next((count for start, count in _MOMENTS.items() if start in name), 2)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Accelerate wraps it, and DeepSpeed does."""
        return [innermost(self._trainer.optimizer)]

    def manifest_facts(self, run: RunFacts) -> ManifestFacts:
        """With the place in the data, and the results of evaluations at this step."""
        geometry, epoch = self._geometry, float(self._trainer.state.epoch or 0.0)
        return ManifestFacts(
            run_id=run.run_id,
            attempt=run.attempt,
            step=self.step,
            epoch=epoch,
            world_size=geometry.world_size,
            global_batch=geometry.global_batch,
            gradient_accumulation=geometry.accumulation,
            samples_seen=geometry.samples_seen(step=self.step, epoch=epoch, regular=self._is_regular),
            strategy=self.strategy,
            zero_stage=zero_stage_of(self._trainer.accelerator),
            libraries=run.libraries,
            metrics=_metrics_at(self._trainer.state, self.step),
            base=self._base,
        )

    def retention(self) -> tuple[int | None, set[int]]:
        """The script's `save_total_limit`, and the best checkpoint."""
        best = self._trainer.state.best_model_checkpoint
        protected = {step for step in [step_of(Path(best)) if best else None] if step is not None}
        return self._trainer.args.save_total_limit, protected

    def write(self, model: Any, trial: Any) -> Write:
        """How to write this boundary.

        Args:
            model: as for the Trainer's `_save_checkpoint`.
            trial: likewise.
        """

        def write(root: Path, folder: Path) -> None:
            with (
                self._led_to(root),
                led_by_arguments(self._trainer, root),
                shards_in_place(self._trainer.accelerator),
                self._without_the_base(),
            ):
                self._save(model, trial)
            self._finish_trainer_state(folder)
            if writes_shards(self._trainer.accelerator) and self._rank == 0:
                self._write_config(folder)
            if self._trainer.args.should_save:
                self._reference.write(folder)
            self._rank_state().write(folder, self._rank)

        return write

    def _without_the_base(self) -> contextlib.AbstractContextManager[None]:
        """A checkpoint of adapters has nothing of the model below."""
        is_needed = self._base is not None and self._trainer.is_deepspeed_enabled
        return without_frozen_statistics(self._trainer.model_wrapped) if is_needed else contextlib.nullcontext()

    def _write_config(self, folder: Path) -> None:
        """What the Trainer leaves out of a checkpoint in shards, and whoever exports the model needs."""
        model = self._trainer.model
        for part in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if part is not None and self._base is None:
                part.save_pretrained(str(folder))

    def write_again(self) -> Write:
        """As at the end of a step."""
        return self.write(self._trainer.model_wrapped, None)

    def write_final(self, folder: Path) -> Streams | None:
        """In the layout that `from_pretrained` reads, without holding all of it anywhere."""
        trainer = self._trainer
        if saves_in_its_own_way(trainer):
            trainer.save_model(str(folder), _internal_call=True)  # otherwise it is pushed to the Hub, once more
            return None
        if self._base is not None and not splits_weights(trainer):
            trainer.save_model(str(folder), _internal_call=True)  # adapters are small, and PEFT knows what is theirs
            return None
        try:
            return plan_final_model(
                trainer.model,
                folder,
                self._peers,
                lambda state: trainer._save(str(folder), state_dict=state),
                step=self._step_of_final,
            )
        except UnplannableError as error:
            _log.info("the final model is written by the Trainer itself, whatever memory that takes: %s", error)
            trainer.save_model(str(folder), _internal_call=True)
            return None

    @property
    def _step_of_final(self) -> int:
        """The step of the checkpoint that holds what the model is at the end."""
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        step = step_of(Path(best)) if best else None
        return self.step if step is None else step

    @contextlib.contextmanager
    def _led_to(self, root: Path) -> Generator[None]:
        """The Trainer only gets another folder to write to."""
        trainer = self._trainer
        original = trainer.__dict__.get("_get_output_dir")
        best_step = trainer.state.best_global_step
        trainer._get_output_dir = lambda trial=None: str(root)  # pyright: ignore[reportUnknownLambdaType]
        # Without it the Trainer looks for the best checkpoint in the working folder, after a barrier at which
        # healthy ranks would wait for one whose disk is full. `_finish_trainer_state` does what is left out.
        trainer.state.best_global_step = None
        try:
            yield
        finally:
            trainer.state.best_global_step = best_step
            if original is None:
                del trainer._get_output_dir
            else:
                trainer._get_output_dir = original

    def _finish_trainer_state(self, folder: Path) -> None:
        state = self._trainer.state
        if state.best_global_step:
            best = Path(self._trainer.args.output_dir) / f"checkpoint-{state.best_global_step}"
            if state.best_global_step in {state.global_step, self.handed_step} or best.is_dir():
                state.best_model_checkpoint = str(best)
        if (folder / _TRAINER_STATE).exists():
            state.save_to_json(str(folder / _TRAINER_STATE))


def _metrics_at(state: Any, step: int) -> dict[str, float]:
    """What evaluations of this step have found."""
    return {
        name: float(value)
        for entry in state.log_history
        if entry.get("step") == step
        for name, value in entry.items()
        if name.startswith("eval_") and isinstance(value, int | float) and math.isfinite(value)
    }


def _build_ahead(trainer: Any) -> None:
    """Build what transformers would build in the first save, 0.2 s and more that belong before the first step."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        mappings: Any = importlib.import_module("transformers.conversion_mapping")
        mappings.get_checkpoint_conversion_mapping(trainer.model.config.model_type)
