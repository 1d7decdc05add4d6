"""Protects the folders in which PyTorch and libraries for GPUs cache compiled code.

These folders lie in the temporary folder, and other users can predict their names:

- PyTorch runs the code that it finds in `torchinductor_USER`;
- flash-attn 4, quack-kernels, PyTorch's copy of these kernels and the CUTLASS DSL run the code that they find in
  subfolders of `USER`. The CUTLASS DSL before 4.3.2 always looks in `/tmp/USER`, even if TMPDIR is set.

Another user who makes such a folder first could make every training of this user fail, or run code in the training.

So the launcher makes these folders before any rank needs them. In a sticky folder such as /tmp, no other user can
then replace them. If other users may already have written there, the launcher sets another temporary folder for the
ranks. The variables for the caches alone would not be enough: PyTorch always reads some files, such as precompiled
headers, from the temporary folder.

A program that cleans the temporary folder, such as systemd-tmpfiles, may delete these folders while the run lasts. So
the launcher checks these folders again before each restart of the ranks.
"""

import contextlib
import getpass
import grp
import logging
import os
import pwd
import re
import stat
from pathlib import Path

from safepoint.errors import UsageError, printable
from safepoint.foundation.configuration import xdg_folder
from safepoint.foundation.environment import temporary_folder
from safepoint.foundation.files import make_private_folder
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders.access_lists import ACCESS_LIST
from safepoint.foundation.shared_folders.ownership import is_planted_folder, user_name
from safepoint.foundation.temporary_folders.places import COMPILED_CODE, TEMPORARY, may_be_replaced
from safepoint.foundation.volumes.mounts import is_mounted_by_other

_CACHES = dict(zip(COMPILED_CODE, ("", "quack", "cutlass", "flash-attention"), strict=True))
"""Environment variable → its folder for compiled code, relative to the folder of the first variable."""
_FIXED = Path("/tmp")
"""The folder in which the CUTLASS DSL before 4.3.2 looks for compiled code. It uses a subfolder with the name of the
user. If the user has no name, it uses `cutlass_python_cache`."""
_WITHOUT_FILES = "CUTE_DSL_DISABLE_FILE_CACHING"
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The environment variables from which libraries take the name of the user."""
_MAX_LENGTH = 70
"""The longest path of the temporary folder. Libraries make sockets there, and the path of a socket has at most 107
characters."""
_log = logging.getLogger("safepoint")


class CompileCache:
    """Where the ranks cache compiled code.

    Args:
        scratch: an existing private folder. It is used if the user's own cache folder is missing, not private or not
            writable, or if the path of the cache folder is too long for a temporary folder.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._chosen = {variable: os.environ.get(variable) for variable in _CACHES}
        """The folders that the user has chosen."""
        self._is_private = False

    def protect(self) -> None:
        """Make sure that the ranks run no compiled code that another user may have written.

        If only this user can have written to the usual folders, set TMPDIR and the variables of the caches to these
        folders. If not, set the variables to private folders of this user. Call this method before each start of the
        ranks.
        """
        if self._is_private:
            return
        usual = _usual_folder()
        temporary, cache = usual.parent, usual
        unsafe = next(
            ((folder, why) for folder in (usual, *_named_folders(usual.parent)) if (why := _take(folder))), None
        )
        if unsafe is not None:
            self._is_private = True
            temporary = _private_folder(self._scratch, "temporary")
            cache = Path(self._chosen[COMPILED_CODE[0]] or _private_folder(self._scratch, "torchinductor"))
            folder, why = unsafe
            _log.warning(
                "%s %s. PyTorch or other libraries would run code that they find there. So the ranks cache compiled "
                "code in %s, and their temporary folder is %s; set TMPDIR to a folder of your own, or delete the "
                "first of these folders if it exists",
                printable(str(folder)),
                why,
                printable(str(cache)),
                printable(str(temporary)),
            )
        # The variables are set even if the usual folders are used. Without TMPDIR, a rank would look for a temporary
        # folder itself. If the usual folder were full at that moment, the rank would choose another folder (see
        # `keep_temporary_folder`).
        os.environ[TEMPORARY] = str(temporary)
        cache = self._chosen[COMPILED_CODE[0]] or str(cache)
        for variable, name in _CACHES.items():
            os.environ[variable] = self._chosen[variable] or os.path.join(cache, name).rstrip("/")
        if any(map(_take, _named_folders(_FIXED) or [_FIXED / "cutlass_python_cache"])):
            os.environ.setdefault(_WITHOUT_FILES, "1")


def _usual_folder() -> Path:
    """PyTorch's default folder (`default_cache_dir` in torch/_inductor/runtime/cache_dir_utils.py, PyTorch 2.13)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        user = f"uid_{os.getuid()}"
    return Path(temporary_folder(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _named_folders(parent: Path) -> list[Path]:
    """The folders in `parent` that libraries name after this user; empty if the user has no name."""
    names = {os.environ.get(variable, "") for variable in _NAMES}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    return [parent / name for name in sorted(names) if name not in {"", ".", ".."} and "/" not in name]


def _take(folder: Path) -> str:
    """Make a folder unless it exists, and check whether other users can write there.

    Returns:
        The end of a sentence: why others may have written there, or could write there later. Empty if they cannot.
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
    """Whether everyone can replace `folder`, or the folder to which a link at `folder` leads."""
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
    """Whether this user is the only user who can write to `folder` through the permissions of its group.

    This is so if the group has no other members, and the folder has no access control list. If there is a list, it
    may let other users write: the group's permissions in the mode of the folder are then only the limit for the list.
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
    with contextlib.suppress(OSError, UsageError):
        folder = xdg_folder("XDG_CACHE_HOME", ".cache") / "safepoint" / name
        make_private_folder(folder)
        is_own = folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o022
        is_safe = is_own and not is_planted_folder(folder) and os.access(folder, os.W_OK)
        if is_safe and (name != "temporary" or len(str(folder)) <= _MAX_LENGTH):
            return folder
    folder = scratch / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
