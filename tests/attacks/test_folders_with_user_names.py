"""Libraries for GPUs cache compiled code in a folder with the name of the user, in the temporary folder or in /tmp.

flash-attn 4 and quack-kernels use `TMPDIR/USER`. The CUTLASS DSL before 4.3.2 uses `/tmp/USER`, and later releases
`TMPDIR/USER`. Another user can make such a folder first, with code in it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.foundation.temporary_folders.places import COMPILED_CODE
from safepoint.training.launcher import compile_cache
from safepoint.training.launcher.compile_cache import CompileCache

_STRANGER = 65534
_WITHOUT_FILES = "CUTE_DSL_DISABLE_FILE_CACHING"
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the user `me`."""
    for name in ("tmp", "fixed"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(compile_cache, "_FIXED", tmp_path / "fixed")
    for variable in compile_cache._NAMES:
        monkeypatch.setenv(variable, "me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    for variable in (*COMPILED_CODE, "TMPDIR", _WITHOUT_FILES):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return tmp_path / "tmp"


def plant(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    os.chown(folder, _STRANGER, _STRANGER)


def test_another_user_has_made_the_folder(temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(temporary / "me")
    CompileCache(tmp_path).protect()
    private = tmp_path / "cache" / "safepoint"
    assert not Path(os.environ["TMPDIR"]).is_relative_to(temporary)
    for variable in COMPILED_CODE:
        assert Path(os.environ[variable]).is_relative_to(private / "torchinductor"), variable
    assert f"{temporary}/me belongs to user" in caplog.text


def test_the_folder_is_made_before_another_user_can_make_it(temporary: Path, tmp_path: Path) -> None:
    CompileCache(tmp_path).protect()
    for folder in (temporary / "me", tmp_path / "fixed" / "me"):
        status = folder.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700)
    assert os.environ["TMPDIR"] == str(temporary)
    assert _WITHOUT_FILES not in os.environ
    for variable in COMPILED_CODE:
        assert Path(os.environ[variable]).is_relative_to(temporary / "torchinductor_me"), variable


def test_each_name_that_a_library_may_use(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUTLASS DSL looks at USER first, and `getpass` at LOGNAME."""
    monkeypatch.setenv("USER", "other-name")
    plant(temporary / "other-name")
    CompileCache(tmp_path).protect()
    assert not Path(os.environ["TMPDIR"]).is_relative_to(temporary)


@pytest.mark.parametrize("name", ["a/../../b", "..", "."])
def test_a_name_that_is_no_name_of_a_folder(
    name: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", name)
    CompileCache(tmp_path).protect()
    assert os.environ["TMPDIR"] == str(temporary)


def test_the_folder_in_tmp_whatever_tmpdir_is(temporary: Path, tmp_path: Path) -> None:
    plant(tmp_path / "fixed" / "me")
    CompileCache(tmp_path).protect()
    assert os.environ["TMPDIR"] == str(temporary), "other libraries do not look there"
    assert os.environ[_WITHOUT_FILES] == "1"


def test_folders_that_the_user_has_chosen(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(temporary / "me")
    for variable in COMPILED_CODE:
        monkeypatch.setenv(variable, f"/mine/{variable}")
    CompileCache(tmp_path).protect()
    assert [os.environ[variable] for variable in COMPILED_CODE] == [f"/mine/{variable}" for variable in COMPILED_CODE]


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_a_training(temporary: Path, tmp_path: Path) -> None:
    """The script looks for code as flash-attn 4 does."""
    plant(temporary / "me")
    (temporary / "me" / "kernel.py").write_text("print('OTHER CODE', flush=True)\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import getpass, os, runpy, tempfile\n"
        "path = os.path.join(tempfile.gettempdir(), getpass.getuser(), 'kernel.py')\n"
        "if os.path.exists(path): runpy.run_path(path)\n"
        "print('LOOKED', flush=True)\n"
    )
    code = "from safepoint.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "--output-dir", str(tmp_path / "o"), str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "LOOKED" in done.stdout, done.stdout + done.stderr
    assert "OTHER CODE" not in done.stdout
