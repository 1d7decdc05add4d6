"""Runs the Trainer's own pushes to the Hugging Face Hub, as often as without Safepoint.

The Trainer pushes from inside its save, when the files of a checkpoint are not yet where it looks for them. So the
push waits for the checkpoint, and training waits with it. Only saves that the script requests are pushed: not
those on a signal, on demand, or of a last step that the script would not have saved. Safepoint's own files beside the
checkpoints are never pushed.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from safepoint.training.context.outputs import Outputs

_OURS = (".safepoint/*", "set-aside-*/*")


class HubPush:
    """The pushes of one `train()` call.

    Args:
        trainer: the Trainer, before its training.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_possible = bool(trainer.args.push_to_hub)
        """Whether the script pushes to the Hub."""
        self.is_due = False
        """Whether the last save that was started is to be pushed."""
        self._push: Callable[[str], None] = trainer._push_from_checkpoint

    def push_later(self, original: Callable[[str], None], checkpoint_folder: str) -> None:
        """Override `Trainer._push_from_checkpoint`: only note that a push is due."""
        self.is_due = True

    def push(self, checkpoint: Path) -> None:
        """Push a complete checkpoint, if a push is due."""
        if self.is_due:
            self._push(str(checkpoint))
        self.is_due = False


def hook_uploads(module: ModuleType, outputs: Outputs) -> None:
    """Exclude Safepoint's own files from uploads of an output folder.

    Args:
        module: `huggingface_hub.hf_api`.
        outputs: the output folders of this process.
    """
    api: Any = module.HfApi
    upload = api.upload_folder

    @functools.wraps(upload)
    def upload_folder(self: Any, **kwargs: Any) -> Any:
        folder = kwargs.get("folder_path")
        if folder is not None and outputs.contains(Path(folder)):
            given = kwargs.get("ignore_patterns") or ()
            kwargs["ignore_patterns"] = [*([given] if isinstance(given, str) else given), *_OURS]
        return upload(self, **kwargs)

    api.upload_folder = upload_folder
    vars(module)["upload_folder"] = vars(module)["api"].upload_folder  # the function was bound to the one before
