"""Provides `/workspace/dataset` and `/workspace/model`, where functions for a pod expect a data set and a model.

On this machine `/workspace` is a link to a folder of the user's cache. In this folder, `dataset` and `model` are
links to what was fetched for the job that runs. If `/workspace` exists already, links with these names are made in
`/workspace` itself. Promises: nothing that exists at these paths is changed.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import ConflictError, UsageError
from safepoint.jobs.local.paths import cache_folder, make_private


def private_cache(name: str) -> Path:
    """A folder in the user's cache that only the user may enter.

    Raises:
        StorageError: the folder cannot be created or written, or another user may have created it.
    """
    return make_private(cache_folder() / name, what="cache folder", variable="XDG_CACHE_HOME")


def provide_workspace(targets: Iterable[str]) -> None:
    """Make sure that the paths `targets`, such as `/workspace/dataset`, lead to the links that `point` sets.

    Raises:
        UsageError: a path exists and leads to something else, or the link cannot be made.
        StorageError: see `private_cache`.
    """
    folder = private_cache("workspace")
    for target in targets:
        if _leads_to_link(target):
            continue
        workspace = os.path.dirname(target)
        path, content = (
            (target, folder / os.path.basename(target)) if os.path.lexists(workspace) else (workspace, folder)
        )
        if os.path.lexists(path):
            raise UsageError(
                f"{path} exists on this machine, and is no link to {content}; the initializer needs that path, and "
                "nothing was started",
                hint=f"move {path} away, or read the data from its own path without an initializer",
            )
        try:
            os.symlink(content, path)
        except OSError as error:
            raise UsageError(
                f"the initializer needs the path {path}, which this user cannot create ({error.strerror}); nothing "
                "was started",
                hint=f"make a link once: sudo ln -s {content} {path}",
            ) from error


def content_of(target: str) -> str | None:
    """The folder to which `target` leads now; None if there is none."""
    try:
        return os.readlink(_link(target))
    except OSError:
        return None


def point(target: str, content: str) -> None:
    """Let `target` lead to the folder `content`, in one step. Call it while no other job uses `target`.

    Raises:
        ConflictError: the link that `provide_workspace` has made was removed or replaced.
        StorageError: see `private_cache`.
        OSError: the link cannot be made.
    """
    private_cache("workspace")
    if not _leads_to_link(target):
        raise ConflictError(
            f"{target} does not lead to {_link(target)} any more",
            hint=f"sudo ln -sfn {_link(target).parent} {os.path.dirname(target)}; then resume the job",
        )
    link = _link(target)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(content)
    new.replace(link)


def _link(target: str) -> Path:
    """The link in the user's cache that stands for `target`."""
    return cache_folder() / "workspace" / os.path.basename(target)


def _leads_to_link(target: str) -> bool:
    link = _link(target)
    if os.path.realpath(os.path.dirname(target)) == os.path.realpath(link.parent):
        return True
    return os.path.islink(target) and os.readlink(target) == str(link)
