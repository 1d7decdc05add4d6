"""Whether another user may have made, replaced or written a file or a folder, and so may decide what is in it.

`is_planted` is about the way to a path, in folders such as /tmp. `why_foreign` and `open_trusted` are about a file
with settings, keys or names of programs: they also look at its owner, its mode, its group and its names.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from safepoint.foundation.processes import unknown_users
from safepoint.foundation.volumes.mounts import file_system_of, is_mounted_by_other

_PLANTED = "it, or a folder above it, belongs to another user in a folder that everyone may write to"
_REPLACED = "it was replaced while it was read"
_DEFAULT_ACL = "system.posix_acl_default"
WITHOUT_MODES = ("cifs", "smb", "9p", "vfat", "exfat", "fuse")
"""Types of file systems on which every file has the mode that was chosen for the mount."""


class UntrustedFileError(OSError):
    """A file with keys or settings that must not be used, although it may be readable."""


class PlantedError(UntrustedFileError, PermissionError):
    """Another user may have put the file at its path, or may have written the file."""


def is_planted(path: str | os.PathLike[str], opened: int | None = None, *, users: Collection[int] = ()) -> bool:
    """Whether `path`, or a folder above it, belongs to another user and lies in a folder that everyone may write to.

    The kernel has the same rule for links (`protected_symlinks`). The rule concerns folders with the sticky bit that
    everyone may write to, such as /tmp. In such a folder, a file, folder or link is accepted only if it belongs to
    this user, to root, or to the owner of that folder. The check includes all names that the kernel looks up on the
    way to `path`. In a user namespace, such as that of a container without root, users without a number there look
    alike: such an owner is not accepted.

    Args:
        path: the file or folder. If `opened` is None, it may be missing. A missing file is not planted.
        opened: a descriptor of the file or folder. If `path` names another file by now, the opened file counts as
            planted: another user may have moved it away, and the checks of `path` do not apply to a file that was
            moved.
        users: other users to whom it may belong.
    """
    found = looked_up(path)
    if opened is None:
        return any(is_of_stranger(one, users) for one in found)
    try:
        # The owners are checked before the files are compared: if the owners are accepted, no other user can move the
        # file away.
        return any(_belongs_to_stranger(one, users) for one in found) or not os.path.samestat(
            os.stat(path), os.fstat(opened)
        )
    except OSError:
        return True


def is_planted_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `is_planted` is true for the folder `path`; a folder that cannot be opened counts as planted."""
    if is_planted(path):  # opening it may take for ever
        return True
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return is_planted(path, descriptor)
    finally:
        os.close(descriptor)


def looked_up(path: str | os.PathLike[str]) -> Iterator[str]:
    """The names that the kernel looks up on the way to `path`, in this order. Links are followed.

    The caller checks each name before the next one, because a file system of another user may never answer. `..` in
    the path is not removed first: after a link, `..` leads to the folder above the target of the link.
    """
    seen, whole = set[str](), Path(path).absolute()
    left = [whole, *whole.parents]
    while left:
        one = str(left.pop())
        if one not in seen:
            seen.add(one)
            if os.path.basename(one) != "..":
                yield one
            with contextlib.suppress(OSError):  # it is not a link
                target = Path(os.path.dirname(one), os.readlink(one))
                left += [target, *target.parents]


def is_of_stranger(path: str | os.PathLike[str], users: Collection[int] = ()) -> bool:
    """Whether the rule of `is_planted` refuses `path` itself. The folders above it are not checked."""
    try:
        return _belongs_to_stranger(path, users)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # nothing can have this name, such as a long text among arguments
            return False
        # The owner of a FUSE file system can hide `path` now, and show it later.
        with contextlib.suppress(OSError):
            return _is_shared(os.stat(Path(path).parent))
        return False


def _belongs_to_stranger(path: str | os.PathLike[str], users: Collection[int]) -> bool:
    folder = os.stat(Path(path).parent)
    if _is_shared(folder) and is_mounted_by_other(path):
        return True
    owner = os.lstat(path).st_uid
    return _is_shared(folder) and owner not in {os.geteuid(), 0, folder.st_uid, *users} - unknown_users()


def lies_in_shared_folder(path: str | os.PathLike[str]) -> bool:
    """Whether other users can create a missing `path`: the lowest existing folder above it is like /tmp."""
    lowest = next((one for one in Path(os.path.realpath(path)).parents if os.path.lexists(one)), Path("/"))
    return _is_shared(os.stat(lowest))


def _is_shared(folder: os.stat_result) -> bool:
    """Whether a folder is sticky, and others may write to it."""
    return bool(folder.st_mode & stat.S_ISVTX and folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def open_trusted(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that may contain keys, or names of programs to run. Links are followed.

    The user has chosen the path, so the file may belong to another user. All other rules of `why_foreign` apply: the
    file is refused if everyone can write to it, or if a stranger may have chosen its group, given it its name, or
    planted it.

    Raises:
        PlantedError: another user may have put it there, or may have written it.
        UntrustedFileError: `path` is not a file.
        OSError: the file cannot be opened.
    """
    if is_planted(path):  # opening it may take for ever
        raise PlantedError(errno.EPERM, _PLANTED, os.fspath(path))
    file = open_only_file(path)
    try:
        link, now = os.lstat(path), os.stat(path)
        why = _why_exposed(path, link, now, is_named=True) or (_PLANTED if is_planted(path, file.fileno()) else None)
    except OSError:
        why = _REPLACED
    if why is not None:
        file.close()
        raise PlantedError(errno.EPERM, why, os.fspath(path))
    return file


def open_only_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file. Links are followed; a pipe or a device is refused, because reading it might never end.

    Raises:
        UntrustedFileError: `path` is not a file.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UntrustedFileError(errno.EINVAL, "it is not a file", os.fspath(path))
    return file


def read_trusted(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a file with keys; see `open_trusted`.

    Raises:
        PlantedError: another user may have put it there, or may have written it.
        UntrustedFileError: `path` is not a file, or is larger than `max_bytes`.
        OSError: the file cannot be read.
    """
    with open_trusted(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UntrustedFileError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return data


def why_foreign(path: str | os.PathLike[str], opened: int | None = None) -> str | None:
    """Why another user may decide what is in a file, such as `it belongs to user eve`; None if only this user may.

    A file counts as this user's if

    - the file belongs to this user or to root, and so does the link at `path`, if `path` is a link;
    - not everyone may write to it. A group may, if this user or root chose the group: a folder of a stranger passes
      its group, or the rights in its access control list, on to the files that this user makes there;
    - it has one name, or no stranger may give names to files in its folder. If a stranger gave it a second name (a
      hard link) in a folder of the stranger, the relative paths in the file would lead to the stranger's files;
    - `is_planted` is false.

    Args:
        path: the file.
        opened: a descriptor of the file; None if it cannot be opened.

    Raises:
        OSError: `opened` is None, and there is no file.
    """
    found = os.lstat(path) if opened is None else os.fstat(opened)
    try:
        link, now = os.lstat(path), os.stat(path)
    except OSError:
        if opened is not None:
            return _REPLACED
        link = now = found
    for status in (found, link, now):
        if status.st_uid not in {os.geteuid(), 0} - unknown_users():
            return f"it belongs to user {user_name(status.st_uid)}"
    if why := _why_exposed(path, link, now):
        return why
    if is_planted(path, opened):
        return _PLANTED
    return None if opened is None or os.path.samestat(found, now) else _REPLACED


def _why_exposed(
    path: str | os.PathLike[str], link: os.stat_result, now: os.stat_result, *, is_named: bool = False
) -> str | None:
    """Why strangers may have written a file, or given it this name; None if they cannot.

    Args:
        path: the file.
        link: the status of the link at `path`; if `path` is not a link, the status of the file.
        now: the status of the file. Both come from `path`, not from a descriptor, so that the names are counted
            while the file has the name `path`.
        is_named: whether the user has chosen the path. If so, a mode that lets everyone write is accepted where modes
            cannot be changed, as in a volume of Kubernetes.
    """
    named, real = Path(path).absolute().parent, Path(os.path.realpath(path)).parent
    if not stat.S_ISLNK(now.st_mode) and now.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if now.st_mode & stat.S_IWOTH and not (is_named and _has_mode_of_mount(real)):
            return "everyone may write to it"
        if (stranger := _stranger_of(real)) is not None:
            return f"others may write to it, and it is in a folder of user {user_name(stranger)}"
    for status, folder in ((link, named), (now, real)):
        if status.st_nlink > 1 and _has_open_names(folder):
            return "it has a second name (a hard link), and another user may have given it this name"
    return None


def _has_mode_of_mount(folder: Path) -> bool:
    """Whether the files in `folder` cannot be written, or all have a mode that was chosen for the mount."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY) or file_system_of(folder).startswith(WITHOUT_MODES)


def _has_open_names(folder: Path) -> bool:
    """Whether strangers may give names to files in the folder."""
    found = os.stat(folder)
    if found.st_uid not in {os.geteuid(), 0} or found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and (
        bool(found.st_mode & stat.S_ISVTX) or _stranger_of(folder) is not None
    )


def _stranger_of(folder: Path) -> int | None:
    """The user who has decided which group or access control list new files in `folder` get.

    None if that is this user or root, or if the folder passes nothing on. A folder with the set-group-ID bit passes
    its group on to new files. Every folder passes its default access control list on to new folders in it, too.
    """
    for one in (folder, *folder.parents):
        found = os.stat(one)
        if found.st_uid != os.geteuid():
            return found.st_uid or None
        if not found.st_mode & stat.S_ISGID and not _has_default_acl(one):
            return None
    return None


def _has_default_acl(folder: Path) -> bool:
    try:
        return bool(os.getxattr(folder, _DEFAULT_ACL))
    except OSError:
        return False


def user_name(uid: int) -> str:
    """The name of a user; the number of a user without a name."""
    import pwd  # not at the top, because few commands need it

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
