"""Where a run begins: which checkpoint, verified; agreed on by all ranks.

The first rank lists, verifies and picks; everybody takes its answer. A damaged newest checkpoint means the
next older one and a warning; nothing valid where something was means exit code 14, never silently from
scratch.
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import list_checkpoints, newest_valid, set_aside, step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.checkpoint.format.verify import Fault, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import CheckpointError, NothingValidError
from safepoint.foundation import clock, files
from safepoint.foundation.events.run_events import CheckpointRejected, Resumed, ResumedFromMemory, SetAside
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint to go on from; or a snapshot in memory, which may not be durable."""

    path: Path
    manifest: Manifest
    is_durable: bool = True


def choose(
    output: OutputFolder,
    settings: RunSettings,
    *,
    restart: int,
    report: Callable[[Event], None],
    progress: Progress | None = None,
    elsewhere: Callable[[int | None], ResumePoint | None] | None = None,
    in_memory: ResumePoint | None = None,
) -> ResumePoint | None:
    """Pick the checkpoint to go on from; the first rank does it, holding the output folder.

    Args:
        output: the claimed output folder.
        settings: `resume` and `from_scratch`. Both a named checkpoint and `from_scratch` mean the first start:
            when torch elastic starts failed ranks anew, or a job's next launcher does, what they saved since counts
            first.
        restart: how often the ranks were started anew.
        report: told what was rejected, set aside and chosen.
        progress: see `safepoint.checkpoint.format.verify.verify`.
        elsewhere: brings a valid checkpoint newer than a step, or than none, into the folder, if there is one.
        in_memory: a snapshot that this job's ranks have left; taken when no checkpoint is newer, without reading any.

    Returns:
        The checkpoint, or None to begin at step 0.

    Raises:
        NothingValidError: checkpoints exist, and none of them is valid.
        CheckpointError: the checkpoint that was named is not valid.
    """
    is_first_start = restart == 0 and not settings.has_begun
    if in_memory is not None and not is_first_start and settings.resume != "never":
        steps = [step_of(path) or 0 for path in list_checkpoints(output.root)]
        if in_memory.manifest.step >= max(steps, default=0):
            report(
                ResumedFromMemory(
                    step=in_memory.manifest.step,
                    num_files=len(in_memory.manifest.files),
                    size_bytes=in_memory.manifest.size_bytes,
                )
            )
            return in_memory
    if settings.resume == "never" or (settings.from_scratch and is_first_start):
        _set_aside(output, list_checkpoints(output.root), report)
        return None
    started_s = clock.monotonic_s()
    if settings.resume not in {"auto", "never"} and is_first_start:
        point = named_point(Path(settings.resume), progress)
        if point.path.parent.resolve() == output.root.resolve():
            newer = [path for path in list_checkpoints(output.root) if (step_of(path) or 0) > point.manifest.step]
            _set_aside(output, newer, report)
        else:
            _set_aside(output, list_checkpoints(output.root), report)
    else:
        newest = _newest(output, report=report, progress=progress, elsewhere=elsewhere)
        if newest is None and settings.resume != "auto":
            newest = named_point(Path(settings.resume), progress)  # nothing was saved since the first start
        if newest is None:
            return None
        point = newest
        # Damaged ones ahead of it would count as the newest, and retention would delete good ones in their favour.
        ahead = [path for path in list_checkpoints(output.root) if (step_of(path) or 0) > point.manifest.step]
        _set_aside(output, ahead, report)
    report(
        Resumed(
            step=point.manifest.step,
            path=str(point.path),
            num_files=len(point.manifest.files),
            size_bytes=point.manifest.size_bytes,
            duration_s=round(clock.monotonic_s() - started_s, 3),
        )
    )
    return point


def _newest(
    output: OutputFolder,
    *,
    report: Callable[[Event], None],
    progress: Progress | None,
    elsewhere: Callable[[int | None], ResumePoint | None] | None,
) -> ResumePoint | None:
    def rejected(path: Path, fault: Fault) -> None:
        report(CheckpointRejected(path=str(path), file=fault.file, reason=fault.reason))

    nothing_valid: NothingValidError | None = None
    local: ResumePoint | None = None
    try:
        found = newest_valid(output.root, rejected=rejected, progress=progress)
        local = ResumePoint(path=found[0], manifest=found[1]) if found else None
    except NothingValidError as error:
        nothing_valid = error
    newer = elsewhere(local.manifest.step if local else None) if elsewhere else None
    if newer is None and nothing_valid is not None:
        raise nothing_valid
    return newer or local


def named_point(path: Path, progress: Progress | None) -> ResumePoint:
    """The checkpoint that the user named, verified.

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
            hint="give the folder its own name back, or name another one",
        )
    return ResumePoint(path=path, manifest=verdict.manifest)


def _set_aside(output: OutputFolder, paths: list[Path], report: Callable[[Event], None]) -> None:
    place = set_aside(output.root, paths)
    if place is not None:
        report(SetAside(num_checkpoints=len(paths), path=str(place)))


@contextlib.contextmanager
def lease(point: ResumePoint | None) -> Generator[None]:
    """While ranks read the checkpoint, no other run on this folder prunes it."""
    if point is None:
        yield
        return
    with files.reading(point.path / MANIFEST_NAME):
        yield
