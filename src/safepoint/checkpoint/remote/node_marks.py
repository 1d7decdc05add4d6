"""What nodes that upload parts of one checkpoint leave in the store for each other (docs/adr/0008).

`.safepoint/parts/<name>/<manifest's digest>/begun-<node>` says that a node is uploading its files, and
`…/<node>-of-<nodes>`, which holds the manifest, that all of them are there.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, Manifest
from safepoint.checkpoint.remote.remote_folder import PARTS, RemoteFolder, is_name
from safepoint.errors import ManifestError, ObjectNotFoundError
from safepoint.foundation import clock
from safepoint.storage.store import Store

_MARK = re.compile(r"([^/]+)/([0-9a-f]{32})/(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})")


class NodeMarks:
    """The marks for one manifest of a checkpoint.

    Args:
        store: where they are.
        name: of the checkpoint.
        manifest: of the whole checkpoint.
        deadline_s: when to give up on the store.
    """

    def __init__(self, store: Store, name: str, manifest: Manifest, deadline_s: float | None) -> None:
        self._store = store
        self._data = manifest.to_bytes()
        self._prefix = f"{PARTS}/{name}/{_hex_of(self._data)}"
        self._deadline_s = deadline_s

    def show_life(self, node: int) -> None:
        """Let other nodes see that `node` uploads its files."""
        self._store.write(f"{self._prefix}/begun-{node}", clock.utc_now().encode(), deadline_s=self._deadline_s)

    def add(self, node: int, num_nodes: int) -> None:
        """Let other nodes see that the files of `node` are there."""
        self._store.write(f"{self._prefix}/{node}-of-{num_nodes}", self._data, deadline_s=self._deadline_s)

    def are_complete(self) -> bool:
        """Whether the files of all nodes are there."""
        return any(manifest.to_bytes() == self._data for _, manifest in complete_marks(self._store, self._deadline_s))


def complete_marks(store: Store, deadline_s: float | None) -> Iterator[tuple[str, Manifest]]:
    """The name and the manifest of every checkpoint whose nodes have all left the mark of their files."""
    marked: dict[tuple[str, str, int], set[int]] = {}
    for key in _keys(store, deadline_s):
        match = _MARK.fullmatch(key)
        if match is not None and is_name(match[1]):
            marked.setdefault((match[1], match[2], int(match[4])), set()).add(int(match[3]))
    for (name, digest, num_nodes), nodes in marked.items():
        if nodes != set(range(num_nodes)):
            continue
        key = f"{PARTS}/{name}/{digest}/0-of-{num_nodes}"
        # Missing when another node has just committed; altered by a hostile writer.
        with contextlib.suppress(ObjectNotFoundError, ManifestError):
            size_bytes = min(store.stat(key, deadline_s=deadline_s).size_bytes, MAX_MANIFEST_BYTES)
            data = bytes(store.read(key, length=size_bytes, deadline_s=deadline_s))
            manifest = Manifest.from_bytes(data)
            if _hex_of(data) == digest and step_of(Path(name)) in {None, manifest.step}:
                yield name, manifest


def begun_by_nodes(remote: RemoteFolder, deadline_s: float | None) -> set[str]:
    """The names of what a node has begun to upload, and is newer than every checkpoint in the store."""
    names = {key.partition("/")[0] for key in _keys(remote.store, deadline_s)}
    newest = max(remote.steps(deadline_s=deadline_s), default=-1) if names else -1
    return {name for name in names if is_name(name) and (step_of(Path(name)) or 0) > newest}


def signs_of_life(store: Store, name: str, deadline_s: float | None) -> frozenset[tuple[str, str, float]]:
    """A value that changes while any node uploads its part of `name`."""
    found = store.list(f"{PARTS}/{name}", deadline_s=deadline_s)
    return frozenset((item.key, item.version, item.modified_s) for item in found)


def _keys(store: Store, deadline_s: float | None) -> list[str]:
    return [item.key.removeprefix(f"{PARTS}/") for item in store.list(PARTS, deadline_s=deadline_s)]


def _hex_of(data: bytes) -> str:
    return digest_bytes(data).rpartition(":")[2]
