"""A secret key in a file of its own: 32 random bytes that only the owner of the file can read."""

import contextlib
import os
import secrets
from pathlib import Path

from safepoint.errors import StorageError
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.ownership import open_trusted

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
            mode, key = os.fstat(file.fileno()).st_mode, file.read(KEY_BYTES + 1)
    except OSError as error:
        raise StorageError(f"the {what} {path} cannot be used: {error.strerror}", hint=hint) from error
    if len(key) != KEY_BYTES or mode & 0o077:
        raise StorageError(f"{path} is not a {what} ({KEY_BYTES} bytes), or other users can read it", hint=hint)
    return key
