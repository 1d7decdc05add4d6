"""The process that fetches one data set or one model for a job of this machine.

The command is `python -m safepoint.jobs.local.attempt.fetch REQUEST`; `fetch_inputs` writes the request. Files from
S3 are written to a working folder, made durable, and renamed to a folder. The name of this folder is a digest of the
source, its settings, and the names, sizes and versions of the objects. So a folder with this name is complete.
Another job with the same source and settings uses the same folder, unless the objects have changed. Files from the
Hugging Face Hub stay in the cache of the Hub's client.
"""

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safepoint.errors import ExitCode, SafepointError, StorageError, UnsupportedError, UsageError, printable
from safepoint.foundation import clock, files
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.units import format_bytes
from safepoint.foundation.volumes.needed import shortage
from safepoint.jobs.model.inputs import HUB, STORE, Input
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store, StoredObject

_NUM_THREADS = 8
_SLOWEST_BYTES_S = 1 << 20
_LEAST_S = 300.0


def fetch(one: Input, folder: Path, working: Path) -> Path:
    """Fetch an input, and return the folder in which it is complete.

    Args:
        one: the data set or the model.
        folder: where folders with files from S3 are kept.
        working: a path in `folder` that does not exist. The caller deletes what is left there afterwards.

    Raises:
        SafepointError: the input cannot be fetched.
        OSError: the disk is full, or a path cannot be created.
    """
    if one.source.startswith(HUB):
        return _from_hub(one)
    if one.source.startswith(STORE):
        return _from_store(one, folder, working)
    if not os.path.isdir(one.source):
        raise UsageError(f"there is no folder {one.source}")
    _say(f"{one.source} is a folder of this machine, and is used where it is")
    return Path(one.source)


# ---- S3 ----------------------------------------------------------------------------------------------------------


def _from_store(one: Input, folder: Path, working: Path) -> Path:
    location = parse_location(one.source)
    store = open_store(location)
    found = _listing(store, one)
    if not found and location.path:  # the location may name a single object
        store = open_store(location.parent)
        found = [item for item in store.list() if item.key == location.name]
    if not found:
        raise StorageError(
            "there are no objects at this location", hint="check the bucket, the prefix and the patterns"
        )
    key = hashlib.sha256(repr((one.source, sorted(one.env.items()), _contents(found))).encode()).hexdigest()[:32]
    target, num_bytes = folder / key, sum(item.size_bytes for item in found)
    if target.is_dir():
        _say(f"{one.source} was fetched before, and has not changed since: {target}")
        return target
    why = shortage(folder, ((item.key, item.size_bytes) for item in found))
    if why:
        raise StorageError(f"{why}; nothing was fetched", hint="free some space, or set XDG_CACHE_HOME")
    _say(f"fetching {len(found)} files, {format_bytes(num_bytes)}, from {one.source}")
    working.mkdir(mode=0o700)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        tasks = [threads.submit(_fetch_object, store, item, working) for item in found]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    later = {item.key: item for item in store.list()}
    if [later.get(item.key) for item in found] != found:
        raise StorageError("its objects were changed while they were fetched", hint="resume the job")
    for path in (working, *(path for path in working.rglob("*") if path.is_dir())):
        files.fsync_folder(path)
    if not target.exists():  # if it exists, another job has just fetched the same files
        files.replace_folder(working, target, trash=folder)
    return target


def _listing(store: Store, one: Input) -> list[StoredObject]:
    # A pattern that ends with `/` stands for a folder, as in the Hub's client.
    patterns = [f"{pattern}*" if pattern.endswith("/") else pattern for pattern in one.ignore]
    return [item for item in store.list() if not any(fnmatchcase(item.key, pattern) for pattern in patterns)]


def _contents(found: Sequence[StoredObject]) -> list[tuple[str, int, str]]:
    return [(item.key, item.size_bytes, item.version) for item in found]


def _fetch_object(store: Store, item: StoredObject, working: Path) -> None:
    path = working / item.key
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Read-only, because several jobs may use the same files.
        descriptor = no_links.create_file(path, 0o400)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise StorageError(f"{printable(item.key)} is both an object and a folder of objects") from error
    with os.fdopen(descriptor, "wb") as file:

        def write(block: memoryview) -> None:
            file.write(block)

        if item.size_bytes:
            deadline_s = clock.monotonic_s() + max(_LEAST_S, item.size_bytes / _SLOWEST_BYTES_S)
            store.stream(item.key, write, start=0, length=item.size_bytes, deadline_s=deadline_s)
        file.flush()
        os.fsync(file.fileno())


# ---- the Hugging Face Hub ------------------------------------------------------------------------------------------


def _from_hub(one: Input) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed where the job trains", hint="pip install huggingface_hub"
        ) from error
    hub: Any = huggingface_hub  # Any, because the package declares its types only in part
    repository, ignore = one.source.removeprefix(HUB).strip("/"), list(one.ignore) or None
    is_offline = bool(constants.HF_HUB_OFFLINE)
    wanted: list[str] = []
    _say(f"{'looking in the cache for' if is_offline else 'fetching'} the {one.kind} {repository}")
    try:
        revision = None
        if not is_offline:
            # If the server cannot be reached, `snapshot_download` returns what an interrupted download has left in
            # the cache. So the names of the files are requested from the server, and compared with the files in the
            # cache.
            info = hub.HfApi().repo_info(repository, repo_type=one.kind)
            revision, names = info.sha, [item.rfilename for item in info.siblings or ()]
            wanted = list(hub.utils.filter_repo_objects(names, ignore_patterns=ignore))
        path: str = hub.snapshot_download(repository, repo_type=one.kind, revision=revision, ignore_patterns=ignore)
    except Exception as error:  # the exceptions of the client and of its HTTP library have no common class
        reason = str(error).strip().partition("\n")[0]
        command = f"hf download {repository} --repo-type {one.kind}"
        online_hint = "check storage_uri and access_token; to use only the cache, set HF_HUB_OFFLINE=1"
        hint = f"while this machine can reach the Hub, type: {command}" if is_offline else online_hint
        raise StorageError(f"{type(error).__name__}: {reason}", hint=hint) from error
    _check_snapshot(Path(path), wanted)
    if is_offline:
        _say("HF_HUB_OFFLINE is set: whether the cache has all files of the repository was not checked")
    return Path(path)


def _check_snapshot(path: Path, wanted: Sequence[str]) -> None:
    """Raise StorageError if a file is missing in a snapshot of the cache, or if its download was interrupted."""
    repository = path.parents[1]
    present = [name for name, _ in files.walk_files(path)]
    missing = [name for name in (*wanted, *present) if not os.path.exists(path / name)]
    if missing:
        others = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
        raise StorageError(
            f"the cache {path} lacks {printable(missing[0])}{others}", hint=f"delete {repository}, and resume the job"
        )
    if not wanted and list((repository / "blobs").glob("*.incomplete")):
        raise StorageError(
            f"a download into the cache {repository} was interrupted, and files may be missing",
            hint="resume the job when this machine can reach the Hub, and without HF_HUB_OFFLINE",
        )


def _say(text: str) -> None:
    print(printable(text), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Fetch the input that a request names, and record where it is, or why it was not fetched."""
    request: dict[str, Any] = json.loads(Path(arguments[0]).read_bytes())
    try:
        path = fetch(Input.from_record(request["input"]), Path(request["folder"]), Path(request["working"]))
        files.write_atomic(Path(request["record"]), json.dumps({"path": str(path)}).encode(), durable=True)
        _say(f"complete: {path}")
    except (SafepointError, ValueError, OSError) as error:
        reason, code = str(error), error.exit_code if isinstance(error, SafepointError) else ExitCode.FAILED
    except BaseException as error:  # noqa: BLE001  the job's message needs a reason in any case
        traceback.print_exc()
        reason, code = f"{type(error).__name__}: {error}", ExitCode.FAILED
    else:
        return 0
    print(f"safepoint: error: {printable(reason)}", file=sys.stderr, flush=True)
    failure = json.dumps({"reason": reason, "exit_code": int(code)}).encode()
    files.write_atomic(Path(request["failure"]), failure, durable=False)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
