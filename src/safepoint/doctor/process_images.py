"""Checks the requirements of process images. A training needs no process images, so a missing CRIU is not an error.

Each feature is tried out. A check of versions is not enough: even if the version of the kernel has a feature, the
configuration of the kernel, a container or a file system can refuse it.
"""

import os
import shutil
from pathlib import Path

from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.programs import ask
from safepoint.errors import SafepointError, UnsupportedError
from safepoint.foundation.files import FolderLock
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.transparent.criu.program import VARIABLE, Criu, version_of
from safepoint.transparent.packages import missing_packages
from safepoint.transparent.secret_folders import secret_folder

_LIMIT_S = 5.0
_CAPABILITIES = {"CAP_CHECKPOINT_RESTORE": 40, "CAP_SYS_ADMIN": 21}
_PRIVILEGED = "run as root; in a container, start the container with --privileged"


def examine_criu(status: Path = Path("/proc/self/status")) -> Finding:
    """Try to freeze and restore a small program with CRIU, as this user."""
    check, why = "criu", "it freezes processes that cannot save a checkpoint; trainings do not need it"
    program = _program()
    held = _capabilities(status)
    rights = f"with {' and '.join(held)}" if held else f"without {' and '.join(_CAPABILITIES)}"
    if program is None:
        return Finding(check=check, status=Status.OK, found=f"not installed; this process runs {rights}", why=why)

    def warning(found: str, fix: str) -> Finding:
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)

    try:
        version = version_of(program)
        answer = ask([program, "check"], limit_s=_LIMIT_S)
    except UnsupportedError as error:
        return warning(error.message.removesuffix("; nothing was done"), error.hint or "reinstall CRIU")
    except OSError as error:
        return warning(f"{program}: {error.strerror}", "reinstall CRIU")
    named = f"{program}, CRIU {version}"
    if answer.code == 0 and held:
        trouble = _try_out(Criu(path=program, version=version))
        if trouble is not None:
            return warning(f"{named}, {rights}; `criu check` succeeds, but {trouble[0]}", trouble[1])
        found = f"{named}, {rights}; a small program was frozen and restored"
        return Finding(check=check, status=Status.OK, found=found, why=why)
    result = "it works" if answer.code == 0 else answer.last_error or f"it ends with exit code {answer.code}"
    if answer.code is None:
        result = f"it does not answer within {_LIMIT_S:.0f} s"
    return warning(f"{named}, {rights}; `criu check`: {result}", f"{_PRIVILEGED}; the kernel must be 5.9 or newer")


def _try_out(criu: Criu) -> tuple[str, str] | None:
    """Why a small program could not be frozen and restored, and what to do about that; None if it could."""
    missing = missing_packages()
    if missing:
        return (
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            "pip install 'safepoint[transparent]'",
        )
    from safepoint.transparent.self_test import try_out  # imports numpy

    try:
        try_out(criu)
    except (SafepointError, OSError) as error:
        is_own = isinstance(error, SafepointError)
        reason = error.message if is_own else error.strerror or str(error)
        hint = error.hint if is_own else None
        return f"a small program could not be frozen and restored: {reason}", hint or _PRIVILEGED
    return None


def examine_namespaces() -> Finding:
    """Try to make a PID namespace. A restore needs one if the process numbers in the image are in use."""
    check, why = (
        "pid namespaces",
        "if the process numbers of an image are in use, the image is restored in a PID namespace",
    )
    if _program() is None:
        return Finding(check=check, status=Status.OK, found="not needed without CRIU", why=why)
    try:
        answer = ask(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"], limit_s=_LIMIT_S)
    except FileNotFoundError:
        found, fix = "`unshare` is not installed", "install util-linux"
    except OSError as error:
        found, fix = f"`unshare`: {error.strerror}", "install util-linux"
    else:
        if answer.code == 0:
            return Finding(check=check, status=Status.OK, found="`unshare` makes a namespace", why=why)
        found = f"`unshare` fails: {answer.last_error or f'exit code {answer.code}'}"
        fix = f"{_PRIVILEGED}; util-linux must be 2.32 or newer"
    return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)


def examine_locks(images: Path) -> Finding:
    """Check the locks that images and restores need.

    Args:
        images: the folder below which the images of jobs are; it need not exist.
    """
    check, why = (
        "image locks",
        "locks keep two commands from writing the same image, and hold restored processes until all of them exist",
    )
    if _program() is None:
        return Finding(check=check, status=Status.OK, found="not needed without CRIU", why=why)
    folder = next(path for path in (images, *images.parents) if path.is_dir())
    if shutil.which("flock") is None:
        found, fix = "the program `flock` is not installed", "install util-linux"
        return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)
    temporary = private_parent(prefers_memory=True)
    for place, variable in ((folder, "XDG_STATE_HOME"), (temporary, "TMPDIR")):
        fix = f"set {variable} to a folder on a local disk"
        try:
            with secret_folder(place, "safepoint-trial-") as trial:
                lock = FolderLock.acquire(trial / "lock", {"pid": os.getpid()})
                if lock is not None:
                    lock.release()
        except OSError as error:
            found = f"{place}: {error.strerror}"
            return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)
        if lock is None:
            found = f"{place} does not support locks"
            return Finding(check=check, status=Status.WARNING, found=found, why=why, fix=fix)
    return Finding(check=check, status=Status.OK, found=f"locks work in {folder} and in {temporary}", why=why)


def _program() -> str | None:
    return os.environ.get(VARIABLE) or shutil.which("criu")


def _capabilities(status: Path) -> list[str]:
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        effective = int(lines["CapEff"], 16)
    except (OSError, KeyError, ValueError):
        return []
    return [name for name, bit in _CAPABILITIES.items() if effective >> bit & 1]
