"""The folder for compiled code, which PyTorch finds by the user's name in the temporary folder.

Another user can make it first, also after the launcher has started and before the first rank compiles, or may write
to it. PyTorch would end with an error, or run the code that it finds there. It looks for precompiled headers in the
temporary folder whatever TORCHINDUCTOR_CACHE_DIR is.
"""

import grp
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
    for variable in (_VARIABLE, "QUACK_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    (tmp_path / "cache").mkdir(mode=0o700)
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
    rest = Path(os.environ["TMPDIR"])
    assert rest in {tmp_path / "cache" / "safepoint" / "temporary", tmp_path / "temporary"}
    assert (rest.stat().st_uid, rest.stat().st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_others_may_write_to_it(
    mode: int, temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this user's, and others may have written to it: everyone, or a group with other members."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("users", "x", 100, ["eve"])))
    (temporary / "torchinductor_me").mkdir()
    (temporary / "torchinductor_me").chmod(mode)
    protect_compile_cache(tmp_path)
    assert os.environ[_VARIABLE] == str(tmp_path / "cache" / "safepoint" / "torchinductor")
    assert "may be written by other users" in caplog.text


def test_the_group_of_this_user_alone(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the umask of many systems: the group has the user's name, and no other members."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("root", "x", 0, ["root"])))
    (temporary / "torchinductor_me").mkdir()
    (temporary / "torchinductor_me").chmod(0o775)
    protect_compile_cache(tmp_path)
    assert _VARIABLE not in os.environ
    assert "TMPDIR" not in os.environ


def test_a_temporary_folder_in_which_others_can_replace_it(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.training.launcher.compile_cache.is_seeing_all", lambda: True)
    temporary.chmod(0o777)
    protect_compile_cache(tmp_path)
    assert os.environ[_VARIABLE] == str(tmp_path / "cache" / "safepoint" / "torchinductor")


def test_another_user_comes_after_the_launcher(temporary: Path, tmp_path: Path) -> None:
    """The launcher has made the folder, so that the name is taken before a rank compiles for the first time."""
    protect_compile_cache(tmp_path)
    folder = temporary / "torchinductor_me"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    code = f"import os; os.setuid({_STRANGER}); os.rename({str(folder)!r}, {str(folder) + '.old'!r})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
    assert os.environ["QUACK_CACHE_DIR"] == str(folder / "quack")


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
        "from torch._inductor.codecache import _HEADER_DIR\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print('CACHE', cache_dir(), 'HEADERS', _HEADER_DIR, flush=True)\n"
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
    assert f"HEADERS {temporary}/torchinductor_me" not in done.stdout, (
        "the folder of the other user is used for headers"
    )
