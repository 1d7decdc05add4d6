"""Finds out whether this is the first start of a job. `resume` and `from_scratch` apply to the first start only.

A cluster replaces a job's pods by pods with the same options, so the options do not show which start is the first.
For this reason, the first start leaves a mark in the output location: a small file or object, which later starts find
there.
"""

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ObjectNotFoundError, StorageError
from safepoint.foundation import files
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.store import Store
from safepoint.training.collective.collective_wait import on_first_rank
from safepoint.training.collective.peers import Peers


class FirstStart:
    """Finds out whether this start is the first one; all calls are collective.

    Args:
        peers: all ranks.
        output: the folder that this rank uses.
        store: the object store behind the folders, or None. If there is a store, the mark is an object in it.
        settings: `resume`, `from_scratch`, `has_begun` and `first_start`.
    """

    def __init__(self, peers: Peers, output: OutputFolder, store: Store | None, settings: RunSettings) -> None:
        self._peers, self._output, self._store = peers, output, store
        has_choice = settings.from_scratch or settings.resume != "auto"
        self._may_be = has_choice and peers.place.restart == 0 and not settings.has_begun
        self._is_now: bool | None = None
        self._mark = None if settings.first_start is None else f"first-start-{settings.first_start}"

    def is_now(self) -> bool:
        """Whether this is the first start, and `resume` or `from_scratch` applies to it.

        This is so if all of the following are true:

        - `resume` is not `auto`, or `from_scratch` is set;
        - no earlier launcher has started training;
        - the ranks were not restarted;
        - no earlier start has left the mark.

        Raises:
            StorageError: the mark cannot be read.
        """
        if self._is_now is None:
            self._is_now = self._may_be and not on_first_rank(self._peers, self._is_marked)
        return self._is_now

    def leave_mark(self) -> None:
        """Leave the mark for later starts, because the options were applied. Do nothing if `is_now` is False.

        Raises:
            StorageError: the mark cannot be written.
        """
        if self.is_now() and self._mark is not None:
            on_first_rank(self._peers, self._write_mark)

    def _is_marked(self) -> bool:
        if self._mark is None:
            return False
        if self._store is None:
            try:
                return (self._output.control / self._mark).exists()
            except OSError as error:
                raise StorageError(f"the output folder {self._output.root} cannot be read: {error}") from error
        try:
            self._store.stat(f"{self._output.control.name}/{self._mark}")
        except ObjectNotFoundError:
            return False
        return True

    def _write_mark(self) -> None:
        assert self._mark is not None
        if self._store is None:
            try:
                files.write_atomic(self._output.control / self._mark, b"{}\n", durable=True)
            except OSError as error:
                raise StorageError(f"the output folder {self._output.root} cannot be written: {error}") from error
        else:
            self._store.write(f"{self._output.control.name}/{self._mark}", b"{}\n")
