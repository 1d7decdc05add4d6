"""Job records for tests that start no job."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from safepoint.jobs.local.paths import job_folder, supervisor_lock
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings


def job_spec(name: str = "job", **changes: Any) -> JobSpec:
    """A job that would run `train.py`; `output_dir` is an option of the run."""
    settings = RunSettings(output_dir=changes.pop("output_dir", None), **changes.pop("settings", {}))
    fields: dict[str, Any] = {"program": ("train.py",), "python": sys.executable, "working_dir": "/"}
    return JobSpec(name=name, settings=settings, **(fields | changes))


def job_record(
    name: str = "job",
    state: JobState = JobState.QUEUED,
    *,
    wanted: RequestedAction = RequestedAction.RUN,
    cpu: int = 1,
    gpu: int = 0,
    priority: int = 0,
    age: int = 0,
    **figures: Any,
) -> JobRecord:
    """A job as the history stores it; a larger `age` means that it was submitted earlier."""
    spec = job_spec(name, cpu_per_node=cpu, gpu_per_node=gpu, priority=priority)
    created = f"2026-01-01T00:00:00.{500 - age:03d}Z"
    return JobRecord(name=name, spec=spec, state=state, wanted=wanted, created=created, changed=created, **figures)


_HOLD = """
import sys
from pathlib import Path
from safepoint.foundation.files import FolderLock
lock = FolderLock.acquire(Path(sys.argv[1]), {})
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def supervised(name: str) -> Iterator[None]:
    """Make commands believe that the job has a supervisor, which does nothing."""
    job_folder(name).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _HOLD, str(supervisor_lock(name))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        yield


def changed(job: JobRecord, **changes: Any) -> JobRecord:
    """The same job a moment later."""
    return replace(job, **changes)
