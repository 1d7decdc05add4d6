"""Digests of files: XXH3-128, which finds damage at the speed of memory.

It detects accidents, not forgers: somebody who can write the folder can also write the manifest. That nothing
in a checkpoint is executed does not rest on the digest.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import xxhash

ALGORITHM = "xxh3-128"
_CHUNK_BYTES = 4 << 20


def digest_bytes(data: bytes) -> str:
    """The digest of `data`, as written in a manifest: `xxh3-128:<32 hex digits>`."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def digest_file(path: Path, progress: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Read `path` once.

    Args:
        path: a regular file; links are not followed.
        progress: called with the number of bytes read since the last call.

    Returns:
        Size in bytes and digest.

    Raises:
        OSError: unreadable, a link, or not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        hasher = xxhash.xxh3_128()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        size_bytes = 0
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            size_bytes += count
            if progress is not None:
                progress(count)
    return size_bytes, f"{ALGORITHM}:{hasher.hexdigest()}"


__all__ = ["ALGORITHM", "digest_bytes", "digest_file"]
