"""A checkpoint that a run may resume from, before its files are read. If several checkpoints have the same step,
`preference` decides which of them is tried first."""

from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.training.start.copies import Origin, list_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that may be resumed from.

    Args:
        manifest: the checkpoint's manifest.
        is_in_store: whether the store has the checkpoint.
        named: the path of a copy that the first rank has verified already, for example the checkpoint that `--resume`
            names; None if there is no such copy.
        foreign: where the checkpoint comes from, if another program wrote it; None if Safepoint wrote it. If a
            checkpoint of another program is in a folder, `named` is its path.
    """

    manifest: Manifest
    is_in_store: bool = False
    named: Path | None = None
    foreign: Origin | None = None

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return checkpoint_name(self.manifest.step)

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint's files."""
        return sum(entry.size_bytes for entry in self.manifest.files)


def preference(manifest: Manifest, run_id: str | None) -> tuple[bool, int, int]:
    """The key for sorting several checkpoints of one step. The checkpoint to try first has the largest key.

    Args:
        manifest: the manifest of a checkpoint.
        run_id: the run of the checkpoint in the store; None if the store has no checkpoint of this step.
    """
    return run_id in {None, manifest.run_id}, manifest.attempt, len(manifest.files)


def has_unlisted_files(path: Path) -> bool:
    """Whether a folder contains files that its manifest does not list. A framework might load them."""
    copy = list_copy(path)
    return copy is not None and bool(copy.strays)
