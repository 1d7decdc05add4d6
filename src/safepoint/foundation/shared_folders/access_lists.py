"""Access control lists of files (POSIX ACLs), which give rights to further users and groups.

If a file has a list, the group's rights in the mode of the file are the mask of the list: the most rights that the
list can give to the users and groups that it names, and to the file's group. So a change of the mode can give rights
to users whom only the list names.
"""

import os
import struct

ACCESS_LIST = "system.posix_acl_access"
"""The extended attribute with the list of a file."""
_VERSION = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
"""struct posix_acl_xattr_entry: the kind of the entry, its rights, and a user or a group."""
_OWNER, _MASK, _OTHER = 0x01, 0x10, 0x20
_READ, _WRITE = 4, 2


def let_only_writers_read(descriptor: int) -> bool:
    """In the list of an open file, allow reading for each entry that allows writing, and for no other entry.

    The entry of the owner stays as it is.

    Returns:
        Whether the file has a list.

    Raises:
        OSError: the file belongs to another user.
    """
    try:
        found = os.getxattr(descriptor, ACCESS_LIST)
    except OSError:  # there is no list, or this file system has none
        return False
    entries = list(_ENTRY.iter_unpack(found[_VERSION.size :]))
    mask = next((rights for kind, rights, _ in entries if kind == _MASK), _READ | _WRITE)
    changed = found[: _VERSION.size]
    for kind, rights, who in entries:
        may_write = rights & (_WRITE if kind == _OTHER else mask & _WRITE)
        kept = rights if kind == _OWNER else _READ | _WRITE if may_write else 0
        changed += _ENTRY.pack(kind, kept, who)
    if changed != found:
        os.setxattr(descriptor, ACCESS_LIST, changed)
    return True
