"""Reads records of CRIU's images: the files and sockets that processes have, and the users of processes.

The field numbers come from CRIU 4.2 (`images/*.proto`).
"""

import os
from pathlib import Path

from safepoint.errors import ImageError
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.transparent.pages.protobuf import Fields, fields_of, records_in

_REGULAR, _ID, _NAME = 3, 1, 6
"""`file_entry.reg`, `reg_file_entry.id` and `reg_file_entry.name`."""
_SOCKET, _ADDRESS, _FOLDER = 16, 11, 14
"""`file_entry.usk`, `unix_sk_entry.name`, and `unix_sk_entry.name_dir`, from which a relative name starts."""
_INOTIFY, _WATCHED, _HANDLE, _PATH = 13, 5, 7, 4
"""`file_entry.ify`, `inotify_file_entry.wd`, `inotify_wd_entry.f_handle` and `fh_entry.path`."""
_ORIGINAL = 1
"""`remap_file_path_entry.orig_id`."""
_THREAD, _CREDENTIALS, _USERS = 5, 10, (1, 3, 5, 7)
"""`core_entry.thread_core`, `thread_core_entry.creds`, and the four users: real, effective, saved, and the user for
files.

The fields between them are groups.
"""


def open_paths(folder: Path) -> list[str]:
    """The paths of all files and folders that the processes have open, mapped or watched, or are in.

    Files that were deleted before the dump are in `made_paths` instead.

    Args:
        folder: the folder of a part, with CRIU's files.

    Raises:
        ImageError: a file of CRIU is malformed.
        OSError: a file cannot be read.
    """
    return [*_regular_paths(folder, are_deleted=False), *_watched_paths(folder)]


def made_paths(folder: Path) -> list[str]:
    """The paths at which CRIU makes something: files that were deleted before the dump, and Unix sockets.

    See `open_paths`.
    """
    found = _regular_paths(folder, are_deleted=True)
    for fields in _entries(folder, _SOCKET):
        address = _as_bytes(fields.get(_ADDRESS, [b""])[0])
        if address and not address.startswith(b"\0"):  # otherwise the socket has no name, or an abstract name
            start = _text(fields.get(_FOLDER, [b""])[0])
            found.append(os.path.join(start, _text(address.rstrip(b"\0"))))
    return found


def _regular_paths(folder: Path, *, are_deleted: bool) -> list[str]:
    deleted = {fields[_ORIGINAL][0] for fields in _messages(folder / "remap-fpath.img") if fields.get(_ORIGINAL)}
    return [
        _text(fields[_NAME][0])
        for fields in _entries(folder, _REGULAR)
        if fields.get(_NAME) and (fields.get(_ID, [0])[0] in deleted) is are_deleted
    ]


def _watched_paths(folder: Path) -> list[str]:
    return [
        _text(path)
        for fields in _entries(folder, _INOTIFY)
        for watched in fields.get(_WATCHED, ())
        for handle in _parsed(watched).get(_HANDLE, ())
        for path in _parsed(handle).get(_PATH, ())
    ]


def _entries(folder: Path, kind: int) -> list[Fields]:
    """The entries for what the processes have open, of one kind. `kind` is a field of `file_entry`."""
    return [_parsed(data) for entry in _messages(folder / "files.img") for data in entry.get(kind, ())]


def users_of(folder: Path) -> set[int]:
    """The users that the processes run as; see `open_paths`."""
    found: set[int] = set()
    for path in folder.glob("core-*.img"):
        for core in _messages(path):
            for thread in core.get(_THREAD, ()):
                for credentials in _parsed(thread).get(_CREDENTIALS, ()):
                    fields = _parsed(credentials)
                    found |= {number for one in _USERS for number in fields.get(one, ()) if isinstance(number, int)}
    return found


def _messages(path: Path) -> list[Fields]:
    """All records of a file; none if there is no such file."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except FileNotFoundError:
        return []
    try:
        return [fields_of(record) for record in records_in(data)]
    except ValueError as error:
        raise ImageError(f"CRIU's {path.name} cannot be read: {error}; nothing was restored") from error


def _parsed(value: int | bytes) -> Fields:
    """The fields of a message in a message.

    Raises:
        ImageError: the message is malformed.
    """
    try:
        return fields_of(_as_bytes(value))
    except ValueError as error:
        raise ImageError(f"CRIU's files cannot be read: {error}; nothing was restored") from error


def _text(value: int | bytes) -> str:
    return os.fsdecode(_as_bytes(value))


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ImageError("CRIU's files have fields of other types than those of CRIU 4.2; nothing was restored")
    return value
