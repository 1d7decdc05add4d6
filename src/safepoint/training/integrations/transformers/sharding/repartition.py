"""Loads a checkpoint of DeepSpeed's ZeRO under another number of ranks, or under another stage, in the Trainer.

One rank of each node takes part in copying the verified checkpoint into DeepSpeed's universal layout, in a working
folder. The folder is deleted when all ranks have loaded the copy. If the run is killed before, its next start deletes
the folder. The checkpoint itself is not changed. At the end of the training, the best checkpoint is copied and loaded
in the same way.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.temporary_attributes import Overrides
from safepoint.errors import CheckpointError, ConflictError, ManifestError, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.events.console import ProgressLine
from safepoint.foundation.events.run_events import Repartitioned
from safepoint.foundation.files import delete_tree
from safepoint.foundation.units import format_bytes, plural
from safepoint.training.collective.collective_wait import long_on_all_ranks, on_all_ranks
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.folders import Folders
from safepoint.training.state.data_only import only_data
from safepoint.training.state.strategy import has_same_partitions, writer_of, zero_name, zero_stage_of, zero_stages

_T = TypeVar("_T")
_LOAD = "deepspeed_load_checkpoint"
_HINT = "use the same number of ranks and the same stage, or start from the beginning with --from-scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The contents of a copy. All ranks have the same values."""

    shapes: dict[str, tuple[int, ...]]
    num_groups: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The copy that ranks load in place of the checkpoint `of`. Error messages end with `consequence`."""

    of: Path
    folder: Path
    contents: _Contents
    consequence: str


class Repartition:
    """Copies checkpoints into the universal layout and loads the copies, for one `train()` call.

    All ranks call each method.

    Args:
        context: the context of this rank.
        peers: all ranks.
        trainer: a Trainer that uses DeepSpeed.
        output: the output folder that this rank uses.
        folders: says which ranks share this output folder.
    """

    def __init__(
        self, context: RankContext, peers: Peers, trainer: Any, output: OutputFolder, folders: Folders
    ) -> None:
        self._context = context
        self._peers = peers
        self._trainer = trainer
        self._output = output
        self._folders = folders
        self._copy: _Copy | None = None
        ranks = enumerate(peers.gather((folders.index, context.place.local_rank == 0)))
        self._copying = [rank for rank, (folder, copies) in ranks if copies and folder == folders.index]

    def override(self, overrides: Overrides) -> None:
        """Override the Trainer's loading of a DeepSpeed checkpoint. When the overrides end, delete the copy."""
        overrides.callback(self.close)
        overrides.override(importlib.import_module("transformers.trainer"), _LOAD, self.load)

    def prepare(self, point: ResumePoint) -> None:
        """Copy the checkpoint that the run resumes from, if needed.

        Raises:
            SafepointError: the copy failed; every rank raises the same error.
        """
        if _is_needed(self._trainer, point.manifest):
            self._copy = self._make(point.path, point.manifest, "training was not started")

    def close(self) -> None:
        """Delete the copy, if there is one."""
        if self._copy is not None and self._folders.is_owner:
            delete_tree(self._copy.folder)
        self._copy = None

    # ---- copying --------------------------------------------------------------------------------------------

    def _make(self, path: Path, manifest: Manifest, consequence: str) -> _Copy:
        from safepoint.training.integrations.deepspeed.partitions import Partitions
        from safepoint.training.integrations.deepspeed.universal import Universal

        context, started_s = self._context, clock.monotonic_s()
        stage = zero_stage_of(self._trainer.accelerator) or 0
        folder = self._output.work / f"universal-{checkpoint_name(manifest.step)}"
        on_all_ranks(self._peers, lambda: delete_tree(folder) if self._folders.is_owner else None)
        universal: Universal | None = None

        def plan() -> _Contents | None:
            nonlocal universal
            if context.place.rank not in self._copying:
                return None
            with states_of(path):
                partitions = Partitions(path, ranks=manifest.world_size)
                universal = Universal(partitions, folder, stage=stage)
                universal.check_room()
                return _Contents(
                    shapes=partitions.shapes,
                    num_groups=len(partitions.param_groups),
                    size_bytes=universal.size_bytes,
                )

        def write() -> None:
            if universal is not None:
                watch = ProgressLine("copying").update if context.place.is_first else None
                with states_of(path):
                    universal.write(self._copying.index(context.place.rank), len(self._copying), watch)

        try:
            found = long_on_all_ranks(self._peers, _with(consequence, plan))
            contents = next(one for one in found if one is not None)
            if context.place.is_first:
                context.log.info(
                    "step %s was written by %s, so this run needs a copy in DeepSpeed's universal layout: writing %s "
                    "to %s",
                    manifest.step,
                    writer_of(manifest),
                    format_bytes(contents.size_bytes),
                    folder,
                )
            long_on_all_ranks(self._peers, _with(consequence, write))
        except SafepointError:
            if self._folders.is_owner:
                delete_tree(folder)
            raise
        context.reporter.report(
            Repartitioned(
                step=manifest.step,
                stage_before=" or ".join(map(str, zero_stages(manifest))),
                stage=stage,
                world_size_before=manifest.world_size,
                world_size=context.place.world_size,
                num_weights=len(contents.shapes),
                size_bytes=contents.size_bytes,
                duration_s=round(clock.monotonic_s() - started_s, 3),
            )
        )
        return _Copy(of=path, folder=folder, contents=contents, consequence=consequence)

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, original: Callable[..., Any], engine: Any, checkpoint_path: Any, **kwargs: Any) -> None:
        """Replaces the function by which the Trainer loads a checkpoint of DeepSpeed. If needed, loads the copy."""
        path = Path(checkpoint_path)
        if self._copy is None or self._copy.of != path:
            self._copy_later(path)
        copy = self._copy
        if copy is None:
            from safepoint.training.integrations.deepspeed.loading import with_checked_tag

            with only_data(path, engine), with_checked_tag(engine, path):
                original(engine, checkpoint_path, **kwargs)
        else:
            self._load(engine, copy, lambda: original(engine, str(copy.folder), **kwargs))

    def _load(self, engine: Any, copy: _Copy, load: Callable[[], Any]) -> None:
        from safepoint.training.integrations.deepspeed.loading import check_engine, load_universal

        def check() -> None:
            check_engine(engine, copy.contents.shapes, num_groups=copy.contents.num_groups)

        try:
            on_all_ranks(self._peers, _with(copy.consequence, check))
            load_universal(engine, copy.folder, load)
            self._peers.gather(None)  # wait until all ranks have read the copy
        finally:
            self.close()

    def _copy_later(self, path: Path) -> None:
        """Copy a checkpoint that the Trainer loads at the end of the training (the best checkpoint), if needed."""
        self.close()
        manifest: Manifest | None = None
        if self._context.place.is_first:
            # If another program wrote the checkpoint, or if the checkpoint is damaged, DeepSpeed reports the error
            # while it loads.
            with contextlib.suppress(OSError, ManifestError):
                manifest = read_manifest(path)
        manifest = self._peers.from_first(manifest)
        if manifest is None or not _is_needed(self._trainer, manifest):
            return
        consequence = f"step {manifest.step} was not loaded"

        def check() -> None:
            verdict = verify(path) if self._folders.is_owner else None
            if verdict is not None and not verdict.is_valid:
                raise CheckpointError(f"{path} is not valid: {verdict.faults[0]}")

        long_on_all_ranks(self._peers, _with(consequence, check))
        self._copy = self._make(path, manifest, consequence)


# ---- when a copy is needed, and possible ------------------------------------------------------------------------


def _is_needed(trainer: Any, manifest: Manifest) -> bool:
    stage = zero_stage_of(trainer.accelerator)
    return (
        stage is not None
        and manifest.strategy == "deepspeed"
        and not has_same_partitions(manifest, stage, trainer.args.world_size)
    )


def check_repartition(trainer: Any, manifest: Manifest) -> None:
    """Refuse a change of the number of ranks, or of the stage, that DeepSpeed does not support.

    Args:
        trainer: the Trainer, which is about to train.
        manifest: the manifest of a checkpoint that was written under this run's strategy.

    Raises:
        ConflictError: the change is not supported; the message says why.
    """
    if not _is_needed(trainer, manifest):
        return
    stage = zero_stage_of(trainer.accelerator) or 0
    setting: Callable[[str], Any] = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.get_value
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    reason = None
    if 0 in {stage, *zero_stages(manifest)}:
        reason = "this layout exists for ZeRO's stages 1 to 3 only"
    elif setting("zero_optimization.round_robin_gradients") and stage < 3:
        reason = "with round_robin_gradients, DeepSpeed loads this layout into the wrong weights"
    elif "nvme" in {setting(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")}:
        reason = "DeepSpeed does not load this layout into state that is offloaded to NVMe"
    elif (
        (setting("zero_optimization.mics_shard_size") or 0) > 0
        or (setting("tensor_parallel.autotp_size") or 1) > 1
        or (parallel is not None and parallel.non_data_parallel_size > 1)
    ):
        reason = "this run uses another parallelism besides ZeRO"
    if reason is not None:
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written by {writer_of(manifest)}, and this run uses "
            f"{zero_name((stage,))} on {plural(trainer.args.world_size, 'rank')}. To resume on another number of "
            "ranks or with another stage, Safepoint copies the checkpoint into DeepSpeed's universal layout. In this "
            f"run, such a copy cannot be used: {reason}; training was not started",
            hint=_HINT,
        )


def follow_accumulation(trainer: Any) -> None:
    """Set the adapted gradient accumulation in DeepSpeed's configuration, which still has the script's value."""
    if not trainer.is_deepspeed_enabled:
        return
    args, settings = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    settings.config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if "train_batch_size" in settings.config:
        samples = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
        settings.config["train_batch_size"] = samples
    settings.mismatches.clear()  # some are about the script's value; the next line finds the other mismatches again
    settings.trainer_config_process(args)


def _with(consequence: str, work: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function that calls `work`, and appends `consequence` to the messages of its errors."""

    def do() -> _T:
        try:
            return work()
        except SafepointError as error:
            raise error.with_message(f"{error.message}; {consequence}", hint=error.hint or _HINT) from error

    return do
