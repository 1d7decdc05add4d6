"""The files from which obstore takes keys.

When obstore has the path of a file, it opens the file each time that it makes a client. It opens the file with
Azure's token each time that a login has expired. By then, another user may have replaced a file that was checked
before. So obstore never gets the path of such a file. This module opens each file, checks and reads it, and copies
its content into a file in memory. obstore gets the path of the file in memory, which is in `/proc/self/fd`.
"""

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from safepoint.errors import AccessDeniedError
from safepoint.foundation.environment import expand_home
from safepoint.foundation.shared_folders.ownership import read_trusted
from safepoint.storage.location import Location, Scheme

_OPTIONS: Mapping[Scheme, Mapping[str, str]] = {
    Scheme.GS: {
        "GOOGLE_APPLICATION_CREDENTIALS": "application_credentials",
        "GOOGLE_SERVICE_ACCOUNT": "service_account",
        "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
    },
    Scheme.AZ: {"AZURE_FEDERATED_TOKEN_FILE": "federated_token_file"},
}
"""The variables that name files, and obstore's option for the path of each."""
_DEFAULT = Path("~/.config/gcloud/application_default_credentials.json")
_MOST_BYTES = 1 << 20


class KeyFiles:
    """The files in memory that obstore reads for a location.

    Args:
        location: the location that obstore opens with the keys.

    Raises:
        AccessDeniedError: a file cannot be read, or another user may have written it.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._paths = _find(location)
        self._files: dict[str, _FileInMemory] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the files that have changed. Kubernetes, for example, renews a token in its file.

        Raises:
            AccessDeniedError: see the class.
        """
        with self._lock:
            for option, path in self._paths.items():
                try:
                    stamp = _stamp(path)
                    file = self._files.get(option)
                    if file is None or file.stamp != stamp:
                        data = read_trusted(path, _MOST_BYTES)
                        self._files[option] = file = file or _FileInMemory()
                        file.replace(data, stamp)
                except OSError as error:
                    why = error.strerror or str(error)
                    raise AccessDeniedError(
                        f"the keys in {path} were not used: {why}; {self._location} was not opened",
                        hint="put your keys into a file in a folder that only you can write to",
                    ) from error

    @property
    def options(self) -> dict[str, str]:
        """The options for obstore's client."""
        return {option: file.path for option, file in self._files.items()}


class _FileInMemory:
    """A file that has no name. Its content changes in one step, even if a library opens the file at that moment."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("safepoint-keys", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.path = f"/proc/self/fd/{self._descriptor}"
        self.stamp: object = None

    def replace(self, data: bytes, stamp: object) -> None:
        with os.fdopen(os.memfd_create("safepoint-keys", os.MFD_CLOEXEC), "wb") as file:
            file.write(data)
            file.flush()
            os.dup2(file.fileno(), self._descriptor, inheritable=False)
        self.stamp = stamp


def _find(location: Location) -> dict[str, str]:
    """obstore's option → the path of its file."""
    options = _OPTIONS.get(location.scheme, {})
    variables = {name.upper(): value for name, value in os.environ.items()}
    found = {option: value for name, option in options.items() if (value := variables.get(name))}
    default = expand_home(str(_DEFAULT))
    if location.scheme is Scheme.GS and "application_credentials" not in found and os.path.exists(default):
        found["application_credentials"] = str(default)
    return found


def _stamp(path: str) -> object:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
