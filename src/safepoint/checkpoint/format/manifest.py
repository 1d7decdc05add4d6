"""The manifest: one JSON file that says what a checkpoint is and names every file of it.

Promises: `Manifest.from_bytes(manifest.to_bytes()) == manifest`; any altered byte is refused; a hostile
manifest is refused before any path in it is used. Reading executes nothing.
Not promised: that the files are there. That is `safepoint.checkpoint.format.verify`.
"""

import enum
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeVar, cast

from safepoint.checkpoint.format.digest import ALGORITHM, FileDigest, digest_bytes, digest_of_parts, num_parts
from safepoint.errors import ManifestError
from safepoint.foundation import clock

MANIFEST_NAME = "safepoint-manifest.json"
PART_NAME = "safepoint-part.json"
"""What stands in a folder instead of a manifest when it holds one node's part only; see `part`."""
FORMAT = "safepoint-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
"""More than a million files; a larger manifest is not read into memory."""

_DIGEST = re.compile(rf"{re.escape(ALGORITHM)}:[0-9a-f]{{32}}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\\\\]")  # both blocks of control characters
_MAX_PATH_BYTES = 4096
_SELF = "manifest_digest"
_BASE = {"name", "revision", "digest"}
_T = TypeVar("_T")


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
        path: relative to the checkpoint's folder, with `/`; no `..`, nothing absolute, no control characters.
        size_bytes: its size.
        digest: `xxh3-128:<32 hex digits>`.
        parts: digests of the file's parts of 64 MiB, for files of more than one.
    """

    path: str
    size_bytes: int
    digest: str
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, found: FileDigest) -> "FileEntry":
        """The entry of a file whose digest was taken."""
        return cls(path=path, size_bytes=found.size_bytes, digest=found.digest, parts=found.parts)

    def __post_init__(self) -> None:
        fault = path_fault(self.path)
        if fault:
            raise ValueError(f"path {self.path!r} {fault}")
        if self.size_bytes < 0:
            raise ValueError(f"size_bytes {self.size_bytes} of {self.path!r} must not be negative")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest {self.digest!r} of {self.path!r} must be {ALGORITHM}:<32 hex digits>")
        if not all(_DIGEST.fullmatch(part) for part in self.parts):
            raise ValueError(f"parts of {self.path!r} must be {ALGORITHM}:<32 hex digits>")
        if len(self.parts) != num_parts(self.size_bytes):
            raise ValueError(
                f"parts of {self.path!r} must be {num_parts(self.size_bytes)} digests, not {len(self.parts)}"
            )
        if self.parts and digest_of_parts(self.parts) != self.digest:
            raise ValueError(f"digest of {self.path!r} must be that of its parts")


def path_fault(path: str) -> str | None:
    """Why `path` must not be used inside a checkpoint, or None when it may."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > _MAX_PATH_BYTES:
        return "is empty or too long"
    if _UNPRINTABLE.search(path):
        return "has a control character, a surrogate or a backslash"
    if path.startswith("/"):
        return "is absolute"
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or str(PurePosixPath(path)) != path:
        return "leaves the checkpoint's folder or is not in its plain form"
    if path in {MANIFEST_NAME, PART_NAME}:
        return "is the manifest itself" if path == MANIFEST_NAME else "is the record of a node's part"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """What is known of a checkpoint before its files are written.

    Args:
        run_id: the run it belongs to; the same over all attempts of a run.
        attempt: which start of the run wrote it, from 1.
        step: optimizer steps done.
        epoch: epochs done, with the fraction of the running one.
        world_size: number of ranks that wrote it.
        global_batch: samples per optimizer step, over all ranks and micro-batches.
        gradient_accumulation: micro-batches per optimizer step and rank.
        samples_seen: samples the optimizer has seen since the start of the run.
        strategy: how the ranks share the model: `single`, `ddp`, `fsdp`, `deepspeed`.
        zero_stage: of DeepSpeed's ZeRO, 0 where it is off; None under other strategies, and in manifests of releases
            that did not state it.
        libraries: name → version of what wrote it.
        metrics: what was measured at this step, such as `eval_loss`.
        base: name, revision and digest of the frozen model whose adapters these are; None when the checkpoint holds a
            whole model.
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
        least = {
            "attempt": 1,
            "step": 0,
            "world_size": 1,
            "global_batch": 1,
            "gradient_accumulation": 1,
            "samples_seen": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} {getattr(self, name)} must be at least {minimum}")
        if not math.isfinite(self.epoch) or self.epoch < 0:
            raise ValueError(f"epoch {self.epoch} must be finite and not negative")
        if not all(math.isfinite(value) for value in self.metrics.values()):
            raise ValueError("metrics must be finite")
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise ValueError(f"zero_stage {self.zero_stage} must be 0, 1, 2 or 3")
        if self.base is not None and (set(self.base) != _BASE or not _DIGEST.fullmatch(self.base["digest"])):
            raise ValueError(
                f"base {dict(self.base)!r} must have a name, a revision and a digest {ALGORITHM}:<32 hex digits>"
            )

    def to_manifest(self, *, trigger: Trigger, files: tuple[FileEntry, ...]) -> "Manifest":
        """The manifest of a checkpoint that is complete now."""
        known = {one.name: getattr(self, one.name) for one in fields(ManifestFacts)}
        return Manifest(**known, trigger=trigger, created=clock.utc_now(), files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ManifestFacts):
    """What a checkpoint is.

    Args:
        trigger: why it was taken.
        created: RFC 3339 UTC.
        files: every file but the manifest, sorted by path.
    """

    file_name: ClassVar[str] = MANIFEST_NAME
    trigger: Trigger
    created: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        ManifestFacts.__post_init__(self)  # `super()` does not work in a class with slots that a decorator makes
        paths = [entry.path for entry in self.files]
        if not paths:
            raise ValueError("files must name at least one file")
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path and name no path twice")
        names = set(paths)
        for path in paths:
            if any(str(parent) in names for parent in PurePosixPath(path).parents):
                raise ValueError(f"files names {path!r} below another file")

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.size_bytes for entry in self.files)

    def to_bytes(self) -> bytes:
        """The canonical JSON, with a digest of itself."""
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
            "files": [_record(entry) for entry in self.files],
        }
        return seal_record(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read and check a manifest.

        Fields that a later release added to version 1 are kept out of the result but covered by the digest.

        Raises:
            ManifestError: with the reason; nothing of the content was used.
        """
        record = open_record(data, name=FORMAT, version=VERSION)
        try:
            manifest = cls._from_record(record)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ManifestError(f"it is malformed: {reason}") from error
        check_seal(record, data)
        return manifest

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> "Manifest":
        files = record["files"]
        if not isinstance(files, list):
            raise TypeError("files must be a list")
        entries: list[FileEntry] = []
        for item in cast("list[Any]", files):
            if not isinstance(item, dict):
                raise TypeError("files must hold objects")
            entry = cast("dict[str, Any]", item)
            entries.append(
                FileEntry(
                    path=_typed(entry, "path", str),
                    size_bytes=_typed(entry, "size_bytes", int),
                    digest=_typed(entry, "digest", str),
                    parts=_texts(entry.get("parts", [])),
                )
            )
        libraries = cast("dict[Any, Any]", _typed(record, "libraries", dict))
        if not all(isinstance(text, str) for pair in libraries.items() for text in pair):
            raise TypeError("libraries must map names to versions")
        metrics = cast("dict[Any, Any]", _typed(record, "metrics", dict))
        if not all(isinstance(value, float) for value in metrics.values()):
            raise TypeError("metrics must map names to numbers with a fraction")
        base = cast("dict[Any, Any] | None", _typed(record, "base", dict) if "base" in record else None)
        if base is not None and not all(isinstance(text, str) for text in base.values()):
            raise TypeError("base must be described by texts")
        return cls(
            run_id=_typed(record, "run_id", str),
            attempt=_typed(record, "attempt", int),
            step=_typed(record, "step", int),
            epoch=_typed(record, "epoch", float),
            trigger=Trigger(_typed(record, "trigger", str)),
            world_size=_typed(record, "world_size", int),
            global_batch=_typed(record, "global_batch", int),
            gradient_accumulation=_typed(record, "gradient_accumulation", int),
            samples_seen=_typed(record, "samples_seen", int),
            strategy=_typed(record, "strategy", str),
            zero_stage=_typed(record, "zero_stage", int) if "zero_stage" in record else None,
            libraries=libraries,
            metrics=metrics,
            base=base,
            created=_typed(record, "created", str),
            files=tuple(entries),
        )


Describe = Callable[[tuple[FileEntry, ...]], Manifest]
"""Makes the manifest for files, which are sorted by path."""


def _record(entry: FileEntry) -> dict[str, Any]:
    record = {"path": entry.path, "size_bytes": entry.size_bytes, "digest": entry.digest}
    return {**record, "parts": list(entry.parts)} if entry.parts else record


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
        raise TypeError("parts must be a list of texts")
    return tuple(cast("list[str]", value))


def _typed(record: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def seal_record(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `record`, with a digest of itself."""
    return _canonical({**record, _SELF: digest_bytes(_canonical(record))})


def open_record(data: bytes, *, name: str, version: int) -> dict[str, Any]:
    """The record that `seal_record` has written; `check_seal` says whether it is still what was written.

    Args:
        data: what was read.
        name: the format that it must state.
        version: likewise.

    Raises:
        ManifestError: it is something else.
    """
    record = parse_json_object(data)
    if record.get("format") != name:
        raise ManifestError(f"it is not a {name} (format is {record.get('format')!r})")
    stated_version = record.get("version")
    if type(stated_version) is not int or stated_version != version:  # True == 1, and is not a version
        raise ManifestError(
            f"its version is {stated_version!r}, this release reads version {version}",
            hint="use the release of safepoint that wrote it",
        )
    return record


def check_seal(record: Mapping[str, Any], data: bytes) -> None:
    """Compare `record`, which was read from `data`, with its own digest.

    Raises:
        ManifestError: it was altered.
    """
    record = dict(record)
    stated = record.pop(_SELF, None)
    try:
        is_intact = stated == digest_bytes(_canonical(record)) and data == _canonical({**record, _SELF: stated})
    except (ValueError, RecursionError) as error:
        # 1e999 and nesting at the very limit can be read, and only writing them fails.
        raise ManifestError(f"it is malformed: {error}") from error
    if not is_intact:
        raise ManifestError("it was altered after it was written: its own digest does not match")


def _canonical(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def parse_json_object(data: bytes) -> dict[str, Any]:
    """One JSON object in UTF-8, of at most `MAX_MANIFEST_BYTES`, without duplicate names, NaN and infinities.

    Raises:
        ManifestError: `data` is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return record

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        record = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ManifestError("it is not a JSON object")
    return cast("dict[str, Any]", record)
