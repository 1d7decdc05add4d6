"""Fetches the data set and the model of a job before its launchers start.

Promises: an input is recorded in the job's folder only when it is complete. All attempts of a job use the same files,
and fetch them only once, unless the files are deleted. A fetch that was interrupted leaves no record.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safepoint.errors import ExitCode, SafepointError
from safepoint.foundation.files import delete_tree, write_atomic
from safepoint.jobs.local.attempt.steps import run_step
from safepoint.jobs.local.attempt.workspace import private_cache
from safepoint.jobs.model.connections import with_keys
from safepoint.jobs.model.identity import IDENTITY
from safepoint.jobs.model.inputs import Input
from safepoint.jobs.model.spec import JobSpec


def fetch_inputs(
    spec: JobSpec, folder: Path, environ: Mapping[str, str], *, may_continue: Callable[[], bool] = lambda: True
) -> None:
    """Fetch the inputs of the job that were not fetched yet. When an input is fetched, the file with its keys is
    removed.

    Args:
        spec: the job.
        folder: the folder of the job.
        environ: the environment of the job's launchers.
        may_continue: called repeatedly; when it returns False, the fetch stops.

    Raises:
        SafepointError: an input cannot be fetched.
        JobStoppedError: `may_continue` returned False.
    """
    for one in spec.inputs:
        if fetched(folder, one) is None:
            _fetch(one, spec, folder, environ, may_continue)
        (folder / one.keys_file).unlink(missing_ok=True)


def fetched(folder: Path, one: Input) -> str | None:
    """The folder that holds an input of a job; None if the input was not fetched, or if that folder no longer exists.

    `folder` is the folder of the job.
    """
    try:
        path = json.loads(_record(folder, one).read_bytes())["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if isinstance(path, str) and Path(path).is_dir() else None


def _record(folder: Path, one: Input) -> Path:
    return folder / f"{one.step}.fetched.json"


def _fetch(
    one: Input, spec: JobSpec, folder: Path, environ: Mapping[str, str], may_continue: Callable[[], bool]
) -> None:
    request, failure = folder / f"{one.step}.request.json", folder / f"{one.step}.failure.json"
    cache = private_cache("inputs")
    working = cache / f".unfinished-{hashlib.sha256(str(_record(folder, one)).encode()).hexdigest()[:32]}"
    document = {
        "input": one.to_record(),
        "folder": str(cache),
        "working": str(working),
        "record": str(_record(folder, one)),
        "failure": str(failure),
    }
    write_atomic(request, json.dumps(document).encode(), durable=False)
    failure.unlink(missing_ok=True)
    command = [spec.python, "-P", "-m", "safepoint.jobs.local.attempt.fetch", str(request)]
    delete_tree(working)  # an earlier supervisor may have left this folder when it was killed
    try:
        code = run_step(command, folder, one.log, _environment(one, folder, environ), may_continue)
    finally:
        delete_tree(working)
    if code == 0 and fetched(folder, one) is not None:
        return
    reason, exit_code = _failure(failure, code)
    error = SafepointError(
        f"the {one.kind} {one.source} was not fetched: {reason}", hint=f"see {folder / 'logs' / one.log}"
    )
    error.exit_code = exit_code
    raise error


def _environment(one: Input, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        keys: dict[str, str] = json.loads((folder / one.keys_file).read_bytes())
    except FileNotFoundError:
        keys = {}
    # If the initializer sets keys, `with_keys` removes the variables of the environment that select a server. Without
    # this, the keys could be sent to another server than the server that the initializer names.
    own = {**one.env, **keys}
    environ = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **environ}
    return with_keys(environ, own) if IDENTITY.intersection(keys) else {**environ, **own}


def _failure(path: Path, code: int) -> tuple[str, ExitCode]:
    try:
        failure: dict[str, Any] = json.loads(path.read_bytes())
        return str(failure["reason"]), ExitCode(failure["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"its process ended with exit code {code}", ExitCode.FAILED
