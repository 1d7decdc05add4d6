"""The folders that this process trains into, and the object store behind each of them."""

from pathlib import Path

from safepoint.errors import UsageError
from safepoint.storage.location import Location


class Outputs:
    """One process may hold several trainings, each with an output folder of its own."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._stores: dict[Path, Location] = {}

    def claim(self, folder: Path, *, hint: str) -> None:
        """Note that a training of this process writes into `folder`.

        Raises:
            UsageError: an earlier training of this process does, with `hint` for what to do.
        """
        if self.contains(folder):
            raise UsageError(
                f"a second training into {folder} would resume from the checkpoints of the first", hint=hint
            )
        self._folders.add(folder.absolute())

    def contains(self, folder: Path) -> bool:
        """Whether a training of this process writes into `folder`."""
        return folder.absolute() in self._folders

    @property
    def is_empty(self) -> bool:
        """Whether no training of this process has begun."""
        return not self._folders

    def set_store(self, folder: Path, location: Location) -> None:
        """Checkpoints of `folder` are uploaded to `location`."""
        self._stores[folder.absolute()] = location

    def store_of(self, folder: str | Path) -> Location | None:
        """Where checkpoints of `folder` are uploaded to; None when they stay in the folder."""
        return self._stores.get(Path(folder).absolute())
