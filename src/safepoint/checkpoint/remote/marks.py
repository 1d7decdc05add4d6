"""A mark in `.safepoint/unfinished` records which objects a writer has begun to write or delete.

If the writer dies, the mark shows which objects are leftovers that can be deleted. (The marks of nodes, in
`.safepoint/parts`, are in `publish`.)

A mark is an object like any other. A stranger may have written it, to make Safepoint delete the files of other
programs. So a mark only says which objects may be leftovers. An object counts as a leftover only if it has the size
that the mark states, and if one of these is true:

- The object is not older than the mark: a writer writes the mark before the objects.
- The object still has the version that the mark states. Before a writer deletes a checkpoint, it records the versions
  of the checkpoint's objects in the mark, because these objects are older than the mark.
"""

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import parse_object
from safepoint.storage.store import StoredObject, is_key

MAX_MARK_BYTES = 2 * MAX_MANIFEST_BYTES
_MAX_VALUES = 2 * MAX_MANIFEST_BYTES // 100
"""The limit of the number of values in a mark. A mark has two values for each file: the size and the version. The
number of files is limited, because a manifest takes more than 100 bytes for each file."""
_MOST_LISTED_BYTES = 512 << 20
"""The memory for the files that all marks and manifests of a sweep list."""
_BYTES_OF_FILE = 150
"""The memory for a listed file, without its path."""
_WITHIN_S = 1800.0
"""How long a sweep or a cleaning may read marks."""
_log = logging.getLogger("safepoint")
_SLACK_S = 60.0
"""How much older than its mark an object may seem. The clocks of a store's servers differ, and the servers round the
times that they report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a mark states.

    Args:
        sizes: path → the sizes that the object may have. Several saves of one step may differ.
        versions: path → the version of an object that existed when the mark was written.
        modified_s: when the mark was written, seconds since 1970 by the store's clock; infinite if there is no mark.
        content: all fields of the mark, including the fields that this class does not use.
    """

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    modified_s: float = float("inf")
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, data: bytes, modified_s: float) -> "Mark":
        """Read a mark. Invalid fields are ignored."""
        content: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            content = parse_object(data or b"{}", max_bytes=MAX_MARK_BYTES, max_values=_MAX_VALUES)
        sizes = {path: _sizes_of(value) for path, value in _pairs(content.get("files")) if is_key(path)}
        versions = {path: value for path, value in _pairs(content.get("versions")) if isinstance(value, str)}
        return cls(
            sizes={path: found for path, found in sizes.items() if found},
            versions=versions,
            modified_s=modified_s,
            content=content,
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the JSON object that `parse` reads."""
        sizes = {path: found[0] if len(found) == 1 else list(found) for path, found in self.sizes.items()}
        return {"files": sizes, **({"versions": dict(self.versions)} if self.versions else {})}

    def names(self, path: str, item: StoredObject) -> bool:
        """Whether the object at `path` is a leftover; see the module's description."""
        if item.size_bytes not in self.sizes.get(path, ()):
            return False
        is_same = bool(item.version) and self.versions.get(path) == item.version
        return is_same or item.modified_s >= self.modified_s - _SLACK_S

    def extended(
        self, files: Mapping[str, int], found: Mapping[str, StoredObject], existing: Iterable[str] = ()
    ) -> "Mark":
        """This mark with more files, as it is to be written next.

        Args:
            files: path → size of the files that are going to be written.
            found: path → object, for each object that is in the store.
            existing: the paths of the objects in the store that were written before the mark.
        """
        # The files of this writer come first, because `Store.sweep` looks for uploads of a limited number of files.
        sizes = {path: {size_bytes} for path, size_bytes in files.items()}
        for path, known in self.sizes.items():
            sizes.setdefault(path, set()).update(known)
        versions = {path: item.version for path, item in found.items() if self.names(path, item)}
        for path in set(existing) & found.keys():
            sizes.setdefault(path, set()).add(found[path].size_bytes)
            versions[path] = found[path].version
        return Mark(sizes={path: tuple(sorted(known)) for path, known in sizes.items()}, versions=versions)


class ListedFiles:
    """The files that the marks and manifests of a sweep list, within a limit of memory.

    Strangers may have written any number of marks. If their files would take too much memory, the files of the other
    marks are left out, with a warning.
    """

    def __init__(self) -> None:
        self._files: dict[str, Mapping[str, int]] = {}
        self._num_bytes = 0
        self._is_full = False

    def add(self, name: str, files: Mapping[str, int]) -> None:
        """Add the files of `name`: path → size in bytes."""
        num_bytes = sum(sys.getsizeof(path) + _BYTES_OF_FILE for path in files)
        if self._num_bytes + num_bytes > _MOST_LISTED_BYTES:
            if not self._is_full:
                _log.warning(
                    "the marks of unfinished checkpoints list too many files; unfinished uploads of %s, and of other "
                    "checkpoints, stay in the store",
                    name,
                )
            self._is_full, files, num_bytes = True, {}, 0
        self._num_bytes += num_bytes
        self._files[name] = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Mapping[str, int]:
        return self._files[name]

    def larger_than(self, num_bytes: int) -> Iterator[str]:
        """The keys of all files of more than `num_bytes` bytes."""
        for name, files in list(self._files.items()):
            yield from (f"{name}/{path}" for path, size_bytes in files.items() if size_bytes > num_bytes)


def within_time(names: Iterable[str]) -> Iterator[str]:
    """Yield `names` for half an hour. Strangers may have written any number of marks."""
    until_s = clock.monotonic_s() + _WITHIN_S
    for name in names:
        if clock.monotonic_s() > until_s:
            _log.warning(
                "the store has too many marks of unfinished checkpoints; what they left from %s on stays until the "
                "next start",
                name,
            )
            return
        yield name


def _pairs(value: Any) -> list[tuple[str, Any]]:
    return list(cast("dict[str, Any]", value).items()) if isinstance(value, dict) else []


def _sizes_of(value: Any) -> tuple[int, ...]:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return tuple(size for size in values if type(size) is int and size >= 0)


def is_name(text: str) -> bool:
    """Whether `text` is the name of a checkpoint or of the final model."""
    return text == FINAL or (step_of(Path(text)) is not None and "/" not in text)
