"""The manifest of a process image, `image.json` (docs/process-images.md).

Promises: `ImageManifest.from_bytes(manifest.to_bytes()) == manifest`; an altered or hostile manifest is refused
before a path in it is used. Not promised: that the files exist. `transparent.images.materialise` checks that.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, cast

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry, entry_record, is_digest, read_entry
from safepoint.checkpoint.format.sealed_record import open_sealed, refusing_malformed, seal
from safepoint.errors import ImageError, ManifestError
from safepoint.foundation import clock
from safepoint.foundation.field_types import FLAG, Kind, check_fields, whole
from safepoint.transparent.images.names import MOST_NUMBER, image_name, number_of, part_name
from safepoint.transparent.pages.layout import MOST_FILES, MOST_PAGES, MOST_PARTS, MOST_SOURCES
from safepoint.transparent.pages.writer import regions_name, table_name
from safepoint.transparent.protection.keys import SALT_BYTES, ImageKey, ImageProtection

FORMAT = "safepoint-image"
VERSION = 1
MANIFEST_NAME = "image.json"
MOST_CHAIN = MOST_SOURCES + 1
"""How many images a chain may have, the newest included."""
MOST_FILE_BYTES = 1 << 30
"""The limit of the size, in bytes, of a file of CRIU or of a carried folder. It does not apply to files of pages."""

_PART_NAME = re.compile(r"part-(0|[1-9][0-9]{0,3})")
_CRIU_NAME = re.compile(r"(?!pages-)[a-z][a-z0-9_.-]{0,99}\.img")
_PAGES_NAME = re.compile(r"pages-(0|[1-9][0-9]{0,4})\.(table|regions)")
_MOST_TEXT = 200


def is_criu_name(name: str) -> bool:
    """Whether an image may contain a file with this name unchanged: a file of CRIU, or the archive of a carried
    folder."""
    return _CRIU_NAME.fullmatch(name) is not None


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable()


def _is_time(value: Any) -> bool:
    if not _is_short(value):
        return False
    try:
        clock.parse_utc(value)
    except ValueError:
        return False
    return True


_SHORT = Kind(words=f"at most {_MOST_TEXT} printable characters", fits=_is_short)
_PAGES = whole(least=0, most=MOST_PAGES)
_PAGE_FILE_KINDS = {
    "file": whole(least=0, most=MOST_FILES - 1),
    "num_pages": _PAGES,
    "num_zero": _PAGES,
    "num_equal": _PAGES,
    "num_stored": _PAGES,
}
_PID = whole(least=1, most=1 << 22)
_PART_KINDS = {"root_pid": _PID, "program": _SHORT, "num_processes": _PID, "is_in_session_of_other": FLAG}
_GPU = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOST_GPUS = 256
UNSIGNED = "0" * 64
"""The value of `mac` while the manifest is not authenticated yet."""


def _hex_digits(count: int) -> Kind:
    return Kind(
        words=f"{count} hex digits",
        fits=lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{count}}}", value) is not None,
    )


_PROTECTION_KINDS = {
    "key_id": _hex_digits(16),
    "salt": _hex_digits(2 * SALT_BYTES),
    "is_encrypted": FLAG,
    "mac": _hex_digits(64),
}
_MACHINE_KINDS = {"architecture": _SHORT, "kernel": _SHORT, "criu": _SHORT}
_IMAGE_KINDS = {
    "number": whole(least=1, most=MOST_NUMBER),
    "created": Kind(words="a time, RFC 3339 UTC", fits=_is_time),
    "seed": whole(least=0, most=(1 << 64) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFileFacts:
    """How the pages of one `pages-N.img` are stored.

    Args:
        file: the number N.
        num_pages: all pages.
        num_zero: pages of zeros.
        num_equal: pages that equal a page of an older image.
        num_stored: pages in the regions.
    """

    file: int
    num_pages: int
    num_zero: int
    num_equal: int
    num_stored: int

    def __post_init__(self) -> None:
        check_fields(self, _PAGE_FILE_KINDS)
        if self.num_zero + self.num_equal + self.num_stored != self.num_pages:
            raise ValueError(f"the pages of pages-{self.file} do not add up to num_pages {self.num_pages}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process tree of an image. Its folder is `part-K`, where K is its place among the parts.

    Args:
        root_pid: the number of the root process, as the processes see it.
        program: the name of the root process.
        num_processes: processes of the tree.
        is_in_session_of_other: whether the leader of the root's session was outside of the tree. CRIU needs this
            fact.
        page_files: its page files, ascending.
    """

    root_pid: int
    program: str
    num_processes: int
    is_in_session_of_other: bool
    page_files: tuple[PageFileFacts, ...]

    def __post_init__(self) -> None:
        check_fields(self, _PART_KINDS)
        numbers = [one.file for one in self.page_files]
        if numbers != sorted(set(numbers)):
            raise ValueError("page_files must be sorted by file, and no file may occur twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An older image that stores pages of this one.

    Args:
        name: its name, in the same location.
        digest: the digest of its `image.json`.
    """

    name: str
    digest: str

    def __post_init__(self) -> None:
        if not isinstance(cast("Any", self.name), str) or number_of(self.name) is None or not is_digest(self.digest):
            raise ValueError("a source must have the name of an image, and a digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the processes were frozen.

    Args:
        architecture: the processor's architecture, as `uname -m` prints it.
        kernel: the release of the kernel.
        criu: the version of CRIU.
        gpus: the UUIDs of all GPUs of the machine; empty if no process used a GPU.
    """

    architecture: str
    kernel: str
    criu: str
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, _MACHINE_KINDS)
        if not all(isinstance(cast("Any", uuid), str) and _GPU.fullmatch(uuid) for uuid in self.gpus):
            raise ValueError("gpus must be UUIDs such as GPU-00000000-0000-0000-0000-000000000000")
        if len(self.gpus) > _MOST_GPUS or len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus must be at most {_MOST_GPUS} different UUIDs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionFacts:
    """How the files of an image are protected (`transparent.protection`).

    Args:
        key_id: names the key, 16 hex digits.
        salt: random bytes, 64 hex digits. The keys of the image's files are derived from the key and the salt.
        is_encrypted: whether the files are encrypted; otherwise they are only authenticated.
        mac: the code that authenticates the manifest, 64 hex digits. It is computed over the manifest with `UNSIGNED`
            in place of the code.
    """

    key_id: str
    salt: str
    is_encrypted: bool
    mac: str = UNSIGNED

    def __post_init__(self) -> None:
        check_fields(self, _PROTECTION_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    """The description of an image.

    Args:
        number: the number in its name.
        created: when the processes were frozen, RFC 3339 UTC.
        seed: the seed of the page digests, the same in a chain.
        sources: the older images that store pages of this one, newest first.
        machine: where the processes were frozen.
        parts: its process trees.
        files: every file but the manifest, sorted by path.
        protection: how the files are protected; None if they are not.
        read_from: the bytes from which the manifest was read, including fields that only a later release knows; empty
            for a new manifest.
    """

    file_name: ClassVar[str] = MANIFEST_NAME
    number: int
    created: str
    seed: int
    sources: tuple[Source, ...]
    machine: Machine
    parts: tuple[Part, ...]
    files: tuple[FileEntry, ...]
    protection: ProtectionFacts | None = None
    read_from: bytes = field(default=b"", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, _IMAGE_KINDS)
        if not 1 <= len(self.parts) <= MOST_PARTS or len(self.sources) > MOST_SOURCES:
            raise ValueError(f"an image has 1 to {MOST_PARTS} parts, and at most {MOST_SOURCES} sources")
        numbers = [number_of(source.name) or 0 for source in self.sources]
        if numbers != sorted(set(numbers), reverse=True) or any(number >= self.number for number in numbers):
            raise ValueError("sources must be older images, newest first, without duplicates")
        paths = [entry.path for entry in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path, and no path may occur twice")
        expected = {
            f"{part_name(number)}/{name(one.file)}"
            for number, part in enumerate(self.parts)
            for one in part.page_files
            for name in (table_name, regions_name)
        }
        if {path for path in paths if _PAGES_NAME.fullmatch(path.rpartition("/")[2])} != expected:
            raise ValueError(
                "field 'files' must list one table and one file of regions for each page file, and no other tables "
                "or regions"
            )
        for entry in self.files:
            self._check_file(entry)

    def _check_file(self, entry: FileEntry) -> None:
        folder, _, name = entry.path.rpartition("/")
        match = _PART_NAME.fullmatch(folder)
        if match is None or int(match[1]) >= len(self.parts):
            raise ValueError(f"{entry.path!r} is in no part of the image")
        is_criu = is_criu_name(name)
        if not is_criu and not _PAGES_NAME.fullmatch(name):
            raise ValueError(f"{entry.path!r} is not a file of CRIU, a carried folder, a table or a file of regions")
        if is_criu and entry.size_bytes > MOST_FILE_BYTES:
            raise ValueError(f"{entry.path!r} has more than {MOST_FILE_BYTES} bytes")

    @property
    def name(self) -> str:
        """The name of its folder."""
        return image_name(self.number)

    @property
    def size_bytes(self) -> int:
        """The size of its own files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def page_files(self) -> tuple[PageFileFacts, ...]:
        """The page files of all parts."""
        return tuple(one for part in self.parts for one in part.page_files)

    @property
    def num_pages(self) -> int:
        """The pages of all processes and of their shared memories."""
        return sum(one.num_pages for one in self.page_files)

    @property
    def num_stored(self) -> int:
        """The pages that this image stores itself."""
        return sum(one.num_stored for one in self.page_files)

    def to_bytes(self) -> bytes:
        """The canonical JSON, with a digest of itself; for a manifest that was read, the bytes that were read.

        Raises:
            SaveError: the manifest would be too large to be read.
        """
        return self.read_from or seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "number": self.number,
                "created": self.created,
                "seed": f"{self.seed:016x}",
                "sources": [_plain(source) for source in self.sources],
                "machine": _machine_record(self.machine),
                "parts": [{**_plain(part), "page_files": [*map(_plain, part.page_files)]} for part in self.parts],
                "files": [entry_record(entry) for entry in self.files],
                **({} if self.protection is None else {"protection": _plain(self.protection)}),
            }
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether its files are encrypted."""
        return self.protection is not None and self.protection.is_encrypted

    def signed(self, protection: ImageProtection | None) -> "ImageManifest":
        """This manifest, authenticated with the key of `protection`. If there is no key, it gets no protection."""
        if protection is None or protection.key is None:
            return replace(self, protection=None)
        facts = ProtectionFacts(
            key_id=protection.key.id, salt=protection.salt.hex(), is_encrypted=protection.is_encrypted
        )
        unsigned = replace(self, protection=facts)
        return replace(self, protection=replace(facts, mac=protection.mac(unsigned.to_bytes())))

    def is_signed_by(self, key: ImageKey) -> bool:
        """Whether the owner of `key` has made this manifest."""
        if self.protection is None or self.protection.key_id != key.id:
            return False
        protection = ImageProtection(
            salt=bytes.fromhex(self.protection.salt), is_encrypted=self.protection.is_encrypted, key=key
        )
        expected = self.signed(protection).protection
        return expected is not None and hmac.compare_digest(expected.mac, self.protection.mac)

    @property
    def digest(self) -> str:
        """The digest of `image.json`. Newer images that need this image contain this digest, in `sources`."""
        return digest_bytes(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> "ImageManifest":
        """Read and check a manifest.

        Raises:
            ImageError: the manifest is invalid; no path in it was used.
        """
        try:
            record = open_sealed(data, name=FORMAT, version=VERSION)
            with refusing_malformed():
                manifest = cls(
                    number=record["number"],
                    created=record["created"],
                    seed=_seed(record["seed"]),
                    sources=tuple(Source(**_only(Source, one)) for one in _list(record["sources"], MOST_SOURCES)),
                    machine=_machine(record["machine"]),
                    parts=tuple(map(_part, _list(record["parts"], MOST_PARTS))),
                    files=tuple(map(read_entry, _list(record["files"]))),
                    protection=_protection(record.get("protection")),
                )
                object.__setattr__(manifest, "read_from", data)
                return manifest
        except ManifestError as error:
            raise ImageError(error.message, hint=error.hint) from error


def _plain(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _only(kind: Any, record: Any) -> dict[str, Any]:
    """The fields of `kind` in `record`. A later release may add further fields."""
    return {one.name: record[one.name] for one in fields(kind)}


def _list(value: Any, most: int | None = None) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast("list[Any]", value)):
        raise TypeError("sources, parts, page_files and files must be lists of objects")
    found = cast("list[Mapping[str, Any]]", value)
    if most is not None and len(found) > most:
        raise ValueError(f"a list has more than {most} entries")
    return found


def _part(record: Mapping[str, Any]) -> Part:
    files = tuple(PageFileFacts(**_only(PageFileFacts, one)) for one in _list(record["page_files"], MOST_FILES))
    stated: dict[str, Any] = {**_only(Part, record), "page_files": files}
    return Part(**stated)


def _protection(record: Any) -> ProtectionFacts | None:
    return None if record is None else ProtectionFacts(**_only(ProtectionFacts, record))


def _machine_record(machine: Machine) -> dict[str, Any]:
    """The JSON object of a machine. If it has no GPUs, the field `gpus` is left out, so that older images keep their
    digests."""
    record = _plain(machine)
    gpus = record.pop("gpus")
    return {**record, "gpus": [*gpus]} if gpus else record


def _machine(record: Mapping[str, Any]) -> Machine:
    gpus = record.get("gpus", [])
    if not isinstance(gpus, list):
        raise TypeError("gpus must be a list")
    stated: dict[str, Any] = _only(Machine, {**record, "gpus": tuple(cast("list[str]", gpus))})
    return Machine(**stated)


def _seed(text: Any) -> int:
    if not isinstance(text, str) or re.fullmatch("[0-9a-f]{16}", text) is None:
        raise ValueError("seed must be 16 hex digits")
    return int(text, 16)
