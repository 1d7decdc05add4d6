"""A folder in the temporary folder is deleted while the run lasts, and another user makes it.

Programs such as systemd-tmpfiles delete what was not used for some days. A restarted rank must not use a folder that
another user has made since.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.foundation.temporary_folders.places import COMPILED_CODE, provide_home
from safepoint.training.launcher import compile_cache
from safepoint.training.launcher.compile_cache import CompileCache

_STRANGER = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("tmp", "fixed"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(compile_cache, "_FIXED", tmp_path / "fixed")
    for variable in compile_cache._NAMES:
        monkeypatch.setenv(variable, "me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    for variable in (*COMPILED_CODE, "TMPDIR", "CUTE_DSL_DISABLE_FILE_CACHING"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return tmp_path / "tmp"


def replace(folder: Path) -> None:
    """Delete `folder`, and make it as another user."""
    folder.rmdir()
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, _STRANGER, _STRANGER)


@pytest.mark.parametrize("name", ["torchinductor_me", "me"])
def test_a_folder_for_compiled_code(name: str, temporary: Path, tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    cache.protect()
    replace(temporary / name)
    cache.protect()
    for variable in ("TMPDIR", *COMPILED_CODE):
        assert not Path(os.environ[variable]).is_relative_to(temporary), variable


def test_a_folder_that_was_only_deleted(temporary: Path, tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    cache.protect()
    (temporary / "torchinductor_me").rmdir()
    cache.protect()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(temporary / "torchinductor_me")
    assert (temporary / "torchinductor_me").stat().st_uid == os.geteuid()


def test_private_folders_stay(temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All starts of the ranks use the same folders, and the warning comes once."""
    cache = CompileCache(tmp_path)
    cache.protect()
    replace(temporary / "me")
    cache.protect()
    before = {variable: os.environ[variable] for variable in ("TMPDIR", *COMPILED_CODE)}
    (temporary / "me").rmdir()
    caplog.clear()
    cache.protect()
    assert {variable: os.environ[variable] for variable in before} == before
    assert not caplog.records


def test_the_home_folder_of_a_user_without_one(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "~")
    provide_home(tmp_path / "private")
    home = Path(os.environ["HOME"])
    replace(home)
    provide_home(tmp_path / "private")
    assert os.environ["HOME"] == str(tmp_path / "private")
    provide_home(tmp_path / "private")
    assert os.environ["HOME"] == str(tmp_path / "private")


def test_the_home_folder_is_made_again(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")
    provide_home(tmp_path / "private")
    home = Path(os.environ["HOME"])
    home.rmdir()
    provide_home(tmp_path / "private")
    assert os.environ["HOME"] == str(home)
    assert (home.stat().st_uid, home.stat().st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_a_training(temporary: Path, tmp_path: Path) -> None:
    """The first start of the rank replaces the folder, and dies."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "folder = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.rmdir(folder)\n"
        "    os.mkdir(folder, 0o777)\n"
        f"    os.chown(folder, {_STRANGER}, {_STRANGER})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('OWNER', os.stat(folder).st_uid, flush=True)\n"
    )
    code = "from safepoint.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "--output-dir", str(tmp_path / "o"), str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"OWNER {os.geteuid()}" in done.stdout, done.stdout + done.stderr
