"""Reads files that other users may have written: regular files only, and JSON of bounded size and depth.

The values of a JSON text are counted before the text is parsed, because a small text can fill the memory: an empty
list takes three bytes of text, but 64 bytes of memory.
"""

import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

MAX_BYTES = 1 << 20
_MAX_VALUES = 1 << 22
"""The most values in one JSON text. That many take about 0.5 GB, and they are enough for the header of a safetensors
file with 500,000 tensors."""
_STRING_OR_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([,\[{])', re.DOTALL)
_MAX_DEPTH = 128
_MAX_COPIED_BYTES = 256 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def parse_object(
    data: bytes | str, *, max_bytes: int = MAX_BYTES, constant: Callable[[str], object] = _refuse
) -> dict[str, Any]:
    """One JSON object without duplicate names.

    Args:
        data: the JSON text, or its bytes in UTF-8.
        max_bytes: longer data is refused before it is parsed.
        constant: called with `NaN`, `Infinity` or `-Infinity`; returns the value to use. The default refuses these
            words.

    Raises:
        ValueError: `data` is not such an object, is too large, has too many values, or is nested too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return record

    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    if len(data) > _MAX_VALUES and has_more_values(data, _MAX_VALUES):
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        record = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError as error:
        raise ValueError("it is not JSON: it is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  the data is invalid, not the call
    level: list[Any] = [record]
    for _ in range(_MAX_DEPTH):
        contents: list[Any] = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for content in contents for item in content if isinstance(item, dict | list)]
        if not level:
            return cast("dict[str, Any]", record)
    raise ValueError(f"it has objects or lists nested deeper than {_MAX_DEPTH} levels")


def has_more_values(data: bytes | str, most: int) -> bool:
    """Whether a JSON text has more than about `most` values. None of them is made.

    What is counted are commas, lists and objects, except for those inside of strings. The text need not be valid.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if sum(map(text.count, (b",", b"[", b"{"))) <= most:  # inside of strings too; this is much faster
        return False
    count = 0
    for match in _STRING_OR_VALUE.finditer(text):
        count += match.lastindex is not None
        if count > most:
            return True
    return False


def read_object(
    path: Path, *, max_bytes: int = MAX_BYTES, constant: Callable[[str], object] = _refuse
) -> dict[str, Any]:
    """The object in a file; see `read_regular` and `parse_object`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain such an object.
    """
    return parse_object(read_regular(path, max_bytes), max_bytes=max_bytes, constant=constant)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a file: all of it, or the first `max_bytes` + 1 bytes if it is longer than `max_bytes`.

    Raises:
        OSError: the file cannot be read, is a link, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read(max_bytes + 1)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; see `open_file`."""
    return os.fdopen(open_file(path), "rb")


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. A link is refused, because it could lead to a file outside the folder of `path`.

    A pipe is refused too, without waiting for the process at its other end.

    If `flags` allow writing and the file has a second name (a hard link, as in a backup by `cp -al`), a copy replaces
    the file at `path` first. So a write does not change the file under the other name. A file of more than 256 MiB is
    not copied, but refused.

    Args:
        path: the file.
        flags: of `os.open`, without `O_TRUNC`.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has a second name and cannot be copied.
    """
    descriptor = open_shared(path, flags)
    status = os.fstat(descriptor)
    if flags & os.O_ACCMODE == os.O_RDONLY or status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    if status.st_size > _MAX_COPIED_BYTES:
        raise OSError(
            errno.EFBIG, "it has a second hard link, and is too large to be copied before it is written", str(path)
        )
    working = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            with os.fdopen(os.open(working, _CREATE, mode), "wb") as copy:
                shutil.copyfileobj(file, copy)
        working.replace(path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise
    return open_shared(path, flags)


def open_shared(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file as `open_file` does, but never replace it. The caller must not write to a file with a second name.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor
