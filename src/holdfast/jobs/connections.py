"""Data connections: the keys of an object store under a name, as an OpenShift AI project has them as Secrets.

`~/.config/holdfast/connections.toml` has one table for each:

```toml
[minio]
AWS_ACCESS_KEY_ID = "…"
AWS_SECRET_ACCESS_KEY = "…"
AWS_S3_ENDPOINT = "https://minio.example:9000"
```

Values go into the environment of a job's launchers and nowhere else.
"""

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import NotFoundError, UsageError

_NEEDED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def connections_file() -> Path:
    """Where they are written down."""
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "holdfast" / "connections.toml"
    )


def keys_of(name: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a connection; where the file has none of this name, AWS_* of the environment.

    Raises:
        UsageError: others may read the file, or an entry cannot be meant.
        NotFoundError: there is no such connection, and the environment has no keys.
    """
    environ = os.environ if environ is None else environ
    path = connections_file()
    table = _read(path).get(name) if path.exists() else None
    if table is None:
        if all(environ.get(key) for key in _NEEDED):
            return {key: value for key, value in environ.items() if key.startswith("AWS_")}
        raise NotFoundError(
            f"there is no data connection {name!r} in {path}, and the environment has no keys either",
            hint=f"write a table [{name}] with {' and '.join(_NEEDED)} into it, or set these variables",
        )
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name!r} must be a table of variables")
    keys: dict[str, str] = {}
    for key, value in table.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(key, str) or not isinstance(value, (str, bool, int)):
            raise UsageError(f"{path}: the value of {key} in [{name}] must be a text")  # the value stays untold
        keys[key] = str(value)
    missing = [key for key in _NEEDED if not keys.get(key)]
    if missing:
        raise UsageError(f"{path}: [{name}] has no {' and no '.join(missing)}")
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno())
            if mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"{path} can be read by others (mode {stat.S_IMODE(mode.st_mode):o}); it was not used",
                    hint=f"chmod 600 {path}",
                )
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {_position(error)}") from None  # its text may hold a key


def _position(error: tomllib.TOMLDecodeError) -> str:
    """Where, and not what: the parser's message may quote a value."""
    _, _, position = str(error).rpartition("(")
    return position.rstrip(")") or "somewhere"


__all__ = ["connections_file", "keys_of"]
