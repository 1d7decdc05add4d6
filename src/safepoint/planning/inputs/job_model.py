"""Finds the model that a job will train, before the job runs. The model must be on this machine.

Promises: nothing is downloaded, and no weight is read. A path counts only if it means the same files in the pods:
an absolute path, or a path in the folder that is sent to the pods. A name of the Hugging Face Hub is looked up in the
cache of this machine.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safepoint.errors import UsageError
from safepoint.foundation.environment import expand_home, home_folder
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.planning.architectures.headers import read_config
from safepoint.planning.model import ModelShape, read_model

_HUB, _FILE = "hf://", "file://"
_CONFIG = "config.json"
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}", re.ASCII)
_MAX_REVISION_BYTES = 100
_MOST_CONFIGS = 100


class NamedModel(NamedTuple):
    """A model that a job names.

    Args:
        shape: its tensors.
        label: its name or its path, as the job states it.
        named_by: what names it, such as `--model_name_or_path`; for people.
        is_certain: False if the only hint to this model is in the files that are sent to the pods.
    """

    shape: ModelShape
    label: str
    named_by: str
    is_certain: bool


def find_model(
    name: str | None, *, code: Path | None = None, uri: str | None = None, environ: Mapping[str, str] | None = None
) -> NamedModel | None:
    """The model of a job; None if no model is named, or if it is not on this machine.

    Args:
        name: the value of the argument `--model_name_or_path`.
        code: the folder that is sent to the pods; None without such a folder.
        uri: the `storage_uri` of the job's model initializer; for a job on this machine, the folder or the URI from
            which its model is fetched.
        environ: the variables that name the cache of the Hugging Face Hub; None for the environment of this process.

    Raises:
        UsageError: the model is on this machine, but its size cannot be computed.
    """
    environ = os.environ if environ is None else environ
    if name is not None:
        shape = _at_path(name, code) or _in_cache(name, environ)
        if shape is not None:
            return NamedModel(shape, name, "--model_name_or_path", is_certain=True)
    # The argument may name a folder in the pods, to which the initializer fetches the model.
    if uri is not None and (name is None or os.path.isabs(name)):
        shape = _in_cache(uri.removeprefix(_HUB), environ) if uri.startswith(_HUB) else None
        if uri.startswith((_FILE, "/")):
            shape = _at_path(uri.removeprefix(_FILE), None)
        if shape is not None:
            return NamedModel(shape, uri, "the model of `initializer`", is_certain=True)
    if name is None and uri is None and code is not None:
        folders = _folders_of_models(code)
        if len(folders) == 1:
            return NamedModel(
                read_model(folders[0]), folders[0].name, "the only model in the folder that is sent", is_certain=False
            )
    return None


def _at_path(name: str, code: Path | None) -> ModelShape | None:
    path = Path(name)
    if not path.is_absolute():
        if code is None:
            return None
        path = code / path
        if not _is_inside(path, code):
            return None
    return read_model(path) if os.path.exists(path) else None


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _in_cache(name: str, environ: Mapping[str, str]) -> ModelShape | None:
    """A model of the Hub, in the version that this machine has downloaded last; None if it is not in the cache."""
    if not _REPOSITORY.fullmatch(name) or ".." in name:
        return None
    folder = _hub_cache(environ) / f"models--{name.replace('/', '--')}"
    try:
        revision = read_regular(folder / "refs" / "main", max_bytes=_MAX_REVISION_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / revision
    if not _REVISION.fullmatch(revision) or not os.path.exists(snapshot / _CONFIG):
        return None
    try:
        return read_model(snapshot / _CONFIG)
    except UsageError:
        # If the weights are on this machine, their headers are exact for any family.
        if any(snapshot.glob("*.safetensors")):
            return read_model(snapshot)
        raise


def _hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder for downloads of `huggingface_hub` (`HF_HUB_CACHE` in its constants)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return expand_home(environ[variable], environ)
    if environ.get("HF_HOME"):
        return expand_home(environ["HF_HOME"], environ) / "hub"
    base = environ.get("XDG_CACHE_HOME") or os.path.join(home_folder(), ".cache")
    return Path(base) / "huggingface" / "hub"


def _folders_of_models(code: Path) -> list[Path]:
    """The folders in `code` with the configuration of a model. Hidden folders are not sent, and do not count."""
    found: list[Path] = []
    for path in sorted(code.rglob(_CONFIG))[:_MOST_CONFIGS]:
        hidden = any(part.startswith(".") for part in path.relative_to(code).parts)
        if not hidden and _is_inside(path, code) and _is_of_model(path):
            found.append(path.parent)
    return found


def _is_of_model(path: Path) -> bool:
    try:
        return "model_type" in read_config(path)
    except (OSError, ValueError):
        return False
