"""The options of `safepoint run` take the place of the script's own settings, where they were given."""

import contextlib
import functools
import logging
import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import UsageError
from safepoint.settings.output_place import place_output
from safepoint.settings.run_settings import RunSettings
from safepoint.training.context.rank_context import RankContext
from safepoint.training.context.store_access import open_tried

_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
_log = logging.getLogger("safepoint")


def hook(module: ModuleType, context: RankContext) -> None:
    """Apply the options before each `TrainingArguments` validates itself.

    The script then sees them everywhere, also in `training_args.output_dir`, and transformers' own checks
    (such as `load_best_model_at_end` against the save strategy) judge what will really happen.
    """
    arguments: Any = module.TrainingArguments
    validate = arguments.__post_init__

    @functools.wraps(validate)
    def post_init(self: Any) -> None:
        if context.place.world_size > 1 and _is_for_cpus(self):
            self.use_cpu = True  # or Accelerate takes each rank for a process of its own
        apply_settings(self, context)
        if self.output_dir:
            # Before the Trainer stumbles over it with a traceback, and before a model is loaded for nothing.
            OutputFolder(Path(self.output_dir)).check_usable()
        remote = context.outputs.store_of(self.output_dir)
        if remote is not None and context.place.is_first and context.place.restart == 0:
            open_tried(remote, verify_access=context.settings.verify_access)
        validate(self)

    arguments.__post_init__ = post_init
    if context.place.world_size == 1:
        module.logger.addFilter(_is_not_about_launching)


def _is_not_about_launching(record: logging.LogRecord) -> bool:
    """A single rank without a device would get a message about its launch, because there is a process group: ours."""
    return not record.getMessage().startswith("torch.distributed process group is initialized")


def _is_for_cpus(args: Any) -> bool:
    """Whether ranks share no more than gradients, on a machine that has nothing but processors."""
    is_sharded = args.fsdp or args.deepspeed or any(name in os.environ for name in _SHARDED)
    return not is_sharded and not torch.accelerator.is_available()


def apply_settings(args: Any, context: RankContext) -> None:
    """Set what the options say on `args`; an option that was left out changes nothing.

    The context keeps the object store of each folder: libraries copy arguments, and the copy names the folder only.
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
                "the script sets load_best_model_at_end=True: its best model is looked for among checkpoints of the "
                f"steps that are evaluated, and --save-every {settings.save_every} saves others",
                hint="use --save-steps or --save-strategy, or leave them to the script",
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
        UsageError: the script asks for something that cannot be resumed.
    """
    settings = context.settings
    apply_settings(args, context)
    if any(one is not None for one in (settings.save_steps, settings.save_strategy, settings.save_every)):
        from transformers.trainer_utils import SaveStrategy

        args.save_strategy = SaveStrategy(args.save_strategy)
    if args.save_only_model:
        raise UsageError(
            "the script sets save_only_model=True: such a checkpoint has no optimizer state and cannot be resumed",
            hint="remove it from the script's TrainingArguments; the final model is not affected",
        )
    if getattr(args, "auto_find_batch_size", False):
        raise UsageError(
            "the script sets auto_find_batch_size=True: a batch that is halved when memory runs out changes the "
            "samples of each step, and a resume would go on at another place in the data",
            hint="remove it from the script's TrainingArguments, and set a per_device_train_batch_size that fits",
        )
    if getattr(args, "enable_jit_checkpoint", False):
        _log.warning("the script's enable_jit_checkpoint=True is ignored: Safepoint answers the signal instead")
        args.enable_jit_checkpoint = False


@contextlib.contextmanager
def saved_once(args: Any) -> Generator[None]:
    """For the time of a training every file of a checkpoint is written by one rank, and all nodes go on from it.

    Nodes that write the same files would write different content: what the Trainer saves names the rank. What the
    script saves by itself afterwards is on each node, as it asked.
    """
    if not getattr(args, "save_on_each_node", False):
        yield
        return
    _log.warning("the script's save_on_each_node=True does not hold for checkpoints: each is one, for all nodes")
    args.save_on_each_node = False
    try:
        yield
    finally:
        args.save_on_each_node = True
