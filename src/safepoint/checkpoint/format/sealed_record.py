"""A record: one JSON object in a file, with a format, a version and a digest of itself.

Promises: `open_sealed` accepts what `seal` wrote, and refuses it after any change of a byte. Reading takes bounded
memory and executes nothing. Not promised: that the fields are valid. The class that is made from the record checks
the fields.
"""

import contextlib
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.errors import ManifestError, SaveError
from safepoint.foundation.bounded_json import MAX_BYTES, has_more_values, parse_object

MAX_RECORD_BYTES = 64 << 20
"""Enough for about 500,000 files. A larger record is neither read into memory nor written."""
_SELF = "manifest_digest"
_SELF_LINE = re.compile(rb'^ "manifest_digest": "([^"\\\n]*)",\n', re.MULTILINE)
_LEAST_BYTES = 16
"""A large record is refused if it has fewer bytes than this for each JSON value. The entry of a file has about 25
bytes for each value."""
_MAX_SHOWN = 300


def seal(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `record`, with a digest of itself.

    Raises:
        SaveError: the record is too large to be read again.
    """
    data = _canonical({**record, _SELF: digest_bytes(_canonical(record))})
    if len(data) > MAX_RECORD_BYTES:
        raise SaveError(
            f"the record of the files ({record.get('format')}) would have {len(data)} bytes, and at most "
            f"{MAX_RECORD_BYTES} can be read; it was not written",
            hint="save fewer and larger files in a checkpoint, or fewer processes in a process image",
        )
    return data


def open_sealed(data: bytes, *, name: str, version: int) -> dict[str, Any]:
    """Read a record of the format `name`, which `seal` has written, and check its digest.

    Raises:
        ManifestError: `data` has another format or version, or was altered.
    """
    record = parse_json_object(data)
    if record.get("format") != name:
        raise ManifestError(f"it is not a {name} (format is {_shortened(repr(record.get('format')))})")
    stated_version = record.get("version")
    if type(stated_version) is not int or stated_version != version:  # True == 1, and is not a version
        raise ManifestError(
            f"its version is {_shortened(repr(stated_version))}, this release reads version {version}",
            hint="use the release of safepoint that wrote it",
        )
    # The digest covers the record without the line that states the digest, so this line is removed from `data` before
    # the digests are compared. To serialize a large record again, without this line, would take a minute.
    stated = [one.decode(errors="replace") for one in _SELF_LINE.findall(data)]
    if stated != [record.get(_SELF)] or stated != [digest_bytes(_SELF_LINE.sub(b"", data))]:
        raise ManifestError("it was altered after it was written: its own digest does not match")
    return record


@contextlib.contextmanager
def refusing_malformed() -> Generator[None]:
    """Turn the errors of invalid fields into a ManifestError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ManifestError(f"it is malformed: {_shortened(reason)}") from error


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _canonical(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object in UTF-8, of at most `MAX_RECORD_BYTES`, without duplicate names, NaN and infinities.

    Raises:
        ManifestError: `data` is not such an object, or a large object has too many values.
    """
    is_large = MAX_BYTES < len(data) <= MAX_RECORD_BYTES
    # Count the values first, because each value takes a lot of memory.
    if is_large and has_more_values(data, len(data) // _LEAST_BYTES):
        raise ManifestError(f"it has more JSON values than Safepoint writes into {len(data)} bytes")
    try:
        return parse_object(data, max_bytes=MAX_RECORD_BYTES)
    except ValueError as error:
        raise ManifestError(str(error)) from error
