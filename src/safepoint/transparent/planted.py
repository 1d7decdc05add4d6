"""Checks whether another user has made files that restored processes will use, where every user may make files.

CRIU opens files by their paths, and compares only their sizes and modes. Files in a folder such as /tmp may have been
deleted since the freeze, by a reboot or by a program that cleans the folder. Then every user can make such a file
again, and so decide what is in the memory of the processes, or which compiled code they run.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safepoint.errors import FreezeError, printable
from safepoint.foundation.environment import is_planted, lies_in_shared_folder
from safepoint.foundation.processes import user_of
from safepoint.foundation.shared_folders.temporary import COMPILED_CODE, TEMPORARY
from safepoint.transparent.criu.records import open_paths

_FOLDERS = (*COMPILED_CODE, TEMPORARY, "HOME")
"""The variables with folders in which programs find code or settings."""
_PROC = Path("/proc")


def refuse_planted_files(folder: Path, users: Collection[int]) -> None:
    """Check the files and folders that CRIU will open for the processes of a part.

    Args:
        folder: the folder of the part, with CRIU's files.
        users: the users of the processes; see `users_of`.

    Raises:
        FreezeError: a file belongs to another user, or another user can make it before CRIU opens it.
        ImageError, OSError: CRIU's files cannot be read.
    """
    for path in open_paths(folder):
        if is_planted(path, users=users):
            raise _of_others(path, "processes have it open")
        if not os.path.lexists(path) and lies_in_shared_folder(path):
            raise FreezeError(
                f"{printable(path)}, which the processes have open, is missing, and other users could make it; "
                "nothing was restored",
                hint="restore it from a backup",
            )


def refuse_planted_folders(pids: Iterable[int], proc: Path = _PROC) -> None:
    """Check the folders that variables of restored processes name; make missing ones that every user could make.

    Args:
        pids: the processes, which do not run yet.
        proc: where the proc file system is mounted.

    Raises:
        FreezeError: a folder belongs to another user.
    """
    for pid in pids:
        user, variables = user_of(pid), _environment(proc / str(pid))
        for path in {variables[name] for name in _FOLDERS if os.path.isabs(variables.get(name, ""))}:
            if user is not None:
                _check_folder(path, user)


def _check_folder(path: str, user: int) -> None:
    if not os.path.lexists(path) and lies_in_shared_folder(path):
        with contextlib.suppress(OSError):  # the program would have to make this folder, and cannot do it either
            for missing in reversed([one for one in Path(path).parents if not os.path.lexists(one)]):
                os.mkdir(missing, 0o755)
            os.mkdir(path, 0o700)
            os.chown(path, user, -1, follow_symlinks=False)
    if is_planted(path, users={user}):
        raise _of_others(path, "the processes find code or settings there")


def _environment(folder: Path) -> Mapping[str, str]:
    try:
        data = (folder / "environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in os.fsdecode(data).split("\0"))
    return {name: text for name, _, text in entries}


def _of_others(path: str, why: str) -> FreezeError:
    return FreezeError(
        f"{printable(path)}, or a folder above it, was made by another user, and {why}; nothing was restored",
        hint="delete it, or if you trust its content, give it to root with `chown`; `safepoint resume` continues a "
        "job from its newest checkpoint",
    )
