"""The record of what was uploaded to a store, so that the same content is not uploaded twice."""

import contextlib
import json
import threading
from pathlib import Path

from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.foundation.files import write_atomic


class UploadRecord:
    """Which files of a checkpoint are in the store, with what content and as what version.

    Args:
        path: the file that keeps the record for the next process; None keeps it in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._versions: dict[str, list[str]] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                noted = json.loads(path.read_bytes())
                self._versions = {str(name): [str(text) for text in texts] for name, texts in noted.items()}

    def version_of(self, entry: FileEntry) -> str | None:
        """As what version the file is in the store, if it was sent with this content."""
        digest, version = self._versions.get(entry.path, ["", ""])
        return version if digest == entry.digest else None

    def add(self, entry: FileEntry, version: str) -> None:
        """Note that the file is in the store as `version`."""
        with self._lock, contextlib.suppress(OSError):  # without it the file is sent once more
            self._versions[entry.path] = [entry.digest, version]
            if self._path is not None:
                write_atomic(self._path, json.dumps(self._versions).encode(), durable=False)

    def remove(self) -> None:
        """Forget everything: the checkpoint is committed in the store."""
        with self._lock, contextlib.suppress(OSError):
            self._versions = {}
            if self._path is not None:
                self._path.unlink(missing_ok=True)
