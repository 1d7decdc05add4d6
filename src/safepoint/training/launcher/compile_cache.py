"""Keeps PyTorch from using a cache of compiled code in a folder that belongs to another user.

PyTorch uses `torchinductor_USER` in the temporary folder, and runs code that it finds there. Another user who makes
this folder first could stop every training of this user, or run code in it. If the folder belongs to another user,
the ranks use a different folder. In all other cases, the cache stays where it is.
"""

import contextlib
import getpass
import logging
import os
import re
from pathlib import Path

from safepoint.foundation.environment import home_folder, is_planted_folder, temporary_folder, user_name

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger("safepoint")


def protect_compile_cache(scratch: Path) -> None:
    """If PyTorch's folder belongs to another user, set TORCHINDUCTOR_CACHE_DIR to a private folder of this user.

    Args:
        scratch: an existing private folder, for the case that the user has no home folder that can be written.
    """
    usual = _usual_folder()
    try:
        owner = os.lstat(usual).st_uid
    except OSError:  # the folder does not exist yet
        return
    if owner == os.geteuid() or os.environ.get(_VARIABLE):
        return
    folder = _private_folder(scratch)
    os.environ[_VARIABLE] = str(folder)
    _log.warning(
        "%s belongs to user %s, so PyTorch caches compiled code in %s; delete that user's folder, or set %s to a "
        "folder of your own",
        usual,
        user_name(owner),
        folder,
        _VARIABLE,
    )


def _usual_folder() -> Path:
    """PyTorch's default folder (`default_cache_dir` in torch/_inductor/runtime/cache_dir_utils.py, PyTorch 2.13)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        user = f"uid_{os.getuid()}"
    return Path(temporary_folder(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _private_folder(scratch: Path) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(cache if os.path.isabs(cache) else f"{home_folder()}/.cache")
    folder = home / "safepoint" / "torchinductor"
    with contextlib.suppress(OSError):
        for missing in (home.parent, home, folder.parent, folder):
            missing.mkdir(exist_ok=True, mode=0o700)
        is_own = folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o022
        if is_own and not is_planted_folder(folder) and os.access(folder, os.W_OK):
            return folder
    folder = scratch / "torchinductor"
    folder.mkdir(mode=0o700)
    return folder
