"""What all checkpoints of one attempt have in common."""

import contextlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from safepoint._version import __version__

_LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "lightning", "numpy")


def library_versions() -> dict[str, str]:
    """Name → version of Safepoint, Python and the libraries that are imported by now."""
    versions = {"safepoint": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        if name in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the manifests of one attempt say.

    Args:
        run_id: see `ManifestFacts`.
        attempt: see `ManifestFacts`.
        attempt_id: names this attempt's working folders; all ranks have the same one.
        libraries: see `ManifestFacts`.
    """

    run_id: str
    attempt: int
    attempt_id: str
    libraries: Mapping[str, str] = field(default_factory=library_versions)
