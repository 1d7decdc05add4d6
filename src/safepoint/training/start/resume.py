"""The checkpoint that a run resumes from: the check of one that the user named, and the lease while ranks read it."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.checkpoint.format.verify import verify
from safepoint.errors import CheckpointError
from safepoint.foundation import files


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint to resume from; or a snapshot in memory, which may not be durable."""

    path: Path
    manifest: Manifest
    is_durable: bool = True


def named_manifest(path: Path, progress: Callable[[int, int], None] | None) -> Manifest:
    """The manifest of the checkpoint that the user named, which is verified.

    Args:
        path: of the checkpoint.
        progress: called with bytes read so far and bytes in all.

    Raises:
        CheckpointError: it is not valid.
    """
    verdict = verify(path, progress=progress)
    if verdict.manifest is None or not verdict.is_valid:
        raise CheckpointError(
            f"--resume {path} is not a valid checkpoint: {verdict.faults[0]}; training was not started",
            hint="name another one, or leave --resume out for the newest valid one",
        )
    if step_of(path) not in {None, verdict.manifest.step}:
        raise CheckpointError(
            f"--resume {path} is not a valid checkpoint: its manifest says step {verdict.manifest.step}, "
            f"the folder's name says {step_of(path)}; training was not started",
            hint="rename the folder to match its manifest, or name another checkpoint",
        )
    return verdict.manifest


@contextlib.contextmanager
def lease(point: ResumePoint | None) -> Generator[None]:
    """While ranks read the checkpoint, no other run on this folder prunes it."""
    if point is None:
        yield
        return
    with files.reading(point.path / MANIFEST_NAME):
        yield
