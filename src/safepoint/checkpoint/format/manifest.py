"""The manifest: one JSON file that describes a checkpoint and names its files. Also the record of one node's part.

If every node has an output folder of its own, each folder holds a part of the checkpoint (docs/adr/0008). The part
has a record in place of the manifest, so that no reader takes the part for a complete checkpoint.

Promises: `Manifest.from_bytes(manifest.to_bytes()) == manifest`, and the same for a part. A record with an altered
byte is refused. A hostile record is refused before any path in it is used. Reading executes no code. Not promised:
that the files exist. `safepoint.checkpoint.format.verify` checks that.
"""

import contextlib
import enum
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, ClassVar, cast

from safepoint.checkpoint.format.digest import ALGORITHM, FileDigest, digest_of_parts, num_parts
from safepoint.checkpoint.format.sealed_record import (
    MAX_RECORD_BYTES,
    open_sealed,
    parse_json_object,
    refusing_malformed,
    seal,
)
from safepoint.errors import ManifestError
from safepoint.foundation import clock
from safepoint.foundation.field_types import FLAG, TEXT, VARIABLES, Kind, check_fields, texts, whole
from safepoint.foundation.shared_folders.no_links import RECORDS

MANIFEST_NAME, PART_NAME = RECORDS
"""`PART_NAME` is the file in place of the manifest in a folder that holds one node's part; see `NodePart`."""
FORMAT = "safepoint-checkpoint"
_PART_FORMAT = "safepoint-part"
VERSION = 1
UNKNOWN_DIGEST = f"{ALGORITHM}:{'0' * 32}"
"""The value that stands in `base` for an unknown digest of the frozen base model."""

MAX_MANIFEST_BYTES = MAX_RECORD_BYTES
_DIGEST = re.compile(rf"{re.escape(ALGORITHM)}:[0-9a-f]{{32}}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\\\\]")  # control characters, surrogates and the backslash
_MAX_PATH_BYTES = 4096
_MAX_NAME_BYTES = 255
"""The limit of usual file systems for the name of one folder or file."""
_RUN_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
"""The form of a run id, which becomes a part of folder names."""
_MOST = (1 << 63) - 1
MAX_SAMPLES = _MOST
"""The limit of `samples_seen`. A number that is computed from the fields of a hostile manifest may exceed it."""
_MOST_FOLDERS = 1000
"""How many more folders than files a checkpoint may have."""
MAX_STEP = 10**15
"""The highest step of a checkpoint. Browsers compute exactly with such a number, and no training reaches it: at 1,000
steps a second, 10^15 steps take 30,000 years."""
MAX_ATTEMPT = (1 << 31) - 1


def _is_real(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_real, cast("Mapping[str, Any]", value).values()))


def is_digest(value: Any) -> bool:
    """Whether `value` is a digest as a manifest states it."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _are_digests(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_digest, cast("list[Any]", value)))


def _is_base(value: Any) -> bool:
    return VARIABLES.fits(value) and set(value) == {"name", "revision", "digest"} and is_digest(value["digest"])


def _is_run_id(value: Any) -> bool:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


RUN_ID = Kind(words="1 to 128 letters, digits, `-` and `_`", fits=_is_run_id)
ATTEMPT = whole(least=1, most=MAX_ATTEMPT)
_DIGEST_WORDS = f"{ALGORITHM}:<32 hex digits>"
_ENTRY_KINDS = {
    "path": TEXT,
    "size_bytes": whole(least=0),
    "digest": Kind(words=_DIGEST_WORDS, fits=is_digest),
    "parts": Kind(words=f"a list of {_DIGEST_WORDS}", fits=_are_digests),
}
_FACT_KINDS = {
    "run_id": RUN_ID,
    "attempt": ATTEMPT,
    "step": whole(least=0, most=MAX_STEP),
    "epoch": Kind(words="a finite number with a decimal point", fits=_is_real, least=0, most=1e18),
    "world_size": whole(least=1, most=_MOST),
    "global_batch": whole(least=1, most=_MOST),
    "gradient_accumulation": whole(least=1, most=_MOST),
    "samples_seen": whole(least=0, most=MAX_SAMPLES),
    "strategy": TEXT,
    "zero_stage": whole(least=0, most=3).optional,
    "libraries": VARIABLES,
    "metrics": Kind(words="a mapping of names to finite numbers with a decimal point", fits=_are_metrics),
    "base": Kind(words=f"a name, a revision and a digest {_DIGEST_WORDS}", fits=_is_base, is_optional=True),
}
_STEP_KINDS = {name: _FACT_KINDS[name] for name in ("step", "samples_seen")}
_PART_KINDS = {"node": whole(least=0), "num_nodes": whole(least=1), "paths": texts(), "is_open": FLAG}


class Trigger(enum.StrEnum):
    """Why a checkpoint exists."""

    PERIODIC = "periodic"
    JIT = "jit"
    ON_DEMAND = "on-demand"
    FAILURE = "failure"
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: the path in the checkpoint's folder, with `/`; without `..` and control characters.
        size_bytes: its size.
        digest: `xxh3-128:<32 hex digits>`.
        parts: the digest of each part of 64 MiB; empty for a file of at most one part.
    """

    path: str
    size_bytes: int
    digest: str
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, found: FileDigest) -> "FileEntry":
        """The entry of the file at `path`, from the size and the digests of the file."""
        return cls(path=path, size_bytes=found.size_bytes, digest=found.digest, parts=found.parts)

    def __post_init__(self) -> None:
        check_fields(self, _ENTRY_KINDS)
        fault = path_fault(self.path)
        if fault:
            raise ValueError(f"path {self.path!r} {fault}")
        if len(self.parts) != num_parts(self.size_bytes):
            raise ValueError(
                f"the field `parts` of {self.path!r} must have {num_parts(self.size_bytes)} digests, not "
                f"{len(self.parts)}"
            )
        if self.parts and digest_of_parts(self.parts) != self.digest:
            raise ValueError(f"the digest of {self.path!r} does not match the digests of its parts")


@functools.lru_cache(maxsize=1024)  # cached, because each save checks the same few paths while training waits
def path_fault(path: str) -> str | None:
    """Why `path` must not be used inside a checkpoint; None if it may be used."""
    parts = path.split("/")
    encoded = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    if not path or sum(encoded) + len(parts) - 1 > _MAX_PATH_BYTES or max(encoded) > _MAX_NAME_BYTES:
        return f"is empty or longer than {_MAX_PATH_BYTES} bytes, or a component exceeds {_MAX_NAME_BYTES} bytes"
    if _UNPRINTABLE.search(path):
        return "has a control character, a surrogate or a backslash"
    if path.startswith("/"):
        return "is absolute"
    if any(part in {"", ".", ".."} for part in parts) or str(PurePosixPath(path)) != path:
        return "leaves the checkpoint's folder or is not normalized"
    if parts[0] in {MANIFEST_NAME, PART_NAME}:
        return "is the manifest itself" if parts[0] == MANIFEST_NAME else "is the record of a node's part"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """The fields of a manifest that are known before the files are written.

    Args:
        run_id: the run that the checkpoint belongs to; the same in all attempts of a run.
        attempt: the number of the attempt that wrote the checkpoint, from 1.
        step: optimizer steps done.
        epoch: epochs done, including the fraction of the current epoch.
        world_size: number of ranks that wrote the checkpoint.
        global_batch: samples per optimizer step, over all ranks and micro-batches.
        gradient_accumulation: micro-batches per optimizer step and rank.
        samples_seen: samples on which the run has trained, over all attempts.
        strategy: how the ranks share the model: `single`, `ddp`, `fsdp`, `deepspeed`.
        zero_stage: the stage of DeepSpeed's ZeRO; 0 if ZeRO is off. None under other strategies, and in the manifests
            of releases that did not record it.
        libraries: name → version of each library that wrote the checkpoint.
        metrics: what was measured at this step, such as `eval_loss`.
        base: for a checkpoint of adapters, the name, revision and digest of the frozen model that they adapt; None
            for a checkpoint of a whole model. The digest is `UNKNOWN_DIGEST` if another program wrote the checkpoint.
    """

    run_id: str
    attempt: int
    step: int
    epoch: float
    world_size: int
    global_batch: int
    gradient_accumulation: int
    samples_seen: int
    strategy: str
    zero_stage: int | None = None
    libraries: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    base: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self, _FACT_KINDS)

    def at(self, *, step: int, samples_seen: int) -> "ManifestFacts":
        """The same facts at another step. This call is faster than `dataclasses.replace`, because it does not check
        the other fields again."""
        facts = object.__new__(ManifestFacts)
        for name in _FACT_KINDS:
            object.__setattr__(facts, name, getattr(self, name))
        object.__setattr__(facts, "step", step)
        object.__setattr__(facts, "samples_seen", samples_seen)
        check_fields(facts, _STEP_KINDS)
        return facts

    def to_manifest(self, *, trigger: Trigger, files: tuple[FileEntry, ...]) -> "Manifest":
        """The manifest of a checkpoint with these facts and these written files. `created` is the current time."""
        known = {one.name: getattr(self, one.name) for one in fields(ManifestFacts)}
        return Manifest(**known, trigger=trigger, created=clock.utc_now(), files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ManifestFacts):
    """The description of a checkpoint.

    Args:
        trigger: why the checkpoint exists.
        created: when the manifest was made, RFC 3339 UTC.
        files: every file except the manifest, sorted by path.
    """

    file_name: ClassVar[str] = MANIFEST_NAME
    trigger: Trigger
    created: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        TEXT.check("created", self.created)
        ManifestFacts.__post_init__(self)  # `super()` fails here: `dataclass(slots=True)` replaces this class
        paths = [entry.path for entry in self.files]
        if not paths:
            raise ValueError("field 'files' must name at least one file")
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path, and no path may occur twice")
        _check_folders(paths)
        # In this order, the paths below another path follow immediately after that path.
        ordered = sorted(path.replace("/", "\0") for path in paths)
        for above, path in itertools.pairwise(ordered):
            if path.startswith(f"{above}\0"):
                raise ValueError("the path {!r} is below another file".format(path.replace("\0", "/")))

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.size_bytes for entry in self.files)

    def to_bytes(self) -> bytes:
        """The canonical JSON, with a digest of itself; SaveError when it would be too large to be read."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "step": self.step,
            "epoch": self.epoch,
            "trigger": str(self.trigger),
            "world_size": self.world_size,
            "global_batch": self.global_batch,
            "gradient_accumulation": self.gradient_accumulation,
            "samples_seen": self.samples_seen,
            "strategy": self.strategy,
            **({} if self.zero_stage is None else {"zero_stage": self.zero_stage}),
            "libraries": dict(self.libraries),
            "metrics": dict(self.metrics),
            **({} if self.base is None else {"base": dict(self.base)}),
            "created": self.created,
            "files": [entry_record(entry) for entry in self.files],
        }
        return seal(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read and check a manifest.

        Unknown fields, which a later release may add to version 1, are ignored. The digest covers them too.

        Raises:
            ManifestError: the manifest is invalid; no path in it was used.
        """
        record = open_sealed(data, name=FORMAT, version=VERSION)
        with refusing_malformed():
            files: Any = record["files"]
            if not isinstance(files, list) or not all(isinstance(item, dict) for item in cast("list[Any]", files)):
                raise TypeError("files must be a list of objects")
            stated: dict[str, Any] = {"zero_stage": None, "base": None, **record}
            stated["trigger"] = Trigger(stated["trigger"])
            stated["files"] = tuple(read_entry(item) for item in cast("list[dict[str, Any]]", files))
            return cls(**{one.name: stated[one.name] for one in fields(cls)})


def _check_folders(paths: Sequence[str]) -> None:
    """Raise ValueError if the files are in far more folders than there are files.

    A folder takes two bytes of a path and 4 KiB of a disk. So a small manifest could fill a disk.
    """
    most = len(paths) + _MOST_FOLDERS
    numbers: dict[tuple[int, str], int] = {}
    for path in paths:
        above = 0
        for name in path.split("/")[:-1]:
            above = numbers.setdefault((above, name), len(numbers) + 1)
        if len(numbers) > most:
            raise ValueError(f"{len(paths)} files are in more than {most} folders, which is not allowed")


Describe = Callable[[tuple[FileEntry, ...]], Manifest]
"""Makes the manifest of a checkpoint with these files, which are sorted by path."""


def entry_record(entry: FileEntry) -> dict[str, Any]:
    """The entry as it is in a manifest."""
    record = {"path": entry.path, "size_bytes": entry.size_bytes, "digest": entry.digest}
    return {**record, "parts": list(entry.parts)} if entry.parts else record


def read_entry(record: Mapping[str, Any]) -> FileEntry:
    """Read the entry of a file; KeyError, TypeError or ValueError if it is malformed."""
    return FileEntry(
        path=record["path"],
        size_bytes=record["size_bytes"],
        digest=record["digest"],
        parts=tuple(record.get("parts", ())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """The files of a checkpoint that one node holds.

    Args:
        node: the node's number, from 0.
        num_nodes: how many parts make the checkpoint.
        paths: the files that the node holds, sorted.
        manifest: the manifest of the whole checkpoint.
        is_open: whether callbacks may still add files. Added files change the manifest. A run can resume from an open
            part; the uploader waits until the part is closed, or until the training ends.
    """

    file_name: ClassVar[str] = PART_NAME
    node: int
    num_nodes: int
    paths: tuple[str, ...]
    manifest: Manifest
    is_open: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _PART_KINDS)
        if self.node >= self.num_nodes:
            raise ValueError(f"node {self.node} must be below num_nodes {self.num_nodes}")
        unknown = set(self.paths) - {entry.path for entry in self.manifest.files}
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not in the manifest")

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The manifest's entries of the files that the node holds."""
        held = set(self.paths)
        return tuple(entry for entry in self.manifest.files if entry.path in held)

    def to_bytes(self) -> bytes:
        """The canonical JSON, with a digest of itself; SaveError when it would be too large to be read."""
        return seal(
            {
                "format": _PART_FORMAT,
                "version": VERSION,
                "node": self.node,
                "num_nodes": self.num_nodes,
                "paths": list(self.paths),
                "open": self.is_open,
                "manifest": self.manifest.to_bytes().decode(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "NodePart":
        """Read and check the record of a part.

        Raises:
            ManifestError: the record is invalid; no path in it was used.
        """
        record = open_sealed(data, name=_PART_FORMAT, version=VERSION)
        with refusing_malformed():
            _PART_KINDS["paths"].check("paths", record["paths"])
            TEXT.check("manifest", record["manifest"])
            return cls(
                node=record["node"],
                num_nodes=record["num_nodes"],
                paths=tuple(record["paths"]),
                manifest=Manifest.from_bytes(record["manifest"].encode()),
                is_open=record["open"],
            )


def is_of_newer_release(data: bytes) -> bool:
    """Whether `data` is a record of a later version of the format. Callers do not replace or delete the files of such
    a record."""
    with contextlib.suppress(ManifestError):
        record = parse_json_object(data)
        version = record.get("version")
        is_later = isinstance(version, str) or (isinstance(version, int | float) and version > VERSION)
        # A tuple, not a set: `format` may be a list, which has no hash.
        return record.get("format") in (FORMAT, _PART_FORMAT) and is_later
    return False
