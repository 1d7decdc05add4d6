"""Checks whether the packages of the extra `transparent` are installed. The packages are not imported."""

import importlib.util

from safepoint.errors import MissingExtraError


def missing_packages() -> list[str]:
    """The packages of the extra that are not installed."""
    return [name for name in ("numpy", "lz4", "cryptography") if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Check that numpy, LZ4 and cryptography are installed, before anything is frozen or written.

    Raises:
        MissingExtraError: the extra `transparent` is not installed.
    """
    missing = missing_packages()
    if missing:
        raise MissingExtraError(
            f"process images need {', '.join(missing)}, which this installation lacks; nothing was done",
            hint="pip install 'safepoint[transparent]'",
        )
