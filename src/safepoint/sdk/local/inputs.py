"""Converts Kubeflow's initializers into the inputs of a job of this machine.

Promises: an initializer that cannot work here is refused before anything starts. Access keys and tokens are kept out
of the job's specification, which the history stores.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from safepoint.errors import UnsupportedError, UsageError, without_credentials
from safepoint.foundation.environment import expand_home
from safepoint.foundation.field_types import texts
from safepoint.jobs.model.inputs import HUB, STORE, Input
from safepoint.sdk.upstream import constants, types
from safepoint.storage.location import parse_location
from safepoint.storage.options import StorageOptions

TARGETS = {"dataset": constants.DATASET_PATH, "model": constants.MODEL_PATH}
"""The folders in which a function for a pod expects the downloads of the initializers."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_TEXTS = ("access_token", "endpoint", "access_key_id", "secret_access_key", "region", "role_arn")
_FORMS = "'hf://<owner>/<repository>', or the path of a folder, which begins with / or ./ or ~"
_HUB_KINDS = (types.HuggingFaceDatasetInitializer, types.HuggingFaceModelInitializer)
# Red Hat's 0.3 lacks some of these classes.
_STORE_KINDS = tuple(
    getattr(types, name) for name in ("S3DatasetInitializer", "S3ModelInitializer") if hasattr(types, name)
)
_CACHE_KINDS = tuple(getattr(types, name) for name in ("DataCacheInitializer",) if hasattr(types, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The data that is downloaded before the ranks start.

    Args:
        inputs: the data set and the model.
        files: files for the job's folder, by name: the keys and tokens.
    """

    inputs: tuple[Input, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict[str, bytes], repr=False)


def inputs_of(given: types.Initializer | None, folder: str, claim_folder: Callable[[str], str]) -> Inputs:
    """The inputs for Kubeflow's initializers.

    Args:
        given: Kubeflow's initializer, or None.
        folder: the folder that the job runs in. Relative paths begin in this folder.
        claim_folder: returns the folder of this machine for a location `pvc://<claim>/<path>`.

    Raises:
        UnsupportedError: an initializer needs a cluster.
        UsageError: a field of an initializer is invalid.
    """
    inputs: list[Input] = []
    files: dict[str, bytes] = {}
    for kind, target in TARGETS.items():
        initializer = getattr(given, kind, None)
        if initializer is None:
            continue
        one, keys = _input(kind, target, initializer, folder, claim_folder)
        inputs.append(one)
        if keys:
            files[one.keys_file] = json.dumps(keys).encode()
    return Inputs(inputs=tuple(inputs), files=files)


def _input(
    kind: str, target: str, given: Any, folder: str, claim_folder: Callable[[str], str]
) -> tuple[Input, dict[str, str]]:
    where = f"initializer.{kind}"
    if isinstance(given, _CACHE_KINDS):
        raise UnsupportedError(
            f"{where} is a {type(given).__name__}, which needs the cache servers of a cluster; nothing was started",
            hint="read the dataset's table in the training function itself; or copy the table's files to a folder or "
            "to s3://, and use "
            "HuggingFaceDatasetInitializer('/a/folder') or S3DatasetInitializer",
        )
    if not isinstance(given, (*_HUB_KINDS, *_STORE_KINDS)):
        raise UsageError(
            f"{where} is a {type(given).__name__}, which is not an initializer of Kubeflow; nothing was started",
            hint=f"use one of {', '.join(one.__name__ for one in (*_HUB_KINDS, *_STORE_KINDS))}",
        )
    ignore: list[str] = given.ignore_patterns or []
    texts("a list of patterns").check(f"{where}.ignore_patterns", ignore)
    uri: Any = given.storage_uri
    if not isinstance(uri, str) or not uri.strip():
        raise UsageError(f"{where}.storage_uri is {uri!r}; it must be a string; nothing was started")
    for name in _TEXTS:
        if not isinstance(getattr(given, name, None), str | None):  # the value is not shown: it may be a key
            raise UsageError(f"{where}.{name} must be a string or None; nothing was started")
    if isinstance(given, _STORE_KINDS):
        env, keys = _store(where, given)
        return Input(kind=kind, source=uri, target=target, ignore=tuple(ignore), env=env), keys
    source = _source(where, uri, folder, claim_folder)
    keys = {"HF_TOKEN": given.access_token} if given.access_token and source.startswith(HUB) else {}
    return Input(kind=kind, source=source, target=target, ignore=tuple(ignore)), keys


def _source(where: str, uri: str, folder: str, claim_folder: Callable[[str], str]) -> str:
    """The repository or the absolute path for the `storage_uri` of an initializer for the Hub."""
    if uri.startswith(HUB):
        repository = uri.removeprefix(HUB).rstrip("/")
        if not _REPOSITORY.fullmatch(repository):
            raise UsageError(
                f"{where}.storage_uri {uri!r} names no repository; nothing was started",
                hint="use 'hf://<owner>/<repository>'",
            )
        return f"{HUB}{repository}"
    if uri.startswith("pvc://"):
        path = claim_folder(uri)
    elif uri.startswith("file://"):
        path = url2pathname(urlsplit(uri).path)
    elif uri.startswith(("/", ".", "~")):
        path = os.path.join(folder, expand_home(uri))
    else:
        raise UsageError(
            f"{where}.storage_uri {uri!r} is not supported; nothing was started",
            hint=f"use {_FORMS}" + ("; for s3://, use an initializer for S3" if uri.startswith(STORE) else ""),
        )
    if not os.path.isdir(path):
        raise UsageError(f"{where}.storage_uri {uri!r}: there is no folder {path}; nothing was started")
    return os.path.abspath(path)


def _store(where: str, given: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The variables and the keys of an initializer for S3."""
    try:
        location = parse_location(given.storage_uri)
    except ValueError as error:
        raise UsageError(f"{where}.storage_uri: {error}; nothing was started") from error
    if not location.is_remote:
        raise UsageError(f"{where}.storage_uri {given.storage_uri!r} must begin with s3://; nothing was started")
    if given.role_arn:
        raise UnsupportedError(
            f"{where}.role_arn is not supported on this machine; nothing was started",
            hint="remove it. Set access_key_id and secret_access_key in the initializer; or set, in the environment "
            "of this program, either AWS_PROFILE, or both AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE",
        )
    keys = {"AWS_ACCESS_KEY_ID": given.access_key_id, "AWS_SECRET_ACCESS_KEY": given.secret_access_key}
    keys = {name: text for name, text in keys.items() if text}
    if len(keys) == 1:
        raise UsageError(
            f"{where} has only one of access_key_id and secret_access_key; nothing was started",
            hint="set both of them; or set neither, to use the variables AWS_* of the job",
        )
    env = {"AWS_ENDPOINT_URL_S3": without_credentials(given.endpoint)} if given.endpoint else {}
    env |= {"AWS_REGION": given.region} if given.region else {}
    try:
        StorageOptions.from_environment(env)
    except ValueError as error:
        raise UsageError(f"{where}: {error}; nothing was started") from error
    return env, keys
