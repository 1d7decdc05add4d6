"""Environments with what OpenShift AI's images have, and nothing else: the pins of a set and what they require.

`make test-openshift-images` makes them in `.venv/images`, or in the folder that SAFEPOINT_TEST_IMAGES names. The
environments of `make test-versions` also have the tools of the tests, and with them boto3.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROJECT = Path(__file__).parent.parent.parent
_FOLDER = Path(os.environ.get("SAFEPOINT_TEST_IMAGES") or _PROJECT / ".venv" / "images")
# Runs in the environment, which has `packaging`, because transformers requires it.
_DISTRIBUTIONS = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

found = {canonicalize_name(one.name): one for one in importlib.metadata.distributions()}
wanted, explained = [Requirement(line) for line in sys.argv[1:]], set()
while wanted:
    requirement = wanted.pop()
    name = canonicalize_name(requirement.name)
    extras = sorted(requirement.extras) or [""]
    if (name, *extras) in explained:
        continue
    explained.add((name, *extras))
    for line in found[name].requires or []:
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            wanted.append(needed)
names = {name for name, *_ in explained}
print(json.dumps({name: one.version if name in names else "" for name, one in found.items()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The environment of one set of releases."""

    name: str

    @property
    def python(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"

    @property
    def pins(self) -> dict[str, str]:
        """The releases that the image names, by package."""
        lines = (_PROJECT / "constraints" / f"{self.name}.txt").read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

    def unavailable(self) -> str | None:
        """Why there is no such environment here, or None."""
        if self.python.exists():
            return None
        return f"{self.python} is missing: `make test-openshift-images` makes it"

    def distributions(self, *requirements: str) -> dict[str, str]:
        """The releases of all installed packages; an empty string for those that none of the requirements brings."""
        command = [str(self.python), "-I", "-c", _DISTRIBUTIONS, *requirements]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def cannot_import(self, *packages: str) -> bool:
        """Whether none of the packages can be imported."""
        code = "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, sys.argv[1:])))"
        return subprocess.run([self.python, "-I", "-c", code, *packages], check=False).returncode == 0


__all__ = ["Image"]
