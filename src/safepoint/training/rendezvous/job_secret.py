"""The secret that only the nodes of a job have, and by which they recognize each other.

If the user names a file, the secret is the content of this file. If not, the first node to start writes a secret to
the job's object store or output folder, and the other nodes read it there. If the job has no output folder either,
each node makes a secret of its own.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ConditionError, StorageError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.foundation.shared_folders.ownership import WITHOUT_MODES, open_trusted
from safepoint.foundation.volumes.mounts import file_system_of
from safepoint.settings.run_settings import RunSettings, place_output
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import ABSENT

_log = logging.getLogger("safepoint")
SECRET_FILE = "SAFEPOINT_JOB_SECRET_FILE"
"""The environment variable that names a file with the secret."""
_NAME = ".safepoint/job-secret"
_MIN_BYTES = 16
_MAX_BYTES = 4096
_NUM_BYTES = 32
_IS_SECRET = re.compile(rb"[0-9a-f]{%d}" % (2 * _NUM_BYTES))
_WRITER_S = 5.0
_SQUASHED = 65534
"""The owner that a file server with root_squash may record for files that root writes."""
_OF_ONE_MACHINE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"}
"""Types of file systems that two machines never share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSecret:
    """A job's secret.

    Args:
        value: the bytes of the secret. `repr` does not show them.
        is_common: whether it is certain that every node has the same secret.
    """

    value: bytes = field(repr=False)
    is_common: bool


def agree_on_secret(settings: RunSettings, *, environ: Mapping[str, str] | None = None) -> JobSecret:
    """Return the job's secret. The docstring of this module says where it comes from.

    Raises:
        UsageError: the file that the user names cannot be used.
        StorageError: the object store or the output folder cannot be used.
    """
    environ = os.environ if environ is None else environ
    if name := environ.get(SECRET_FILE, ""):
        return JobSecret(value=_from_file(Path(name)), is_common=True)
    if settings.output_dir is None:
        return JobSecret(value=secrets.token_bytes(_NUM_BYTES), is_common=False)
    place = place_output(settings.output_dir, local_dir=settings.local_dir, environ=environ)
    if place.remote is not None:
        return JobSecret(value=_in_store(place.remote, environ), is_common=True)
    folder = place.folder.absolute()
    return JobSecret(value=_in_folder(OutputFolder(folder)), is_common=file_system_of(folder) not in _OF_ONE_MACHINE)


def _from_file(path: Path) -> bytes:
    try:
        with open_trusted(path) as file:
            value = file.read(_MAX_BYTES + 1).strip()
        if is_seeing_all() and _may_others_read(path):  # in a container, the users of the machine do not see the file
            _log.warning(
                "other users of this machine can read the job's secret in %s, and could join the job with it; chmod "
                "600 the file",
                printable(str(path)),
            )
    except OSError as error:
        raise UsageError(
            f"{SECRET_FILE}={path} cannot be read: {error.strerror}; no rank was started",
            hint="name a file that holds the same random bytes on every node",
        ) from error
    if not _MIN_BYTES <= len(value) <= _MAX_BYTES:
        raise UsageError(
            f"{SECRET_FILE}={path} holds {len(value)} bytes; no rank was started",
            hint=f"write {_MIN_BYTES} to {_MAX_BYTES} random bytes to this file, such as the output of `openssl rand "
            "-hex 32`",
        )
    return value


def _may_others_read(path: Path) -> bool:
    """Whether all users may read a file, and enter all folders above it."""
    real = Path(os.path.realpath(path))
    return bool(real.stat().st_mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IXOTH for folder in real.parents
    )


def _in_store(location: Location, environ: Mapping[str, str]) -> bytes:
    store = open_store(location, environ=environ)
    value = secrets.token_hex(_NUM_BYTES).encode()
    try:
        store.write(_NAME, value, condition=ABSENT)
    except ConditionError:
        value = bytes(store.read(_NAME, most_bytes=2 * _NUM_BYTES))
    # Another program or a person may have written the object. If the secret were empty or easy to guess, every
    # machine in the network could join the job.
    if not _IS_SECRET.fullmatch(value):
        raise StorageError(
            f"the object {_NAME} at {location} is not a secret that Safepoint has written; no rank was started",
            hint=f"delete the object, find out who has written it, or set {SECRET_FILE} to a file with a secret",
        )
    return value


def _in_folder(output: OutputFolder) -> bytes:
    output.create()  # refuses links that lead out of the folder
    path = output.control / Path(_NAME).name
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = no_links.create_file(path, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(_NUM_BYTES).encode())
        return _read_private(path, file_system_of(output.control))
    except OSError as error:
        raise StorageError(
            f"the job's secret in {path} cannot be used: {error.strerror}; no rank was started",
            hint=f"make the output folder writable, or set {SECRET_FILE} to a file with a secret",
        ) from error


def _check_private(status: os.stat_result, file_system: str) -> None:
    """Check that only this user can read the secret, and that only this user can have written it."""
    if file_system.startswith(WITHOUT_MODES):
        return
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "other users can read it; delete it, or chmod 600")
    # On a file server, a file that root wrote may belong to `_SQUASHED`.
    owners = {os.geteuid()} if file_system in _OF_ONE_MACHINE else {os.geteuid(), _SQUASHED}
    if status.st_uid not in owners:
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}, who may know it; delete it")


def _read_private(path: Path, file_system: str) -> bytes:
    """The secret in `path`. If another node is still writing it, wait until it is complete."""
    give_up_s = clock.monotonic_s() + _WRITER_S
    while True:
        with open_regular(path) as file:  # check the open file, because another user may replace the path
            _check_private(os.fstat(file.fileno()), file_system)
            value = file.read(_MAX_BYTES + 1)
        if _IS_SECRET.fullmatch(value):
            return value
        if clock.monotonic_s() > give_up_s:
            raise OSError(errno.EINVAL, "it is incomplete or changed; delete it")
        clock.sleep(0.05)
