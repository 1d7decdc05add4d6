"""Checks a job before it is stored. Errors that its start would report are reported at once."""

from pathlib import Path

from safepoint.errors import UsageError, require_torch
from safepoint.jobs.local.slots import check_size, count_slots
from safepoint.jobs.model.connections import keys_of
from safepoint.jobs.model.job_progress import with_claims
from safepoint.jobs.model.spec import JobSpec


def checked(spec: JobSpec) -> JobSpec:
    """Check that a job can run on this machine, and return its specification with the folders for claims (volumes).

    Raises:
        SafepointError: the job cannot run here; nothing was submitted.
    """
    require_torch("a job on this machine")
    if not Path(spec.working_dir).is_dir():
        raise UsageError(f"working_dir {spec.working_dir!r} is not a folder; nothing was submitted")
    if spec.data_connection is not None and spec.settings.output_dir is None:
        # Raises an error if there are no keys. For a job with an output location, `check_output` does this.
        keys_of(spec.data_connection)
    check_size(spec, count_slots())
    spec = with_claims(spec)
    if spec.settings.freeze_as_last_resort:
        from safepoint.transparent.self_test import find_working_criu  # imports numpy

        find_working_criu()
    if spec.settings.output_dir is not None:
        from safepoint.jobs.local.outputs import check_output  # imports the library of object stores

        check_output(spec, spec.settings.output_dir)
    return spec
