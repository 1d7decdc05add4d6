"""Reads the answers of an S3 server, which may be hostile: each has a time limit, and its values are checked."""

import contextlib
import http.client
import io
import re
from collections.abc import Generator
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, cast
from xml.etree import ElementTree

from safepoint.errors import StorageError
from safepoint.foundation import clock

SLOWEST_BYTES_PER_S = 64 << 10
"""A connection that is slower than this counts as broken."""
_MAX_SIZE = 1 << 63
_NO_XML = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]));",
    re.IGNORECASE,
)


class TimedResponse(http.client.HTTPResponse):
    """An answer whose status, headers and body must arrive before a given time.

    The timeout of a socket alone is not enough: it begins again with every byte, so a server that sends one byte a
    second never exceeds it.

    Args:
        sock: the connection, with a timeout.
        until_s: the time, by the monotonic clock.
        args: see `http.client.HTTPResponse`.
        kwargs: likewise.

    Raises:
        TimeoutError: in every method that reads, after `until_s`.
    """

    def __init__(self, sock: Any, *args: Any, until_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(cast("io.RawIOBase", _Reader(cast("Any", self.fp).detach(), sock, until_s)))


class _Reader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: Any, until_s: float) -> None:
        self._raw = raw
        self._socket = sock
        self._until_s = until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._until_s - clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError("the answer took too long")
        if left_s < self._socket.gettimeout():
            self._socket.settimeout(left_s)
        return cast("int | None", self._raw.readinto(buffer))  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self._raw.close()
        super().close()


def parsed(data: bytes, what: str) -> ElementTree.Element:
    """The XML of an answer to the request `what`, with its namespaces removed from the tags.

    Raises:
        ElementTree.ParseError: the answer was cut off or damaged.
        StorageError: S3 does not send such an answer.
    """
    # The answers of S3 define no entities. An answer that defines one is refused: entities can expand without end.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise other_answer(what)
    # Not every server escapes control characters in the names of other programs' uploads. XML cannot contain control
    # characters, so each is replaced by DEL, which XML allows and `is_key` refuses.
    with refusing_other_answers(what):  # such as an answer in an unknown encoding
        root = ElementTree.fromstring(_NO_XML.sub(b"\x7f", data))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def other_answer(what: str) -> StorageError:
    """The error for an answer to the request `what` that S3 does not send."""
    return StorageError(
        f"{what}: the answer is not that of an S3 server",
        hint="check that the endpoint is the store itself, and not a proxy or a web console",
    )


@contextlib.contextmanager
def refusing_other_answers(what: str) -> Generator[None]:
    """Turn the errors from converting a value into a StorageError, because S3 does not send such a value."""
    try:
        yield
    except (ValueError, LookupError, OverflowError) as error:
        raise other_answer(what) from error


def number_in(element: ElementTree.Element, name: str) -> int:
    """The size or count in a child of `element`.

    Raises:
        ValueError: the child is missing, or is not a valid size or count.
    """
    return size_of(text_in(element, name))


def size_of(text: str | None) -> int:
    """The size or count that `text` says.

    Raises:
        ValueError: it says none.
    """
    number = int(text or "")
    if not 0 <= number < _MAX_SIZE:
        raise ValueError("a size is out of range")
    return number


def present(text: str | None) -> str:
    """`text`, or ValueError if there is none."""
    if not text:
        raise ValueError("a value is missing")
    return text


def time_of(text: str | None) -> float:
    """Seconds since 1970 of a time in a header.

    Raises:
        ValueError: it is none.
    """
    return parsedate_to_datetime(text or "").replace(tzinfo=UTC).timestamp()


def text_in(element: ElementTree.Element, name: str) -> str:
    """The text of a child of `element`; empty when there is none."""
    return (element.findtext(name) or "").strip()
