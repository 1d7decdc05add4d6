"""Finding modules without importing them."""

import sys
from importlib.machinery import PathFinder


def is_importable(module: str, folder: str) -> bool:
    """Whether `python -m module`, started in `folder`, would find it."""
    # Only the first part: finding the rest would import the package.
    try:
        return PathFinder.find_spec(module.partition(".")[0], [folder, *sys.path]) is not None
    except (ImportError, ValueError):
        return False
