"""Stores for tests of higher layers: a folder in which a test can inject faults."""

from collections.abc import Callable
from pathlib import Path

from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme


class FaultyStore(LocalStore):
    """A store in a folder; `before` is called with the name and the key of each call, and may raise."""

    def __init__(self, root: Path, before: Callable[[str, str], None] = lambda name, key: None) -> None:
        super().__init__(Location(scheme=Scheme.FILE, path=str(root)))
        self.before = before
        self.calls: list[tuple[str, str]] = []

    def _note(self, name: str, key: str) -> None:
        self.calls.append((name, key))
        self.before(name, key)

    def stat(self, key, **kwargs):
        self._note("stat", key)
        return super().stat(key, **kwargs)

    def read(self, key, **kwargs):
        self._note("read", key)
        return super().read(key, **kwargs)

    def stream(self, key, sink, **kwargs):
        self._note("read", key)
        return super().stream(key, sink, **kwargs)

    def write(self, key, data, **kwargs):
        self._note("write", key)
        return super().write(key, data, **kwargs)

    def upload(self, key, source, **kwargs):
        self._note("upload", key)
        return super().upload(key, source, **kwargs)

    def delete(self, key, **kwargs):
        self._note("delete", key)
        return super().delete(key, **kwargs)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
