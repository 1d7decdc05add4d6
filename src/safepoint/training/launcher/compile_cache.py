"""Protects the folders in which PyTorch caches compiled code.

These folders lie in the temporary folder, and other users can predict their names.

PyTorch runs the code that it finds in `torchinductor_USER` and in `USER/torch_vendor_quack_cache`. Another user who
makes such a folder first could stop every training of this user, or run code in it.

So the launcher makes `torchinductor_USER` before any rank needs it. In a sticky folder such as /tmp, no other user
can then replace it. If other users may already have written there, the launcher sets another temporary folder for the
ranks. To set only the variable for PyTorch's cache would not be enough: PyTorch always reads some of its files, such
as precompiled headers, from the temporary folder.
"""

import contextlib
import getpass
import grp
import logging
import os
import re
import stat
from pathlib import Path

from safepoint.errors import UsageError, printable
from safepoint.foundation.environment import home_folder, is_planted_folder, temporary_folder, user_name
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders.temporary import may_be_replaced

_VARIABLE, _VARIABLE_OF_QUACK = "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR"
_TEMPORARY = "TMPDIR"
_MAX_LENGTH = 70
"""The longest path of the temporary folder. Libraries make sockets there, whose paths have at most 107 characters."""
_log = logging.getLogger("safepoint")


def protect_compile_cache(scratch: Path) -> None:
    """Make sure that only this user can have written what the ranks find in PyTorch's folders for compiled code.

    If that is not certain, set TMPDIR and TORCHINDUCTOR_CACHE_DIR to private folders of this user.

    Args:
        scratch: an existing private folder, for the case that the user has no home folder that can be written.
    """
    usual = _usual_folder()
    if why := _take(usual):
        own = os.environ.get(_VARIABLE)
        folder = Path(own) if own else _private_folder(scratch, "torchinductor")
        temporary = _private_folder(scratch, "temporary")
        os.environ[_VARIABLE], os.environ[_TEMPORARY] = str(folder), str(temporary)
        _log.warning(
            "%s %s, and PyTorch would run code that it finds there; so PyTorch caches compiled code in %s, and the "
            "temporary folder of the ranks is %s; delete the first of these folders, or set TMPDIR to a folder of "
            "your own",
            printable(str(usual)),
            why,
            printable(str(folder)),
            printable(str(temporary)),
        )
    cache = os.environ.get(_VARIABLE) or str(usual)
    os.environ.setdefault(_VARIABLE_OF_QUACK, os.path.join(cache, "quack"))


def _usual_folder() -> Path:
    """PyTorch's default folder (`default_cache_dir` in torch/_inductor/runtime/cache_dir_utils.py, PyTorch 2.13)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        user = f"uid_{os.getuid()}"
    return Path(temporary_folder(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _take(folder: Path) -> str:
    """Make a folder, unless it exists.

    Returns:
        Why others may have written there, or may do so later, as the end of a sentence; empty if they cannot.
    """
    # In a container this is not checked, because its processes trust each other.
    if may_be_replaced(folder.parent, by_everyone=True) and is_seeing_all():
        return "is in a folder in which other users can replace it"
    with contextlib.suppress(OSError):  # the folder exists, or no user can make it now, as on a full disk
        folder.mkdir(mode=0o700)
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError:
        return "is a link to a missing folder" if folder.is_symlink() else ""
    for status in (link, found):
        if status.st_uid != os.geteuid():
            return f"belongs to user {user_name(status.st_uid)}"
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid)):
        return "may be written by other users"
    if stat.S_ISLNK(link.st_mode) and is_planted_folder(folder):
        return "leads to a folder of another user"
    return ""


def _is_private_group(number: int) -> bool:
    """Whether a group has the name of this user and no other members.

    Many systems give each user such a group, and let it write to the files that the user makes.
    """
    try:
        group = grp.getgrgid(number)
    except KeyError:
        return False
    user = user_name(os.geteuid())
    return group.gr_name == user and not set(group.gr_mem) - {user}


def _private_folder(scratch: Path, name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, UsageError):
        home = Path(cache if os.path.isabs(cache) else f"{home_folder()}/.cache")
        folder = home / "safepoint" / name
        for missing in (home.parent, home, folder.parent, folder):
            missing.mkdir(exist_ok=True, mode=0o700)
        is_own = folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o022
        is_safe = is_own and not is_planted_folder(folder) and os.access(folder, os.W_OK)
        if is_safe and (name != "temporary" or len(str(folder)) <= _MAX_LENGTH):
            return folder
    folder = scratch / name
    folder.mkdir(mode=0o700)
    return folder
