"""Applies the options of `safepoint run` to the script's `TrainingArguments`: they override the script's values."""

import contextlib
import functools
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import UsageError
from safepoint.settings.run_settings import RunSettings, place_output
from safepoint.training.context.outputs import open_checked
from safepoint.training.context.rank_context import RankContext

_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
_log = logging.getLogger("safepoint")


def hook(module: ModuleType, context: RankContext) -> None:
    """Apply the options before each `TrainingArguments` validates itself.

    The script then sees the applied values, for example in `training_args.output_dir`. Transformers' own checks also
    see these values. For example, one check compares `load_best_model_at_end` with the save strategy.
    """
    arguments: Any = module.TrainingArguments
    validate = arguments.__post_init__

    @functools.wraps(validate)
    def post_init(self: Any) -> None:
        if context.place.world_size > 1 and _is_for_cpus(self):
            self.use_cpu = True  # without this, Accelerate treats each rank as an independent process
        apply_settings(self, context)
        if self.output_dir:
            # Check the folder now, to fail with a clear message before the model is loaded.
            OutputFolder(Path(self.output_dir)).check_usable()
        remote = context.outputs.store_of(self.output_dir)
        if remote is not None and context.place.is_first and context.place.restart == 0:
            open_checked(remote, verify_access=context.settings.verify_access)
        validate(self)

    arguments.__post_init__ = post_init
    if context.place.world_size == 1:
        module.logger.addFilter(_is_not_about_launching)


def _is_not_about_launching(record: logging.LogRecord) -> bool:
    """Whether to log a record of the Trainer; False for its advice on how to launch.

    The Trainer logs this advice because Safepoint has made a process group.
    """
    return not record.getMessage().startswith("torch.distributed process group is initialized")


def _is_for_cpus(args: Any) -> bool:
    """Whether the ranks run on CPUs, and each rank has all weights. Such ranks exchange only gradients."""
    is_sharded = args.fsdp or args.deepspeed or any(name in os.environ for name in _SHARDED)
    return not is_sharded and not torch.accelerator.is_available()


def apply_settings(args: Any, context: RankContext) -> None:
    """Set the given options on `args`.

    The context records which object store a folder belongs to. `args` does not record this, because libraries copy
    `args`, and a copy keeps only the name of the folder.

    Raises:
        UsageError: checkpoints are to be saved by time, and the script needs them at fixed steps.
    """
    settings = context.settings
    wanted = settings.output_dir or args.output_dir
    if wanted:
        place = place_output(wanted, local_dir=settings.local_dir)
        if place.remote is not None:
            context.outputs.set_store(place.folder, place.remote)
        args.output_dir = str(place.folder)
        if context.outputs.store_of(place.folder) is None:
            _warn_of_store_options(settings)
    if settings.save_steps is not None:
        args.save_strategy = "steps"
        args.save_steps = settings.save_steps
    elif settings.save_strategy is not None:
        args.save_strategy = settings.save_strategy
    elif settings.save_every is not None:
        if args.load_best_model_at_end:
            raise UsageError(
                "the script sets load_best_model_at_end=True, which needs a checkpoint of each evaluated "
                f"step; --save-every {settings.save_every} saves by time, at other steps",
                hint="omit --save-every, or use --save-steps or --save-strategy instead",
            )
        args.save_strategy = "no"
    if settings.save_total_limit is not None:
        args.save_total_limit = settings.save_total_limit


@functools.cache
def _warn_of_store_options(settings: RunSettings) -> None:
    given = {
        "--local-dir": settings.local_dir,
        "--store-keep": settings.store_keep,
        "--on-upload-failure stop": settings.on_upload_failure == "stop",
    }
    for option in (name for name, value in given.items() if value):
        _log.warning("%s has no effect: checkpoints go to a folder and not to an object store", option)


def finish_settings(args: Any, context: RankContext) -> None:
    """Apply the options once more at `train()`, because scripts change arguments after they were validated.

    Raises:
        UsageError: the script has a setting with which a run cannot be resumed, or which contradicts the options (see
            `apply_settings`).
    """
    from transformers.trainer_utils import SaveStrategy

    apply_settings(args, context)
    args.save_strategy = SaveStrategy(args.save_strategy)
    if args.save_only_model:
        raise UsageError(
            "the script sets save_only_model=True: a checkpoint without optimizer state cannot be resumed",
            hint="remove save_only_model from the script's TrainingArguments; the final model is not affected",
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "the script sets auto_find_batch_size=True: it halves the batch when memory runs out, which changes "
            "the samples of each step; a resume would then continue at a wrong position in the data",
            hint="remove auto_find_batch_size from the script's TrainingArguments, and set a "
            "per_device_train_batch_size that fits",
        )
    if getattr(args, "enable_jit_checkpoint", False):  # below 5.1 transformers has no such argument
        _log.warning("the script's enable_jit_checkpoint=True is ignored: Safepoint saves on SIGTERM instead")
        args.enable_jit_checkpoint = False


def written_once(args: Any) -> contextlib.AbstractContextManager[None]:
    """Set `save_on_each_node` to False during a training, so that one rank writes each file of a checkpoint.

    If the setting were True, each node would write files with the same names but different content, because the
    Trainer records its rank in some files. After the training, the script's value is in effect again. If this value
    is True, each node writes the files that the script itself saves.
    """
    if args.save_on_each_node:
        _log.warning("the script's save_on_each_node=True is ignored for checkpoints: all nodes share one checkpoint")
    return temporarily(args, save_on_each_node=False)
