"""Where this process runs: its rank and its node, its folders, and what it can import."""

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from safepoint.errors import StorageError, UsageError
from safepoint.foundation.volumes.mounts import is_mounted_by_other

_SERVICE_PORT = re.compile(r"(?:SAFEPOINT|PET)_(?:.*_)?PORT(?:_[0-9]+_[A-Z0-9]+)?")
_SERVICE_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of this process among the ranks of the job.

    Args:
        rank: the number of this rank among the ranks of all nodes, from 0.
        world_size: number of ranks of the job.
        local_rank: the number of this rank among the ranks of this node, from 0.
        restart: how many times torch elastic has restarted the ranks; 0 at the first start.
        local_world_size: number of ranks on this node.
        node: this node's number, from 0.
        num_nodes: how many nodes there are.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    restart: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"RANK={self.rank} must be at least 0 and below WORLD_SIZE={self.world_size}; "
                "start the ranks with `safepoint run` or torchrun"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports and decides for the job."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Place":
        """Read torchrun's variables: RANK, WORLD_SIZE and so on. If they are not set, this process is the only
        rank.

        Raises:
            ValueError: a variable is not a whole number, or RANK is not from 0 to WORLD_SIZE - 1.
        """
        environ = os.environ if environ is None else environ

        def number(name: str, default: int) -> int:
            value = environ.get(name, "")
            if not value:
                return default
            try:
                return int(value)
            except ValueError as error:
                raise ValueError(f"{name}={value!r} must be a whole number") from error

        return cls(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            restart=number("TORCHELASTIC_RESTART_COUNT", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node=number("GROUP_RANK", 0),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
        )


def is_launched(place: Place) -> bool:
    """Whether a launcher has started this rank.

    A single rank counts as launched only if torchrun or `safepoint run` started it.
    """
    return place.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def host_name() -> str:
    """The name of this node, for messages only."""
    return os.uname().nodename  # the same as `socket.gethostname()`, without an import


def current_folder() -> str:
    """The current folder.

    Raises:
        UsageError: the folder was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder was deleted", hint="change to a folder that exists") from error


def home_folder() -> str:
    """The user's home folder. If the user has none, as in many containers, it is a folder in the temporary folder.

    Raises:
        UsageError: another user has made the folder in the temporary folder, or everyone may write to it. Files in
            this folder could make this user run programs.
        StorageError: there is no temporary folder.
    """
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return home
    return check_home(fallback_home())


def check_home(home: str) -> str:
    """Return `home`, a path in the temporary folder, if this user may use it as a home folder.

    Raises:
        UsageError: another user has made the folder, or everyone may write to it.
    """
    if not _may_be_home(home):
        raise UsageError(
            f"this user has no home folder, and {home} cannot replace it: another user has made the folder, or "
            "everyone may write to it; nothing was done",
            hint="set HOME to a folder of your own",
        )
    return home


def fallback_home() -> str:
    """The folder in the temporary folder that replaces a missing home folder.

    Raises:
        StorageError: there is no temporary folder.
    """
    return os.path.join(temporary_folder(), f"safepoint-home-{os.geteuid()}")


def _may_be_home(path: str) -> bool:
    """Whether there is nothing at `path`, or a folder of this user that not everyone may write to."""
    if is_mounted_by_other(path):
        return False
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:  # another user prevents access to the path now, and may allow access later
        return False
    return found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_IWOTH


def expand_home(path: str, environ: Mapping[str, str] | None = None) -> Path:
    """Replace `~` in `path` by this user's home folder (`home_folder`), and `~NAME` by the home folder of user NAME.

    Args:
        path: the path.
        environ: the environment whose HOME replaces `~`. If it is None, or if its HOME is not an absolute path,
            `home_folder` is used.

    Raises:
        UsageError: there is no user NAME. The path is not read as a folder `~NAME` in the current folder.
    """
    first, _, rest = path.partition("/")
    if first == "~":
        home = "" if environ is None else environ.get("HOME", "")
        return Path(home if os.path.isabs(home) else home_folder(), rest)
    expanded = os.path.expanduser(path)
    if first.startswith("~") and expanded == path:
        raise UsageError(f"{path}: there is no user {first[1:]}", hint="write the path of the folder instead")
    return Path(expanded)


def temporary_folder() -> str:
    """The folder for temporary files.

    Raises:
        StorageError: no such folder can be written.
    """
    import tempfile  # not at the top, because every command imports this module, and few call this function

    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise StorageError(
            "no folder for temporary files can be written: TMPDIR, /tmp, /var/tmp and the current folder were tried; "
            "nothing was started",
            hint="make one of these folders writable, or free space there; in a pod, mount an emptyDir at /tmp",
        ) from error


def is_importable(module: str, folder: str) -> bool:
    """Whether `python -m module`, started in `folder`, would find the module."""
    # Only the first part of the name is looked up: to find the rest, Python would import the package.
    first, dot, _ = module.partition(".")
    try:
        spec = PathFinder.find_spec(first, [folder, *sys.path])
    except (ImportError, ValueError):
        return False
    return spec is not None and (not dot or spec.submodule_search_locations is not None)


def forget_service_links() -> None:
    """Remove the variables of Kubernetes Services that look like settings of Safepoint or torchrun.

    For a Service called `safepoint-metrics`, Kubernetes sets SAFEPOINT_METRICS_PORT=tcp://10.0.0.7:80 in every pod of
    its namespace, and more variables whose names begin in this way. A variable is removed only if its value is such
    an address, because no setting for a port is an address.
    """
    for name, value in list(os.environ.items()):
        if _SERVICE_PORT.fullmatch(name) and _SERVICE_ADDRESS.match(value):
            del os.environ[name]
