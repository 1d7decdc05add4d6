"""The oldest and the newest release of each framework that the tests ran with (`make test-versions`)."""

import logging
import re
from importlib import metadata

from safepoint.errors import SafepointError

TESTED = {
    "torch": ("2.9", "2.13"),
    "transformers": ("4.57", "5.23"),
    "accelerate": ("1.12", "1.15"),
}
"""Name of the package → the oldest supported release, and the newest tested release."""
_log = logging.getLogger("safepoint")


def check_release(name: str, *, version: str | None = None, warns: bool = True) -> None:
    """Refuse releases before the oldest supported release, and warn of releases after the newest tested release.

    This function does not check whether a newer release of transformers has the methods and attributes that Safepoint
    needs. `integrations/transformers/hook.py` checks this.

    Args:
        name: the package's name, as in `TESTED`.
        version: the package's version; None for the version that is installed.
        warns: whether to log the warning. The warning of one rank is enough.

    Raises:
        SafepointError: the release is older than the oldest supported release.
    """
    try:
        found = metadata.version(name) if version is None else version
    except metadata.PackageNotFoundError:  # the package was imported from a folder, without being installed
        return
    oldest, newest = TESTED[name]
    if _number(found) < _number(oldest):
        raise SafepointError(
            f"{name} {found} is too old: Safepoint supports {name} {oldest} and newer; training was not started",
            hint=f"pip install '{name}>={oldest}'",
        )
    if warns and _number(found) > _number(newest):
        _log.warning(
            "%s %s is newer than %s, the newest release that this Safepoint was tested with. If something fails, "
            "install that release: pip install '%s==%s.*'",
            name,
            found,
            newest,
            name,
            newest,
        )


def _number(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) > 1 else (numbers[0] if numbers else 0, 0)
