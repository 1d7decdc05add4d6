"""One node's part of a checkpoint, where every node has a folder of its own (docs/adr/0008).

A part lies in a folder with the checkpoint's name, with `safepoint-part.json` in place of the manifest. So no reader
takes it for a checkpoint. The record names the checkpoint and the files of it that the node holds.

Promises: an altered record is refused, and reading executes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from safepoint.checkpoint.format.manifest import PART_NAME, FileEntry, Manifest, check_seal, open_record, seal_record
from safepoint.checkpoint.format.verify import Fault, read_manifest, read_record, verify_files
from safepoint.errors import ManifestError

_FORMAT = "safepoint-part"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """What one node holds of a checkpoint.

    Args:
        node: the node's number, from 0.
        num_nodes: how many parts make the checkpoint.
        paths: the files that the node holds, sorted.
        manifest: of the whole checkpoint.
        is_open: whether callbacks may still add files, which change the manifest. An open part is resumed from, and
            not uploaded.
    """

    file_name: ClassVar[str] = PART_NAME
    node: int
    num_nodes: int
    paths: tuple[str, ...]
    manifest: Manifest
    is_open: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.num_nodes:
            raise ValueError(f"node {self.node} must be at least 0 and below num_nodes {self.num_nodes}")
        unknown = set(self.paths) - {entry.path for entry in self.manifest.files}
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not in the manifest")

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The manifest's entries of the files that the node holds."""
        held = set(self.paths)
        return tuple(entry for entry in self.manifest.files if entry.path in held)

    def to_bytes(self) -> bytes:
        """Canonical JSON, with a digest of itself."""
        return seal_record(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "node": self.node,
                "num_nodes": self.num_nodes,
                "paths": list(self.paths),
                "open": self.is_open,
                "manifest": self.manifest.to_bytes().decode(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "NodePart":
        """Read and check it.

        Raises:
            ManifestError: with the reason; nothing of the content was used.
        """
        record = open_record(data, name=_FORMAT, version=_VERSION)
        check_seal(record, data)
        node, num_nodes, paths, text = (record.get(name) for name in ("node", "num_nodes", "paths", "manifest"))
        is_open = record.get("open")
        if type(node) is not int or type(num_nodes) is not int or not isinstance(text, str):
            raise ManifestError("it is malformed: node and num_nodes must be whole numbers, manifest a text")
        if not isinstance(is_open, bool):
            raise ManifestError("it is malformed: open must be true or false")
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in cast("list[Any]", paths)):
            raise ManifestError("it is malformed: paths must be a list of texts")
        try:
            held = tuple(cast("list[str]", paths))
            manifest = Manifest.from_bytes(text.encode())
            return cls(node=node, num_nodes=num_nodes, paths=held, manifest=manifest, is_open=is_open)
        except ValueError as error:
            raise ManifestError(f"it is malformed: {error}") from error


def read_part(folder: Path) -> NodePart:
    """Read the record of the part in `folder`.

    Raises:
        ManifestError: there is none, it is a link, or its content is unacceptable.
    """
    return NodePart.from_bytes(read_record(folder, PART_NAME))


def read_manifest_of_any(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, a whole one or one node's part.

    Raises:
        ManifestError: it is neither.
    """
    try:
        return read_manifest(folder)
    except ManifestError:
        if not (folder / PART_NAME).is_file():
            raise
        return read_part(folder).manifest


def verify_part(
    folder: Path, part: NodePart, *, deep: bool = True, progress: Callable[[int, int], None] | None = None
) -> tuple[Fault, ...]:
    """Every fault of the files that the node holds.

    Args:
        folder: where.
        part: what `read_part` found there.
        deep: also read every file and compare its digest.
        progress: called with bytes read so far and bytes in all.
    """
    return verify_files(folder, part.files, PART_NAME, deep=deep, progress=progress)
