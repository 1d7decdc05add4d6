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
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders.ownership import user_name
from safepoint.foundation.temporary_folders.places import may_be_replaced
from safepoint.jobs.local.paths import cache_folder, make_private


def private_cache(name: str) -> Path:
    """A folder in the user's cache that only the user may enter.

    Raises:
        StorageError: the folder cannot be created or written, or another user may have created it.
    """
    return make_private(cache_folder() / name, what="cache folder", variable="XDG_CACHE_HOME")


def provide_workspace(targets: Iterable[str]) -> None:
    """Make sure that each path in `targets`, such as `/workspace/dataset`, leads to the entry `dataset` in a folder
    of the user's cache. This entry is a link, and `point` sets its target.

    Raises:
        UsageError: a path exists and leads to something else, another user could change where it leads, or the link
            from the path to the cache cannot be made.
        StorageError: see `private_cache`.
    """
    folder = private_cache("workspace")
    for target in targets:
        if _way_to_link(target) is not None:
            _check_way(target)
            continue
        workspace = os.path.dirname(target)
        path, content = (
            (target, folder / os.path.basename(target)) if os.path.lexists(workspace) else (workspace, folder)
        )
        if os.path.lexists(path):
            raise UsageError(
                f"{path} exists on this machine, and is no link to {content}; the initializer needs that path, and "
                "nothing was started",
                hint=f"move {path} away. Or leave the initializer out; the script then has to read the data or the "
                "model from where it is stored",
            )
        _check_folder(path)
        try:
            os.symlink(content, path)
        except OSError as error:
            raise UsageError(
                f"the initializer needs the path {path}, which this user cannot create ({error.strerror}); nothing "
                "was started",
                hint=f"make the link: sudo ln -s {content} {path}",
            ) from error


def content_of(target: str) -> str | None:
    """The folder to which `target` leads now; None if there is none."""
    try:
        return os.readlink(_link(target))
    except OSError:
        return None


def point(target: str, content: str) -> None:
    """Make `target` point to the folder `content`, in one step. Call it while no other job uses `target`.

    Raises:
        ConflictError: the link that `provide_workspace` has made was removed or replaced.
        UsageError: another user could change where the link leads.
        StorageError: see `private_cache`.
        OSError: the link cannot be made.
    """
    private_cache("workspace")
    if _way_to_link(target) is None:
        raise ConflictError(
            f"{target} no longer points to {_link(target)}",
            hint=f"sudo ln -sfn {_link(target).parent} {os.path.dirname(target)}; then resume the job",
        )
    _check_way(target)
    link = _link(target)
    # The new link replaces the old link in one step, as `replace_file` does for a file.
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(content)
    new.replace(link)


def _link(target: str) -> Path:
    """The link in the user's cache that stands for `target`."""
    return cache_folder() / "workspace" / os.path.basename(target)


def _way_to_link(target: str) -> str | None:
    """The path by which `target` leads to the link that `point` sets: `target` itself, or its folder. None if neither
    of the two leads there."""
    link, folder = _link(target), os.path.dirname(target)
    if os.path.realpath(folder) == os.path.realpath(link.parent):
        return folder
    return target if os.path.islink(target) and os.readlink(target) == str(link) else None


def _check_way(target: str) -> None:
    """Check that no other user can change where `target` leads.

    Another user may have made the link, with the right content. That user can replace the link later, and so choose
    the data and the model of a job.

    Raises:
        UsageError: another user can change where `target` leads.
    """
    way = _way_to_link(target)
    if way is None:
        return
    owner = os.lstat(way).st_uid
    if is_seeing_all() and owner not in {os.geteuid(), 0}:
        raise UsageError(
            f"{way} belongs to user {user_name(owner)}, who could make it point to other files; nothing was started",
            hint=f"make the link as an administrator: sudo ln -sfn {os.readlink(way)} {way}"
            if os.path.islink(way)
            else f"sudo chown root {way}",
        )
    _check_folder(way)


def _check_folder(path: str) -> None:
    """Raise UsageError if other users can replace the link at `path`. In a container, check nothing, because all
    processes there trust each other."""
    folder = os.path.dirname(path)
    if is_seeing_all() and may_be_replaced(Path(folder)):
        raise UsageError(
            f"other users could replace {path}, because they may write to {folder} or to a folder above it; nothing "
            "was started",
            hint=f"sudo chown root {folder}; sudo chmod go-w {folder}; then make the link in it",
        )
