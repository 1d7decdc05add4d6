"""Refuses a restore if the processes would use a file that another user has made in a shared folder, such as /tmp.

CRIU opens files by their paths, and compares only their sizes and modes. Files in a shared folder may have been
deleted since the freeze, by a reboot or by a program that cleans the folder. Then another user can make a file of the
same name, and so decide what is in the memory of the processes, or which code they run. CRIU itself makes the Unix
sockets of the processes, and the files that were already deleted at the freeze. If another user owns the folder of
one of these sockets and files, that user can replace it.

The processes will also use paths that variables and arguments name, such as a cache of compiled code, or the script
that a launcher starts again.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safepoint.errors import FreezeError, printable
from safepoint.foundation.processes import user_of
from safepoint.foundation.shared_folders.ownership import is_planted, lies_in_shared_folder
from safepoint.transparent.criu.records import made_paths, open_paths
from safepoint.transparent.criu.trees import environment_of

_FOLDERS = re.compile(r"\w*(DIR|HOME|PATH|PREFIX|CACHE)|TMP|TEMP")
"""The names of variables with folders, such as TMPDIR, TRITON_CACHE_DIR and PYTHONPATH."""
_SEPARATORS = re.compile("[:=,;\\0]")
_IN_TEXTS = r"\s\"'`|&<>(){}\[\]"
"""Characters between the paths in lists of libraries and options, in JSON, and in commands of a shell."""
_BETWEEN_WORDS, _SEVERAL = re.compile(rf"[:=,;\0{_IN_TEXTS}]+"), re.compile(f"[{_IN_TEXTS}]")
_BEFORE_PATHS = re.compile("(?:-[A-Za-z]|@)(?=[/.])")
"""What an option or a program may have directly before a path, such as `-I/tmp/include` and `@/tmp/arguments`."""
_NUMBER = re.compile("[0-9]{1,10}")
_SUDO = "SUDO_UID"
"""The variable with the user who has become root with sudo. Variables may name a socket or a file of this user."""
_WHY_NAMED = "a variable or an argument of the processes names it"
_PROC = Path("/proc")


def refuse_planted_files(folder: Path, users: Collection[int]) -> list[str]:
    """Check the files and folders that CRIU will open or make for one process tree of an image.

    Args:
        folder: the folder of this tree, with CRIU's files.
        users: the users of the processes; see `users_of`.

    Returns:
        The folders that this function has made, outer folders first. It makes missing folders, because otherwise
        another user could make them.

    Raises:
        FreezeError: a file belongs to another user, or another user can make it before CRIU opens it.
        ImageError, OSError: CRIU's files cannot be read.
    """
    for path in open_paths(folder):
        if is_planted(path, users=users):
            raise _of_others(path, "processes have it open")
        if not os.path.lexists(path) and lies_in_shared_folder(path):
            raise FreezeError(
                f"the processes have {printable(path)} open; the file or folder is missing, and other users "
                "could make it; nothing was restored",
                hint="restore the file or folder from a backup",
            )
    owner = next(iter(users)) if len(users) == 1 else os.geteuid()
    made: list[str] = []
    for place in sorted({os.path.dirname(path) for path in made_paths(folder)}):
        made += _take(place, owner, users, "a file or a socket of the processes is made there")
    return made


def refuse_planted_paths(pids: Iterable[int], proc: Path = _PROC) -> None:
    """Check the files and folders that variables and arguments of restored processes name.

    If a named folder is missing, and another user could make this folder, this function makes it. The folder of a
    named file is treated in the same way.

    Args:
        pids: the processes, which do not run yet.
        proc: where the proc file system is mounted.

    Raises:
        FreezeError: a file or a folder belongs to another user.
    """
    found: set[tuple[str, bool, int, int]] = set()
    for pid in pids:
        user = user_of(pid)
        if user is None:
            continue
        variables = environment_of(pid, proc)
        sudo = variables.get(_SUDO, "") if user == 0 else ""
        other = int(sudo) if _NUMBER.fullmatch(sudo) else user
        current = _folder_of(proc / str(pid))
        for name, text in (*variables.items(), ("", _text_of(proc / str(pid) / "cmdline"))):
            is_folder = _FOLDERS.fullmatch(name) is not None
            for path in _paths_in(text, current if is_folder or not name else None):
                found.add((path, is_folder, user, other))
    for path, is_folder, user, other in sorted(found):
        if is_planted(path, users={user, other}):
            raise _of_others(path, _WHY_NAMED)
        real = os.path.realpath(path)
        if is_folder or not _SEVERAL.search(path):
            _take(real if is_folder else os.path.dirname(real), user, {user, other}, _WHY_NAMED)


def _paths_in(text: str, current: str | None) -> Iterator[str]:
    """The paths that a variable or arguments may name.

    Args:
        text: the value of the variable; or the arguments, separated by NUL.
        current: the folder from which relative paths start; None if only absolute paths are wanted.
    """
    for word in {*_SEPARATORS.split(text), *_BETWEEN_WORDS.split(text)}:
        path = _BEFORE_PATHS.sub("", word, count=1) if _BEFORE_PATHS.match(word) else word
        if os.path.isabs(path):
            yield path
        elif path and current is not None and not path.startswith("-"):
            yield os.path.join(current, path)


def _folder_of(process: Path) -> str | None:
    """The current folder of a process; None if it has ended."""
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return None


def _take(path: str, owner: int, users: Collection[int], why: str) -> list[str]:
    """Refuse a folder that another user has made. Make a missing folder if another user could make it.

    Returns:
        The folders that were made, outer ones first.
    """
    made: list[str] = []
    if is_planted(path, users=users):
        raise _of_others(path, why)
    if not os.path.lexists(path) and lies_in_shared_folder(path):
        with contextlib.suppress(OSError):  # the processes would fail in the same way when they make this folder
            for missing in reversed([path, *(str(one) for one in Path(path).parents if not os.path.lexists(one))]):
                os.mkdir(missing, 0o700 if missing == path else 0o755)
                made.append(missing)
            os.chown(path, owner, -1, follow_symlinks=False)
        if is_planted(path, users=users):  # another user was faster
            raise _of_others(path, why)
    return made


def _text_of(path: Path) -> str:
    """The content of a file in /proc; empty if the process has ended."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _of_others(path: str, why: str) -> FreezeError:
    return FreezeError(
        f"{printable(path)}, or a folder above it, was made by another user, and {why}; nothing was restored",
        hint="delete what the other user has made, or if you trust its content, give it to root with `chown`; "
        "`safepoint resume` continues a job from its newest checkpoint",
    )
