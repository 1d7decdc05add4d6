"""Data connections: named sets of keys for object stores, like the connection Secrets of OpenShift AI.

`~/.config/safepoint/connections.toml` has one table for each connection:

```toml
[minio]
AWS_ACCESS_KEY_ID = "…"
AWS_SECRET_ACCESS_KEY = "…"
AWS_S3_ENDPOINT = "https://minio.example:9000"
```

A job's launchers receive these values as environment variables, and commands that open an object store use them.
Safepoint copies the values to no other file, with one exception: a process image contains the memory of the
launchers, and therefore also these values.
"""

import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safepoint.errors import NotFoundError, UsageError
from safepoint.foundation.configuration import user_file
from safepoint.foundation.shared_folders.ownership import PlantedError, open_trusted
from safepoint.jobs.model.identity import IDENTITY, VariableKind, variables_of

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POSITION = re.compile(r"line \d+, column \d+|end of document")
_log = logging.getLogger("safepoint")
_NEEDED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def plain_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """From the variables of a TrainJob, or of another object, select those that this machine may use.

    Another person may have written the object. Variables that only select a region or an account are safe. All other
    variables are left out. Some of these variables choose the server or the proxy to which this machine sends the
    user's credentials. Others make this machine send the content of a file.
    """
    return {name: text for name, text in variables.items() if name in variables_of(VariableKind.PLACE)}


def keys_in_secret(variables: Mapping[str, str]) -> dict[str, str]:
    """From the variables of a cluster's Secret, select those that this machine may use.

    These are the keys and their owners, the region or the account, and the address of the server. The address of the
    server is used only together with keys. Without this rule, requests that are signed with the user's own keys could
    go to that server.
    """
    own = variables_of(VariableKind.KEY, VariableKind.KEY_OWNER, VariableKind.PLACE)
    if all(variables.get(name) for name in _NEEDED):
        own |= variables_of(VariableKind.SERVER)
    return {name: text for name, text in variables.items() if name in own}


def with_keys(environ: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment in which the variables of a connection replace the environment's own keys.

    Args:
        environ: the environment.
        keys: the variables of the connection. If there are none, the environment keeps its own keys.
    """
    kept = {name: text for name, text in environ.items() if not keys or name not in IDENTITY}
    return {**kept, **keys}


def connections_file() -> Path:
    """`connections.toml`, in the folder of the user's settings file."""
    return user_file().with_name("connections.toml")


def keys_of(name: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a connection, or the AWS_* variables of the environment if the file has no such connection.

    Raises:
        UsageError: the file cannot be read or is invalid, other users can read or change it, or the entry is invalid.
        NotFoundError: the file has no such connection, and the environment has no keys.
    """
    environ = os.environ if environ is None else environ
    path = connections_file()
    table = _read(path).get(name)
    if table is None:
        if all(environ.get(key) for key in _NEEDED):
            _log.warning(
                "there is no data connection %r in %s; the AWS_* variables of the environment are used", name, path
            )
            return {key: value for key, value in environ.items() if key.startswith("AWS_")}
        raise NotFoundError(
            f"there is no data connection {name!r} in {path}, and the environment has no keys",
            hint=f"add a table [{name}] with {' and '.join(_NEEDED)} to that file, or set the two variables",
        )
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name!r} must be a table [{name}]")
    keys: dict[str, str] = {}
    for key, value in table.items():  # pyright: ignore[reportUnknownVariableType]
        # Messages never show a value: it may be an access key.
        if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
            raise UsageError(f"{path}: {key!r} in [{name}] is not a valid name for an environment variable")
        if not isinstance(value, (str, bool, int)) or "\0" in str(value):
            raise UsageError(
                f"{path}: the value of {key} in [{name}] must be a string, a whole number, true or false"
            )
        keys[key] = str(value)
    missing = [key for key in _NEEDED if not keys.get(key)]
    if missing:
        raise UsageError(f"{path}: [{name}] has no {' and no '.join(missing)}")
    return keys


def _read(path: Path) -> dict[str, Any]:
    """The content of the file; empty when it does not exist."""
    try:
        with open_trusted(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"other users can read or change {path} (mode {stat.S_IMODE(mode):o}); it was not used",
                    hint=f"chmod 600 {path}",
                )
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except PlantedError as error:
        raise UsageError(
            f"{path} was not used: {error.strerror}", hint="set XDG_CONFIG_HOME to a folder of your own"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the file is not TOML, or not UTF-8
        # The parser's message and its error are not shown, because they may quote an access key.
        position = _POSITION.search(str(error))
        where = position[0] if position else "position unknown"
        raise UsageError(f"{path} is not valid TOML: {where}") from None
