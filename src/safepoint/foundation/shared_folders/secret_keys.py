"""A secret key in a file of its own: 32 random bytes that only the owner of the file can read.

The exception is a Secret of Kubernetes that is mounted in a pod with an `fsGroup`: the kubelet gives its files to
this group, with mode 0440. All processes of the pod are in the group, and only containers that mount the Secret see
the files. So the programs that may read the key are those for which it was mounted.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from safepoint.errors import StorageError
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.ownership import open_trusted
from safepoint.foundation.volumes.mounts import file_system_of

KEY_BYTES = 32


def load_or_make_key(path: Path, *, what: str, hint: str) -> bytes:
    """The key in a file; a new one if the file does not exist. The folder must exist.

    Args:
        path: the file.
        what: what the key is, in messages, such as `key of the dashboard`.
        hint: what the reader of a message can do.

    Raises:
        StorageError: the file cannot be read or written, does not contain such a key, or other users can read it.
    """
    if not path.exists():
        # `replace_file` is not used: it would replace the key of another process that was first.
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = no_links.create_file(new, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
                with contextlib.suppress(FileExistsError):  # another process was first; its key is used
                    os.link(new, path)
            finally:
                new.unlink()
        except OSError as error:
            raise StorageError(f"the {what} {path} cannot be made: {error.strerror}", hint=hint) from error
    return load_key(path, what=what, hint=hint)


def load_key(path: Path, *, what: str, hint: str) -> bytes:
    """The key in a file; see `load_or_make_key`.

    Raises:
        StorageError: the file cannot be read, does not contain such a key, or other users can read it.
    """
    try:
        with open_trusted(path) as file:
            key, why = file.read(KEY_BYTES + 1), _why_readable(path, file.fileno())
    except OSError as error:
        raise StorageError(f"the {what} {path} cannot be used: {error.strerror}", hint=hint) from error
    if len(key) != KEY_BYTES:
        raise StorageError(f"{path} is not a {what}, because it does not have {KEY_BYTES} bytes", hint=hint)
    if why is not None:
        raise StorageError(f"the {what} {path} is not used, because {why}", hint=hint)
    return key


def _why_readable(path: Path, opened: int) -> str | None:
    """Why others than the owner of a file may read or write it; None if they may not."""
    status = os.fstat(opened)
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077 or _is_secret_of_pod(path, opened, status):
        return None
    who = "other users" if mode & 0o007 else f"the users of group {status.st_gid}"
    return f"{who} can {'read' if mode & 0o044 else 'change'} it (mode {mode:04o})"


def _is_secret_of_pod(path: Path, opened: int, status: os.stat_result) -> bool:
    """Whether a file is in a Secret of Kubernetes that is mounted for this process, with the `fsGroup` of its pod.

    Such a file belongs to root and to a group of this process, and is in a tmpfs that is mounted for reading only.
    Without these conditions, a key that root gives to a group of a machine would be accepted.
    """
    is_of_group = status.st_uid == 0 and status.st_gid in {os.getegid(), *os.getgroups()}
    if not is_of_group or status.st_mode & 0o037 or not os.fstatvfs(opened).f_flag & os.ST_RDONLY:
        return False
    return file_system_of(Path(os.path.realpath(path)).parent) == "tmpfs"
