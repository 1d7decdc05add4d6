"""The folder for compiled code, which PyTorch finds by the user's name in the temporary folder.

Another user can make it first. PyTorch would end with an error, or run the code that it finds there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.training.launcher.compile_cache import protect_compile_cache

_STRANGER = 65534
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, in which this user's compiled code is in `torchinductor_me`."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(_VARIABLE, "")
    monkeypatch.delenv(_VARIABLE)
    return folder


def plant(path: Path, kind: str) -> None:
    if kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to(path.parent)
    else:
        path.mkdir(mode=0o777)
        path.chmod(0o777)
    os.chown(path, _STRANGER, _STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_another_user_has_made_it(
    kind: str, temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant(temporary / "torchinductor_me", kind)
    protect_compile_cache(tmp_path)
    folder = Path(os.environ[_VARIABLE])
    assert folder == tmp_path / "cache" / "safepoint" / "torchinductor"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert "torchinductor_me belongs to user" in caplog.text


@pytest.mark.parametrize("is_made", [False, True])
def test_the_usual_folder_stays(is_made: bool, temporary: Path, tmp_path: Path) -> None:
    if is_made:
        (temporary / "torchinductor_me").mkdir()
    protect_compile_cache(tmp_path)
    assert _VARIABLE not in os.environ


def test_a_folder_that_the_user_has_chosen(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(temporary / "torchinductor_me", "folder")
    monkeypatch.setenv(_VARIABLE, "/mine")
    protect_compile_cache(tmp_path)
    assert os.environ[_VARIABLE] == "/mine"


def test_the_other_folder_is_another_user_s_too(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home folder is in the temporary folder, as in a container without one."""
    plant(temporary / "torchinductor_me", "file")
    plant(temporary / "cache", "folder")
    (temporary / "cache" / "safepoint").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    protect_compile_cache(tmp_path)
    assert os.environ[_VARIABLE] == str(tmp_path / "torchinductor")


@pytest.mark.ranks
def test_a_training(temporary: Path, tmp_path: Path) -> None:
    """PyTorch uses the private folder."""
    plant(temporary / "torchinductor_me", "file")
    script = tmp_path / "train.py"
    script.write_text(
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\nprint('CACHE', cache_dir(), flush=True)\n"
    )
    arguments = ("-P", "-m", "safepoint.cli.main", "run", "--output-dir", str(tmp_path / "o"), str(script))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"CACHE {tmp_path}/cache/safepoint/torchinductor" in done.stdout
