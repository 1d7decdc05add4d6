"""Provides, on this machine, the folders that a function for a pod expects.

A function for a pod may read and write below `/mnt/kubeflow-checkpoints`, where OpenShift AI mounts a claim (a
volume). On this machine, this path becomes a link to the folder of the claim. Options may mount volumes at further
paths, which must exist. Promises: files and folders that exist at these paths are not changed. If a folder is missing
and cannot be provided, the job is refused. The message has a command that makes a link.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.foundation.files import make_private_folder
from safepoint.jobs.local.paths import cache_folder

POD_FOLDER = "/mnt/kubeflow-checkpoints"
"""The path at which OpenShift AI's pods mount the root of a claim."""
_log = logging.getLogger("safepoint")


def provide_pod_folder(texts: Iterable[str], claim_folder: str | None) -> None:
    """If one of the texts contains `POD_FOLDER`, check that this machine has that folder, or make it as a link.

    Args:
        texts: the program of a job, its arguments, and the values of its variables.
        claim_folder: the folder for the claim of the job's output location; None if the location is not on a claim.

    Raises:
        UsageError: the link cannot be made, the path exists and is another folder, or it is not a folder.
    """
    if not any(POD_FOLDER in text for text in texts):
        return
    if claim_folder is None:
        make_private_folder(cache_folder())
    target = claim_folder or str(cache_folder() / "kubeflow-checkpoints")
    os.makedirs(target, exist_ok=True)
    if not os.path.lexists(POD_FOLDER):
        try:
            os.symlink(target, POD_FOLDER)
        except OSError as error:
            raise UsageError(
                f"the function uses {POD_FOLDER}, where OpenShift AI mounts a claim, and this machine has no such "
                f"folder ({error.strerror}); nothing was started",
                hint=f"make the link: sudo ln -s {target} {POD_FOLDER}",
            ) from error
        _log.info("made a link %s to %s, because the function uses it", POD_FOLDER, target)
    elif claim_folder is not None and (real := os.path.realpath(POD_FOLDER)) != os.path.realpath(target):
        raise UsageError(
            f"the function uses {POD_FOLDER}, which is {real} on this machine; but output_dir is on a claim, "
            f"whose folder in LocalConfig(pvc=…) or the table [pvc] is {target}. Both must be the same folder; "
            "nothing was started",
            hint=f"in LocalConfig(pvc=…), set {real} as the folder of the claim, or: "
            f"sudo ln -sfn {target} {POD_FOLDER}",
        )
    elif not os.path.isdir(POD_FOLDER):
        raise UsageError(f"{POD_FOLDER} is not a folder; nothing was started", hint="remove it, or make it a folder")


def check_mounts(option: Any) -> None:
    """Check that the folders at which an option mounts volumes exist on this machine.

    Raises:
        UsageError: there is no such folder.
    """
    for path in _mount_paths(option):
        if not os.path.isdir(path):
            raise UsageError(
                f"the option {type(option).__name__} mounts a volume at {path}, and this machine has no such folder; "
                "nothing was started",
                hint=f"link that path to a local folder with the volume's files: sudo ln -s /some/folder {path}",
            )


def _mount_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in cast("Mapping[str, Any]", value).items():
            if name in {"mountPath", "mount_path"} and isinstance(item, str):
                yield item
            else:
                yield from _mount_paths(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _mount_paths(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _mount_paths(vars(value))
