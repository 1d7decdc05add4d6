"""Another user fills the temporary folder before the template imports packages, or before ranks are started again.

Ranks are copies of the template, so they have what the template has found out about temporary folders. Python, also
in a child process of a rank, would use /var/tmp or the current folder, where another user may have put compiled code.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.foundation.temporary_folders.places import keep_temporary_folder


def test_what_the_template_has_found_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder had room when the template looked, and is full when its copy begins."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    keep_temporary_folder(tmp_path / "private")
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "private")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


def test_no_folder_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the user nor any that Python would choose: a rank uses the private one, and does not fail."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "full")])
    keep_temporary_folder(tmp_path / "private")
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "private")


_SCRIPT = """
import os, subprocess, sys, tempfile
from torch._inductor.codecache import _HEADER_DIR
import dill
child = subprocess.run(
    [sys.executable, "-I", "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True, text=True
)
print("FOLDERS", _HEADER_DIR, tempfile.gettempdir(), child.stdout.strip(), flush=True)
"""
_CODE = """
import os
from safepoint.training.launcher import launch
class Cache(launch.CompileCache):
    def protect(self):
        super().protect()
        os.environ["TMPDIR"] = {missing!r}
launch.CompileCache = Cache
from safepoint.cli.main import main
main()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("option", ["--preload", "--no-preload"])
def test_a_run(option: str, tmp_path: Path) -> None:
    """The folder cannot be written when packages are imported. The first option is the default."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "tmp").mkdir()
    code = _CODE.format(missing=str(tmp_path / "missing"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", option, "--output-dir", str(tmp_path / "o"), "train.py"],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folders = done.stdout.partition("FOLDERS ")[2].split()[:3]
    assert len(folders) == 3, done.stdout + done.stderr
    assert all("/safepoint-" in folder for folder in folders), "the folder of the launcher"
