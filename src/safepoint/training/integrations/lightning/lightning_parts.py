"""The state of a Lightning Trainer: what `Trainer.save_checkpoint` writes into its file."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from lightning.pytorch.plugins import CheckpointIO

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.scheduler_steps import most_scheduler_steps
from safepoint.checkpoint.pickles.loading import refusal, states_of
from safepoint.checkpoint.pickles.module_states import checked_modules, unmapped
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.restricted_load import restricted_load
from safepoint.checkpoint.pickles.scaler_states import checked_scalers
from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers
from safepoint.checkpoint.pickles.temporary_attributes import Overrides, temporarily
from safepoint.errors import CheckpointError, ConflictError
from safepoint.foundation.environment import Place
from safepoint.foundation.field_types import MOST_COUNT
from safepoint.training.integrations.lightning.callback_states import (
    check_averages,
    check_state,
    is_of_lightning,
    try_out,
)
from safepoint.training.integrations.lightning.checkpoint_files import with_own_paths
from safepoint.training.integrations.lightning.loop_counts import check_counts, contradiction_of, reached
from safepoint.training.plain.data.position import Position
from safepoint.training.plain.state.parts import Parts

STATE = "lightning.ckpt"
"""The file of a checkpoint that Lightning reads."""
_MODEL = "model.ckpt"
_COPIED = {"state_dict", "optimizer_states"}
"""The parts of a checkpoint that may stay mapped until they are copied; see `restore_states`."""


class LightningParts(Parts):
    """What Lightning's Trainer saves. Models with adapters are saved whole, with their base model.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        place: the position of this rank among the ranks.
    """

    def __init__(self, trainer: Any, place: Place) -> None:
        super().__init__(place)
        self._trainer = trainer
        self._is_mapped = True
        """Whether tensors may be mapped from the file of a checkpoint when it is loaded."""

    def modules(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self._trainer.lightning_module]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the LightningModule."""
        return list(self._trainer.optimizers)

    def write(self, folder: Path) -> None:
        """Write a file that `Trainer.fit(ckpt_path=…)` can also read."""
        self._write(folder / STATE, weights_only=False)

    def write_final(self, folder: Path) -> None:
        """Write a file that `LightningModule.load_from_checkpoint` can read."""
        self._write(folder / _MODEL, weights_only=True)

    def _write(self, path: Path, *, weights_only: bool) -> None:
        # Do not call `Trainer.save_checkpoint`: it ends with a barrier. If the save of one rank fails, the other
        # ranks would wait there for ever.
        with self._direct_io():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only)
            self._trainer.strategy.save_checkpoint(checkpoint, path)

    def load(self, folder: Path) -> None:
        """Do nothing: Lightning has already loaded the state, through `restore`."""

    def contradiction_in(self, folder: Path, manifest: Manifest, position: Position) -> str:
        """See `Parts`: the counts of Lightning's loops, by which Lightning ends a training."""
        path = folder / STATE
        if not path.is_file():
            return ""
        try:
            found = restricted_load(path, map_location="cpu", mmap=True)
        except (OSError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  `restore` reports that the file is invalid, or loads objects in it
            return ""
        return self._contradiction_in(_entry(_entry(found, "loops"), "fit_loop"), manifest, position)

    def check_restored(self, folder: Path, manifest: Manifest | None, position: Position | None) -> None:
        """Check the counts that Lightning's loops have after `restore_states`.

        Lightning has converted states of older releases, so the loops may have other counts than the file.

        Raises:
            CheckpointError: the counts contradict the manifest.
        """
        if manifest is None or position is None:
            return
        fault = self._contradiction_in(self._trainer.fit_loop.state_dict(), manifest, position)
        if fault:
            raise refusal(folder / STATE, fault)

    def _contradiction_in(self, fit_loop: Any, manifest: Manifest, position: Position) -> str:
        trainer = self._trainer
        numbers = [trainer.accumulate_grad_batches]
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                numbers += callback.scheduling.values()
        try:
            check_counts(fit_loop)
            fault = contradiction_of(
                reached(fit_loop),
                manifest,
                position,
                is_automatic=bool(trainer.lightning_module.automatic_optimization),
                accumulation=max(1, min(numbers)),
            )
        except ValueError as error:
            fault = str(error)
        return f"{STATE} is invalid: {fault}" if fault else ""

    def restore(
        self,
        folder: Path,
        weights_only: bool | None,
        restore: Callable[[Path, bool | None], None],
        *,
        name: str = STATE,
    ) -> None:
        """Restore modules and callbacks from a checkpoint. Lightning restores the rest later, in `restore_states`.

        Args:
            folder: the folder of the checkpoint.
            weights_only: see `DirectCheckpointIO.load_checkpoint`.
            restore: Lightning's own method, which takes a file and `weights_only`.
            name: the name of the file in the folder.

        Raises:
            ConflictError: Lightning did not write the checkpoint.
            CheckpointError: the checkpoint is damaged, or contains objects that the script has not allowed.
        """
        path = folder / name
        if name == STATE and not path.exists():
            raise ConflictError(
                f"{folder.name} has no {STATE}: it was not written by a Lightning Trainer; training was not started",
                hint="resume with the script that wrote it, or start from the beginning with --from-scratch",
            )
        # weights_only=False says that the user trusts the file.
        checked = contextlib.nullcontext() if weights_only is False else checked_modules(path)
        self._is_mapped = not self._has_hook()
        with self._direct_io(), self._checked_callbacks(), states_of(path), checked:
            restore(path, weights_only)
            check_counts(self._trainer._checkpoint_connector._loaded_checkpoint.get("loops"))

    def restore_states(self, folder: Path, restore: Callable[[], None], *, name: str = STATE) -> None:
        """Restore loops, optimizers and schedulers.

        Args:
            folder: the checkpoint that `restore` has read.
            restore: Lightning's own method.
            name: the name of the file in the folder.

        Raises:
            CheckpointError: a state is invalid, or the state of an optimizer does not fit.
        """
        path, schedulers = folder / name, [one.scheduler for one in self._trainer.lr_scheduler_configs]
        with (
            states_of(path),
            checked_optimizers(path, *self.optimizers()),
            checked_schedulers(path, *schedulers, most_steps=most_scheduler_steps(folder)),
            checked_scalers(path),
        ):
            self._check_numbers()
            restore()
            for optimizer in self.optimizers() if self._is_mapped else []:
                for parameter, state in optimizer.state.items():
                    optimizer.state[parameter] = unmapped(state)

    def _direct_io(self) -> contextlib.AbstractContextManager[None]:
        return temporarily(self._trainer.strategy, checkpoint_io=DirectCheckpointIO(is_mapped=self._is_mapped))

    def _has_hook(self) -> bool:
        """Whether a hook of the script gets the whole checkpoint. Such a hook may keep tensors of the checkpoint."""
        trainer = self._trainer
        readers = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
        return any(
            "on_load_checkpoint" in vars(kind)
            for reader in readers
            for kind in cast("Any", type(reader)).__mro__
            if not kind.__module__.startswith(("lightning.", "pytorch_lightning."))
        )

    @contextlib.contextmanager
    def _checked_callbacks(self) -> Generator[None]:
        """While the block runs, check the states that Lightning's own callbacks load.

        If a state of ModelCheckpoint names a file that this callback cannot have written, the state is not loaded:
        another person may have written the checkpoint; see `with_own_paths`.

        The state is checked when the callback gets it, and not when the file is read. In between, Lightning renames
        the states of older releases, and moves values into them.
        """

        def load(original: Callable[[Any], None], callback: Any, state_dict: Any) -> None:
            checked = check_state(callback, state_dict, **self._done())
            if isinstance(callback, ModelCheckpoint):
                checked = with_own_paths(callback, checked)
            if checked is not None:
                original(checked)
                try_out(callback)

        def load_averages(original: Callable[..., None], trainer: Any, module: Any, checkpoint: Any) -> None:
            check_averages(checkpoint, **self._done())
            original(trainer, module, checkpoint)

        def load_of(callback: Any) -> Callable[..., None]:
            def loaded(original: Callable[..., None], state_dict: Any) -> None:
                load(original, callback, state_dict)

            return loaded

        with Overrides() as overrides:
            for callback in self._trainer.callbacks:
                if is_of_lightning(callback):
                    overrides.override(callback, "load_state_dict", load_of(callback))
                if isinstance(callback, WeightAveraging):
                    overrides.override(callback, "on_load_checkpoint", load_averages)
            yield

    def _done(self) -> dict[str, int]:
        """The optimizer steps and epochs in the checkpoint that Lightning is loading."""
        loaded: Any = self._trainer._checkpoint_connector._loaded_checkpoint
        loops = _entry(loaded, "loops")
        try:
            check_counts(loops)
            found = reached(_entry(loops, "fit_loop"))
        except ValueError:
            # `check_restored` checks the counts that a training has. Here, they are only limits.
            return {"steps": MOST_COUNT, "epochs": MOST_COUNT}
        return {"steps": found.most_steps, "epochs": found.epochs}

    def _check_numbers(self) -> None:
        """Check that there is a state for each optimizer and scheduler. Otherwise Lightning leaves out some.

        StochasticWeightAveraging replaces the scheduler of the script: then there are more states than schedulers.
        """
        loaded: Any = self._trainer._checkpoint_connector._loaded_checkpoint
        for name, entry, number in (
            ("optimizers", "optimizer_states", len(self.optimizers())),
            ("schedulers", "lr_schedulers", len(self._trainer.lr_scheduler_configs)),
        ):
            states: Any = loaded.get(entry)
            found = len(cast("list[Any]", states)) if isinstance(states, list | tuple) else -1
            if found < number or (name == "optimizers" and found != number):
                raise ValueError(f"{entry!r} is not a list of {number} states, one for each of the script's {name}")


class DirectCheckpointIO(CheckpointIO):
    """Writes and reads files with `torch.save` and `torch.load`, directly to and from a path.

    Lightning's own plugin serializes into memory first. This needs twice the size of the state in memory. Safepoint
    also could not intercept the tensors then, so its keeper (the process that writes snapshots) could not write them.
    See `lightning.pytorch.plugins.CheckpointIO`.

    Args:
        is_mapped: whether the tensors of the model and of the optimizers are mapped from the file. If so, they have
            to be copied later.
    """

    def __init__(self, *, is_mapped: bool = False) -> None:
        self._is_mapped = is_mapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, and make its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file.

        Args:
            path: the path of the file.
            map_location: ignored; Lightning copies what it needs to the device.
            weights_only: the script's argument to Lightning. False allows all objects, and to load an object can run
                code. Other values allow only tensors and plain values.

        Raises:
            CheckpointError: the file is damaged, or it contains objects that `weights_only` does not allow.
        """
        try:
            options: dict[str, Any] = {"map_location": "cpu", "mmap": self._is_mapped}
            if weights_only is False:
                found = torch.load(path, weights_only=False, **options)
            else:
                found = restricted_load(path, **options)
            if not self._is_mapped:
                return found
            return {name: one if name in _COPIED else unmapped(one) for name, one in found.items()}
        except (OSError, MemoryError):
            raise
        except Exception as error:  # hostile content may raise any error
            if weights_only is False:
                raise
            raise CheckpointError(
                f"{Path(path).parent.name} was not loaded: {Path(path).name} is damaged, or it contains Python "
                "objects (such as hyperparameters), whose loading can run code",
                hint="if you trust everyone who can write to that folder, call Trainer.fit(…, weights_only=False), "
                "or allow the classes with torch.serialization.add_safe_globals",
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)


def _entry(values: Any, name: str) -> Any:
    """The entry of a dictionary; None if there is none, or if `values` is not a dictionary."""
    return cast("dict[Any, Any]", values).get(name) if isinstance(values, dict) else None
