"""Checks whether checkpoints can be written to the output folder and the object store, and how fast."""

import contextlib
import errno
import fcntl
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from safepoint.doctor.finding import Finding, Status
from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.record_locks import SET_LOCK, lock_file
from safepoint.foundation.units import format_bytes, format_duration
from safepoint.foundation.volumes import needed
from safepoint.storage.location import Location, Scheme
from safepoint.storage.opening import Tried, open_store, try_access
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.credentials import find_keys

_FIRST_BYTES, _LARGEST_BYTES, _MOST_BYTES = 1 << 20, 32 << 20, 128 << 20
_LONG_ENOUGH_S = 0.8
_SLOW_BYTES_PER_S = 50_000_000
_STORE_LIMIT_S, _SLOW_STORE_S = 6.0, 3.0
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder that can be written.

    Args:
        folder: the folder of the test: the output folder, or the nearest existing folder above it.
        bytes_per_s: the speed of durable writes.
        free_bytes: free space for this user.
        has_locks: whether the file system supports locks, which prevent a second run in the folder.
        clock_ahead_s: the clock of the file system minus the clock of this machine.
    """

    folder: Path
    bytes_per_s: float
    free_bytes: int
    has_locks: bool
    clock_ahead_s: float


def look_at_folder(folder: Path) -> Disk:
    """Test the folder: for about a second, write to a file that has no name. The file disappears when it is closed.

    Raises:
        OSError: the folder cannot be written.
    """
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(place))
    free_bytes = needed.free_bytes(place)
    descriptor = _open_nameless(place)
    try:
        has_locks = True
        try:
            lock_file(descriptor, SET_LOCK, fcntl.F_WRLCK)
        except OSError:
            has_locks = False
        rate = _write(descriptor, most_bytes=min(_MOST_BYTES, free_bytes // 10))
        ahead_s = os.fstat(descriptor).st_mtime - clock.wall_s()
    finally:
        os.close(descriptor)
    return Disk(folder=place, bytes_per_s=rate, free_bytes=free_bytes, has_locks=has_locks, clock_ahead_s=ahead_s)


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    descriptor, name = tempfile.mkstemp(prefix=".safepoint-", dir=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    return descriptor


def _write(descriptor: int, *, most_bytes: int) -> float:
    """Write pieces of data durably, and return the bytes per second of the fastest piece.

    The first pieces are small, because a large piece takes too long on a slow disk.
    """
    data = os.urandom(_FIRST_BYTES) * (_LARGEST_BYTES // _FIRST_BYTES)  # some file systems do not store zeros
    size_bytes, done_bytes, took_s, rate = _FIRST_BYTES, 0, 0.0, 0.0
    while took_s < _LONG_ENOUGH_S and done_bytes + size_bytes <= max(most_bytes, _FIRST_BYTES):
        begun_s = clock.monotonic_s()
        written = 0
        while written < size_bytes:
            written += os.write(descriptor, memoryview(data)[written:size_bytes])
        os.fsync(descriptor)
        piece_s = max(clock.monotonic_s() - begun_s, 1e-6)
        took_s += piece_s
        done_bytes += size_bytes
        rate = max(rate, size_bytes / piece_s)
        size_bytes = min(2 * size_bytes, _LARGEST_BYTES)
    return rate


def judge_folder(disk: Disk | str, folder: Path, state_bytes: int | None) -> Finding:
    """Whether checkpoints can be written to the folder.

    Args:
        disk: the result of the test, or why it failed.
        folder: the output folder.
        state_bytes: the size of a checkpoint; None if unknown.
    """
    check, why = (
        "output folder",
        "checkpoints are written there, and a save must be durable before the grace period ends",
    )
    if isinstance(disk, str):
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=f"{folder}: {disk}",
            why=why,
            fix="use a folder that this user can write to, or fix its mount",
        )
    found = (
        f"{folder}{'' if disk.folder == folder.absolute() else f' (tested in {disk.folder})'}: "
        f"{format_bytes(round(disk.bytes_per_s))}/s, {format_bytes(disk.free_bytes)} free"
    )
    needed_bytes = 2 * state_bytes if state_bytes is not None else 1 << 30
    if disk.free_bytes < needed_bytes:
        return Finding(
            check=check,
            status=Status.FAILURE if state_bytes is not None else Status.WARNING,
            found=found,
            why="a new checkpoint must be complete before the previous checkpoint is deleted",
            fix=f"free {format_bytes(needed_bytes - disk.free_bytes)}, or use a folder on another disk",
        )
    if not disk.has_locks:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{found}, no file locks",
            why="locks prevent a second run in the folder, and show which unfinished files can be deleted",
            fix="mount the folder with locks (NFS: without nolock); otherwise, start only one run in it",
        )
    if disk.bytes_per_s < _SLOW_BYTES_PER_S:
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix="use a folder on a faster disk")
    return Finding(check=check, status=Status.OK, found=found, why=why)


# ---- the object store ----------------------------------------------------------------------------------------------


def look_at_store(location: Location) -> Tried | StorageError:
    """Write, read, list and delete one small object; returns an error instead of raising it."""
    try:
        options = replace(StorageOptions.from_environment(), request_timeout_s=_STORE_LIMIT_S)
    except ValueError as error:
        return StorageError(str(error), hint="fix the value of the variable")
    try:
        return try_access(open_store(location, options), within_s=_STORE_LIMIT_S)
    except StorageError as error:
        return error


def judge_store(tried: Tried | StorageError | None, location: Location) -> Finding:
    """Whether checkpoints can be kept in the object store.

    Args:
        tried: the result of the test; None if there was no answer in time.
        location: the output location.
    """
    check, why = "object store", "committed checkpoints are uploaded to it, and another node resumes from it"
    if tried is None:
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=f"{location}: no answer in time",
            why=why,
            fix="check the endpoint (for s3://: AWS_ENDPOINT_URL_S3) and the network",
        )
    if isinstance(tried, StorageError):
        fix = tried.hint or "see the message and the log of the store"
        return Finding(check=check, status=Status.FAILURE, found=f"{location}: {tried.message}", why=why, fix=fix)
    options = StorageOptions.from_environment()
    took = format_duration(tried.duration_s)
    found = f"{location}{_access(location, options)}: one object written, read, listed and deleted in {took}"
    if not options.verify_tls:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{found}; its certificate is not verified",
            why="anyone on the network path can read and change the checkpoints",
            fix="set AWS_CA_BUNDLE to the PEM file of the CA, and unset SAFEPOINT_VERIFY_TLS",
        )
    if tried.duration_s > _SLOW_STORE_S:
        fix = "use a store with a faster connection; uploads and resumes are slow"
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)
    return Finding(check=check, status=Status.OK, found=found, why=why)


def _access(location: Location, options: StorageOptions) -> str:
    """The endpoint, and where the keys came from; empty for a store whose client chooses both itself."""
    if location.scheme is not Scheme.S3:
        return ""
    endpoint = f" at {options.endpoint}" if options.endpoint else ""
    return f"{endpoint}, with the keys from {find_keys(options, os.environ).origin}"
