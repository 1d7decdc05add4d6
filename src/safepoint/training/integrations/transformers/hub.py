"""Keeps the files that Safepoint writes beside the checkpoints out of uploads to the Hugging Face Hub.

Process images are among these files. They hold the memory of processes, with all passwords in it.
"""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from safepoint.checkpoint.remote.extra_files import private_patterns

_OURS = (".safepoint/*", "*/.safepoint/*", "set-aside-*/*")


class OutputFolders(Protocol):
    """The output folders of a process."""

    def contains(self, folder: Path) -> bool:
        """Whether a training of this process writes, or has written, into `folder`."""
        ...


def hook_uploads(module: ModuleType, outputs: OutputFolders) -> None:
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
            kwargs["ignore_patterns"] = [
                *([given] if isinstance(given, str) else given),
                *(*_OURS, *private_patterns(Path(folder))),
            ]
        return upload(self, **kwargs)

    api.upload_folder = upload_folder
    # The module's function `upload_folder` is the original method, which was bound at import. Replace it, too.
    vars(module)["upload_folder"] = vars(module)["api"].upload_folder
