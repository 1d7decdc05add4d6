"""Reads the answers of an S3 server, which may be hostile: their size is limited, and their values are checked."""

import contextlib
import re
from collections.abc import Generator
from datetime import UTC
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree

from safepoint.errors import StorageError

SLOWEST_BYTES_PER_S = 64 << 10
"""A connection that is slower than this counts as broken."""
_MAX_SIZE = 1 << 63
_MAX_ELEMENTS = 50_000
"""A page has 1000 objects, uploads or parts, with about ten elements each."""
_MAX_TEXT = 4096
"""S3's longest text is a key: 1024 bytes, which take up to 3072 characters when they are encoded."""
_ROOT = re.compile(r"(List|Initiate)[A-Za-z0-9]*(Result|Response)")
"""The outermost element of a listing, or of the answer to the request that begins an upload.

The exact name differs among servers: `ListPartsResult`, `ListPartsResponse`.
"""
_NO_XML = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]));",
    re.IGNORECASE,
)


def parsed(data: bytes, what: str) -> ElementTree.Element:
    """The XML of an answer to the request `what`, with its namespaces removed from the tags.

    Raises:
        ElementTree.ParseError: the answer was cut off or damaged.
        StorageError: the answer is not a valid answer of an S3 server.
    """
    # The answers of S3 define no entities. Any definition of an entity is refused: entities can expand without end.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise other_answer(what)
    # Other programs may upload under names with control characters, and not every server escapes these in a listing.
    # XML cannot contain control characters, so each is replaced by DEL, which XML allows and `is_key` refuses.
    with refusing_other_answers(what):  # for example, an answer in an unknown encoding
        root = ElementTree.fromstring(
            _NO_XML.sub(b"\x7f", data), parser=ElementTree.XMLParser(target=_BoundedBuilder())
        )
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            if len(element.text or "") > _MAX_TEXT:
                raise ValueError("a text is too long")
        # Refuse, for example, the page of a proxy, which would look like an empty listing.
        if not _ROOT.fullmatch(root.tag):
            raise ValueError("the answer has another kind of content")
    return root


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Refuses more elements than an answer of S3 has, because each of them takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self._num_left = _MAX_ELEMENTS

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError("there are too many elements")
        return super().start(tag, attrs)


def other_answer(what: str) -> StorageError:
    """The error for an answer to the request `what` that is not a valid answer of an S3 server."""
    return StorageError(
        f"{what}: the answer is not a valid answer of an S3 server",
        hint="check that the endpoint is the store itself, and not a proxy or a web console",
    )


@contextlib.contextmanager
def refusing_other_answers(what: str) -> Generator[None]:
    """Raise StorageError if a value in the answer to request `what` cannot be converted: S3 sends no such value."""
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
    """The size or count in `text`.

    Raises:
        ValueError: `text` is not a valid size or count.
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
        ValueError: `text` is not a time.
    """
    return parsedate_to_datetime(text or "").replace(tzinfo=UTC).timestamp()


def text_in(element: ElementTree.Element, name: str) -> str:
    """The text of a child of `element`; empty when there is none."""
    return (element.findtext(name) or "").strip()
