"""Sets access control lists (POSIX ACLs) without other programs."""

import errno
import os
import struct
from pathlib import Path

import pytest

_NOBODY = 0xFFFFFFFF
_USER, _NAMED_USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20


def set_list(
    path: Path,
    *,
    user: int,
    group: int,
    mask: int,
    stranger: tuple[int, int],
    other: int = 5,
    is_default: bool = False,
) -> None:
    """Set a list with rights of the owner, the group, one further user and all others; skip the test without lists.

    Args:
        path: the file or folder.
        user: the rights of the owner: 4 to read, 2 to write, 1 to enter.
        group: the rights of the group.
        mask: the most that the group and the further user may have.
        stranger: the number of the further user, and their rights.
        other: the rights of all others.
        is_default: whether new files in the folder get the list.
    """
    entries = [
        (_USER, user, _NOBODY),
        (_NAMED_USER, stranger[1], stranger[0]),
        (_GROUP, group, _NOBODY),
        (_MASK, mask, _NOBODY),
        (_OTHER, other, _NOBODY),
    ]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", kind, rights, who) for kind, rights, who in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{'default' if is_default else 'access'}", data)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no access control lists")
