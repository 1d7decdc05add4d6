"""What has been sent to a store, so that the same is not sent twice."""

import contextlib
import json
import threading
from pathlib import Path

from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.foundation.files import write_atomic


class UploadRecord:
    """Which files of a checkpoint are in the store, with what content and as what version; survives the process.

    Args:
        path: where that is noted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._versions: dict[str, list[str]] = {}
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
            write_atomic(self._path, json.dumps(self._versions).encode(), durable=False)
