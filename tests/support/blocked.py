"""Interpreters in which packages cannot be imported, as in the image of a pod that does not have them."""

import os
from pathlib import Path


def without(folder: Path, *packages: str) -> str:
    """A PYTHONPATH for child processes: in all of them, each import of one of the packages fails."""
    folder.mkdir(exist_ok=True)
    text = f"import sys\n\nsys.modules.update(dict.fromkeys({packages!r}))\n"
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
