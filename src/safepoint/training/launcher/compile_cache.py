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
from safepoint.foundation.environment import (
    home_folder,
    is_mounted_by_other,
    is_planted_folder,
    temporary_folder,
    user_name,
)
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders.access_lists import ACCESS_LIST
from safepoint.foundation.shared_folders.temporary import TEMPORARY, may_be_replaced

_VARIABLE, _VARIABLE_OF_QUACK = "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR"
_MAX_LENGTH = 70
"""The longest path of the temporary folder. Libraries make sockets there, whose paths have at most 107 characters."""
_log = logging.getLogger("safepoint")


def protect_compile_cache(scratch: Path) -> None:
    """Make sure that only this user can have written what the ranks find in PyTorch's folders for compiled code.

    Set TMPDIR and TORCHINDUCTOR_CACHE_DIR to the usual folders or, if that is not certain, to private folders of
    this user.

    Args:
        scratch: an existing private folder, for the case that the user has no home folder that can be written.
    """
    usual = _usual_folder()
    temporary = usual.parent
    if why := _take(usual):
        own = os.environ.get(_VARIABLE)
        folder = Path(own) if own else _private_folder(scratch, "torchinductor")
        temporary = _private_folder(scratch, "temporary")
        os.environ[_VARIABLE] = str(folder)
        _log.warning(
            "%s %s, and PyTorch would run code that it finds there; so PyTorch caches compiled code in %s, and the "
            "temporary folder of the ranks is %s; set TMPDIR to a folder of your own, or delete the first of these "
            "folders if it exists",
            printable(str(usual)),
            why,
            printable(str(folder)),
            printable(str(temporary)),
        )
    # The folders are set in any case. Otherwise a rank would look for a temporary folder of its own, and would choose
    # another one if this one is full at that moment (see `keep_temporary_folder`).
    os.environ[TEMPORARY] = str(temporary)
    cache = os.environ.get(_VARIABLE) or str(usual)
    os.environ[_VARIABLE] = cache
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
    if is_mounted_by_other(folder):
        return "is a file system that another user has mounted"
    # In a container this is not checked, because its processes trust each other.
    if _may_be_replaced(folder) and is_seeing_all():
        return "is in a folder in which other users can replace it"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return _why_shared(folder)
    except OSError as error:  # such as a full disk; another user may have filled it, and may free it at any time
        return f"cannot be created now ({error.strerror}), and another user could create it later"
    return ""


def _may_be_replaced(folder: Path) -> bool:
    """Whether everyone can replace `folder` or, if it is a link, the folder to which it leads."""
    return any(may_be_replaced(one.parent, by_everyone=True) for one in (folder, Path(os.path.realpath(folder))))


def _why_shared(folder: Path) -> str:
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError as error:
        is_link = os.path.islink(folder)
        return "is a link to a missing folder" if is_link else f"cannot be examined ({error.strerror})"
    for status in (link, found):
        if status.st_uid != os.geteuid():
            return f"belongs to user {user_name(status.st_uid)}"
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(folder, found.st_gid)):
        return "may be written by other users"
    return "leads to a folder of another user" if stat.S_ISLNK(link.st_mode) and is_planted_folder(folder) else ""


def _is_private(folder: Path, group: int) -> bool:
    """Whether only this user may write to `folder`, if its group may: without other members, and without a list.

    With an access control list, the permissions of the group are those that the list may give to any user.
    """
    with contextlib.suppress(OSError):  # this file system has no lists
        if ACCESS_LIST in os.listxattr(folder):
            return False
    return _is_private_group(group)


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
