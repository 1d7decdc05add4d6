"""The facts of one training that all modules of the engine use.

The facts are the ranks, the loop, the folder, and the step and the attempt with which the training has started.
"""

import contextlib
import dataclasses
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from safepoint._version import __version__
from safepoint.checkpoint.format.manifest import Describe, ManifestFacts, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import WorkingCheckpoint
from safepoint.storage.location import Location
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.loop import TrainingLoop
from safepoint.training.start.start import Start

_LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "lightning", "numpy")


def library_versions() -> dict[str, str]:
    """Name → version of Safepoint, of Python, and of the libraries that are imported already."""
    versions = {"safepoint": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        if name in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One training of this process.

    Args:
        context: the context of this rank.
        peers: all ranks.
        loop: the training loop; its state is saved.
        output: the folder for checkpoints.
        location: the object store to which the checkpoints are uploaded, or None.
        start: where the training starts, and whether all ranks share the folder.
        libraries: name → version of the libraries that are imported.
    """

    context: RankContext
    peers: Peers
    loop: TrainingLoop
    output: OutputFolder
    location: Location | None
    start: Start
    libraries: Mapping[str, str] = field(default_factory=library_versions)

    def manifest_facts(self) -> ManifestFacts:
        """The facts for the manifest of a checkpoint of the loop's current step."""
        return dataclasses.replace(self.loop.manifest_facts(self.start.attempt), libraries=self.libraries)

    def describe(self, trigger: Trigger) -> Describe:
        """A function that makes the manifest of the loop's current step from a list of files."""
        return lambda files: self.manifest_facts().to_manifest(trigger=trigger, files=files)

    def working_checkpoint(self, target: Path | None = None) -> WorkingCheckpoint:
        """Where the ranks write the state of the loop's current step; see `WorkingCheckpoint`."""
        attempt_id = self.start.attempt.attempt_id
        return WorkingCheckpoint(self.output, attempt_id=attempt_id, step=self.loop.step, target=target)
