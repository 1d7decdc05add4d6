"""The place that a run writes to: a folder of this node, and perhaps an object store behind it."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.storage.location import CLAIMS, Location, parse_location, resolve_claim


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """Where checkpoints go.

    Args:
        folder: the folder that the ranks write to and commit in.
        remote: the object store that committed checkpoints are published to; None without one.
    """

    folder: Path
    remote: Location | None = None


def place_output(text: str, *, local_dir: str | None, environ: Mapping[str, str] | None = None) -> OutputPlace:
    """The place that an `--output-dir` names.

    Args:
        text: a path, `file://`, `pvc://`, `s3://`, `gs://` or `az://`.
        local_dir: the folder to use in front of an object store; when None, one below the user's cache folder that
            belongs to the location.
        environ: the variables that name claims and cache folders; the process's own when None.

    Raises:
        UsageError: it is invalid, or a claim without a folder.
    """
    environ = os.environ if environ is None else environ
    try:
        location = resolve_claim(parse_location(text), environ.get(CLAIMS, ""))
    except ValueError as error:
        raise UsageError(f"{error}; training was not started") from error
    if not location.is_remote:
        return OutputPlace(folder=location.folder)
    return OutputPlace(folder=Path(local_dir) if local_dir else _cache_folder(location, environ), remote=location)


def _cache_folder(location: Location, environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{location.bucket}-{location.path}").strip("-")[:60]
    unique = hashlib.sha256(str(location).encode()).hexdigest()[:8]
    return Path(cache) / "safepoint" / "outputs" / f"{readable}-{unique}"
