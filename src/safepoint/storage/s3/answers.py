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
_NUMBER = re.compile("[0-9]{1,19}")
_MAX_ELEMENTS = 50_000
"""A page has 1000 objects, uploads or parts, with about ten elements each."""
_MAX_TEXT = 4096
"""S3's longest text is a key: 1024 bytes, which take up to 3072 characters when they are encoded."""
_MAX_KEY_BYTES = 1024
_MAX_IDENTIFIER = 1024
"""The longest version, identifier of an upload, or time. Identifiers of uploads have some hundred characters."""
_MAX_NAMESPACES = 10_000
_XSI = "{http://www.w3.org/2001/XMLSchema-instance}"
_BLOCK_BYTES = 16 << 10
_MAX_BLOCKS = 4
"""The parser gets the XML in blocks. If this many blocks contain no markup, a tag is longer than S3's tags."""
LISTING = re.compile(r"List[A-Za-z0-9]*(Result|Response)")
"""The outermost element of a listing.

The exact name differs among servers: `ListPartsResult`, `ListPartsResponse`.
"""
BEGUN = re.compile(r"Initiate[A-Za-z0-9]*(Result|Response)")
"""The outermost element of the answer to the request that begins an upload."""
COMPLETED = re.compile(r"CompleteMultipartUploadResult")
"""The outermost element of the answer to the request that completes an upload."""
_ERROR = re.compile(rb"<(?:[A-Za-z0-9_.-]{1,64}:)?Error[\s/>]", re.IGNORECASE)
_NO_XML = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]));",
    re.IGNORECASE,
)


class OtherAnswerError(StorageError):
    """The answer does not have the form that an S3 server gives it."""


def is_error(data: bytes | bytearray) -> bool:
    """Whether an answer describes an error of the server."""
    return _ERROR.search(data) is not None


def parsed(data: bytes | bytearray, what: str, root_name: re.Pattern[str]) -> ElementTree.Element:
    """The XML of an answer to the request `what`, with its namespaces removed from the tags.

    Args:
        data: the answer.
        what: the request.
        root_name: the name of the outermost element.

    Raises:
        ElementTree.ParseError: the answer was cut off or damaged.
        OtherAnswerError: the answer is not a valid answer of an S3 server.
    """
    # The answers of S3 define no entities. Any definition of an entity is refused: entities can expand without end.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise other_answer(what)
    # Other programs may upload under names with control characters, and not every server escapes these in a listing.
    # XML cannot contain control characters, so each is replaced by DEL, which XML allows and `is_key` refuses.
    with refusing_other_answers(what):  # for example, an answer in an unknown encoding
        # Servers send blanks while they work, some of them before the declaration of XML.
        root = _parse(_NO_XML.sub(b"\x7f", data.lstrip(b" \t\r\n")))
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        # Refuse, for example, the page of a proxy, which would look like an empty listing.
        if not root_name.fullmatch(root.tag):
            raise ValueError("the answer has another kind of content")
    return root


def _parse(data: bytes) -> ElementTree.Element:
    builder = _BoundedBuilder()
    parser = ElementTree.XMLParser(target=builder)
    num_silent = 0
    # The parser keeps a tag with all its attributes before it reports the tag. So a tag without end is refused here.
    for begin in range(0, len(data), _BLOCK_BYTES):
        before = builder.num_events
        parser.feed(data[begin : begin + _BLOCK_BYTES])
        num_silent = num_silent + 1 if builder.num_events == before else 0
        if num_silent == _MAX_BLOCKS:
            raise ValueError("a tag is too long")
    return parser.close()


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Keeps elements and their texts, and refuses everything that an answer of S3 does not have, while it is parsed.

    All of it would take memory, or many times as much memory as its bytes: elements, pieces of text, attributes,
    namespaces, comments, and definitions of entities.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_elements = 0
        self._num_namespaces = 0
        self._num_text = 0
        self.num_events = 0
        """How much markup and how many pieces of text the parser has reported."""

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:
        self.num_events += 1
        self._num_elements += 1
        self._num_text = 0
        if self._num_elements > _MAX_ELEMENTS:
            raise ValueError("there are too many elements")
        if len(tag) > _MAX_TEXT:
            raise ValueError("the name of an element is too long")
        if not all(name.startswith(_XSI) for name in attrs):
            raise ValueError("an element has an attribute")
        return super().start(tag, {})

    def end(self, tag: str, /) -> ElementTree.Element:
        self.num_events += 1
        self._num_text = 0
        return super().end(tag)

    def data(self, data: str, /) -> None:
        self.num_events += 1
        self._num_text += len(data)
        if self._num_text > _MAX_TEXT:
            raise ValueError("a text is too long")
        super().data(data)

    def start_ns(self, prefix: str, uri: str, /) -> None:
        self.num_events += 1
        self._num_namespaces += 1
        if self._num_namespaces > _MAX_NAMESPACES or len(prefix) + len(uri) > _MAX_TEXT:
            raise ValueError("there are too many namespaces")

    def comment(self, *_: object) -> ElementTree.Element:
        raise ValueError("there is a comment")

    def pi(self, *_: object) -> ElementTree.Element:
        raise ValueError("there is an instruction")

    def doctype(self, *_: object) -> None:
        raise ValueError("there is a definition of a document type")


def other_answer(what: str) -> OtherAnswerError:
    """The error for an answer to the request `what` that is not a valid answer of an S3 server."""
    return OtherAnswerError(
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
    return size_of(element.findtext(name))


def size_of(text: str | None) -> int:
    """The size or count in `text`.

    Raises:
        ValueError: `text` is not a valid size or count.
    """
    # `int` also accepts signs, blanks, underscores and the digits of other scripts.
    number = int(text) if text and _NUMBER.fullmatch(text) else -1
    if not 0 <= number < _MAX_SIZE:
        raise ValueError("a size is out of range")
    return number


def present(text: str | None) -> str:
    """`text`, or ValueError if there is none."""
    if not text:
        raise ValueError("a value is missing")
    return text


def key_in(element: ElementTree.Element) -> str:
    """The key in a child of `element`; empty if there is none.

    Raises:
        ValueError: the key is longer than S3 allows.
    """
    key = element.findtext("Key") or ""
    if len(key.encode(errors="surrogateescape")) > _MAX_KEY_BYTES:
        raise ValueError("a key is too long")
    return key


def identifier(text: str | None) -> str:
    """A version, an identifier of an upload or a time, without blanks around it; empty if there is none.

    Raises:
        ValueError: `text` is too long, or has other characters than printable ASCII.
    """
    found = (text or "").strip()
    if len(found) > _MAX_IDENTIFIER or not (found.isascii() and found.isprintable()):
        raise ValueError("an identifier is invalid")
    return found


def time_of(text: str | None) -> float:
    """Seconds since 1970 of a time in a header.

    Raises:
        ValueError: `text` is not a time.
    """
    return parsedate_to_datetime(text or "").replace(tzinfo=UTC).timestamp()


def text_in(element: ElementTree.Element, name: str) -> str:
    """The text of a child of `element`; empty when there is none."""
    return (element.findtext(name) or "").strip()
