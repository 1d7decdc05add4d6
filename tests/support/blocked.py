"""Interpreters in which packages cannot be imported, as in the image of a pod that does not have them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import environment

TRAINING = ("torch", "numpy", "transformers", "accelerate")
"""What a client does not have: packages that only a training needs."""


def without(folder: Path, *packages: str) -> str:
    """A PYTHONPATH for child processes: in all of them, each import of one of the packages fails."""
    folder.mkdir(exist_ok=True)
    text = f"import sys\n\nsys.modules.update(dict.fromkeys({packages!r}))\n"
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


class Client:
    """An interpreter that cannot import what trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"PYTHONPATH": without(folder / "blocked", *TRAINING), "HOME": str(folder / "home")}

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        env = environment(**self.variables, **variables)
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.python("-P", "-m", "safepoint.cli.main", *words, **variables)
