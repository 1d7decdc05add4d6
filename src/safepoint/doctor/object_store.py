"""The object store: whether it can be reached, accepts the keys, and stores objects."""

from dataclasses import replace

from safepoint.doctor.finding import Finding, Status
from safepoint.errors import StorageError
from safepoint.foundation.units import format_duration
from safepoint.storage.location import Location
from safepoint.storage.opening import Tried, open_store, try_access
from safepoint.storage.options import StorageOptions

_WITHIN_S = 6.0
_SLOW_S = 3.0


def look_at_store(location: Location) -> Tried | StorageError:
    """Write, read, list and delete one small object there, or why not."""
    try:
        options = replace(StorageOptions.from_environment(), request_timeout_s=_WITHIN_S)
    except ValueError as error:
        return StorageError(str(error), hint="correct the variable")
    try:
        return try_access(open_store(location, options), within_s=_WITHIN_S)
    except StorageError as error:
        return error


def judge_store(tried: Tried | StorageError | None, location: Location) -> Finding:
    """Whether checkpoints can be kept there.

    Args:
        tried: the result; None without an answer in time.
        location: the output location.
    """
    check, why = "object store", "committed checkpoints are uploaded to it, and another node resumes from it"
    if tried is None:
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=f"{location}: no answer in time",
            why=why,
            fix="check the endpoint, AWS_ENDPOINT_URL_S3, and the network",
        )
    if isinstance(tried, StorageError):
        fix = tried.hint or "see the message; the store's own log may say more"
        return Finding(check=check, status=Status.FAILURE, found=f"{location}: {tried.message}", why=why, fix=fix)
    found = f"{location}{_how()}: one object written, read, listed and deleted in {format_duration(tried.duration_s)}"
    if not StorageOptions.from_environment().verify_tls:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{found}; its certificate is not verified",
            why="anyone on the network can read and change the checkpoints",
            fix="name the CA's PEM file in AWS_CA_BUNDLE, and unset SAFEPOINT_VERIFY_TLS",
        )
    if tried.duration_s > _SLOW_S:
        fix = "use a store nearby; uploads and resumes will be slow"
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)
    return Finding(check=check, status=Status.OK, found=found, why=why)


def _how() -> str:
    options = StorageOptions.from_environment()
    endpoint = f" at {options.endpoint}" if options.endpoint else ""
    return (
        f"{endpoint}, {'with AWS_ACCESS_KEY_ID' if options.has_keys else 'with the keys that the machine provides'}"
    )
