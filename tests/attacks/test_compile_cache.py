"""The folder for compiled code, which PyTorch finds by the user's name in the temporary folder.

Another user can make it first, also after the launcher has started and before the first rank compiles, or may write
to it. PyTorch would end with an error, or run the code that it finds there. It looks for precompiled headers in the
temporary folder whatever TORCHINDUCTOR_CACHE_DIR is.
"""

import errno
import grp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.foundation.temporary_folders.places import COMPILED_CODE, keep_temporary_folder
from safepoint.foundation.volumes import mounts
from safepoint.training.launcher import compile_cache
from safepoint.training.launcher.compile_cache import CompileCache
from tests.support.access_lists import set_list

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
    monkeypatch.setattr(compile_cache, "_FIXED", tmp_path / "fixed")
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed").chmod(0o1777)
    monkeypatch.setattr(compile_cache, "_NAMES", ("LOGNAME",))
    for variable in (*COMPILED_CODE, "TMPDIR", "CUTE_DSL_DISABLE_FILE_CACHING"):
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
    CompileCache(tmp_path).protect()
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
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == str(tmp_path / "cache" / "safepoint" / "torchinductor")
    assert "may be written by other users" in caplog.text


def test_the_group_of_this_user_alone(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the umask of many systems: the group has the user's name, and no other members."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("root", "x", 0, ["root"])))
    (temporary / "torchinductor_me").mkdir()
    (temporary / "torchinductor_me").chmod(0o775)
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == str(temporary / "torchinductor_me")
    assert os.environ["TMPDIR"] == str(temporary)


def test_a_temporary_folder_in_which_others_can_replace_it(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.training.launcher.compile_cache.is_seeing_all", lambda: True)
    temporary.chmod(0o777)
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == str(tmp_path / "cache" / "safepoint" / "torchinductor")


def test_another_user_comes_after_the_launcher(temporary: Path, tmp_path: Path) -> None:
    """The launcher has made the folder, so that the name is taken before a rank compiles for the first time."""
    CompileCache(tmp_path).protect()
    folder = temporary / "torchinductor_me"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    code = f"import os; os.setuid({_STRANGER}); os.rename({str(folder)!r}, {str(folder) + '.old'!r})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
    assert os.environ["QUACK_CACHE_DIR"] == str(folder / "quack")


@pytest.mark.parametrize("is_made", [False, True])
def test_the_usual_folder_stays(is_made: bool, temporary: Path, tmp_path: Path) -> None:
    if is_made:
        (temporary / "torchinductor_me").mkdir()
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == str(temporary / "torchinductor_me")


def test_a_folder_that_the_user_has_chosen(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(temporary / "torchinductor_me", "folder")
    monkeypatch.setenv(_VARIABLE, "/mine")
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == "/mine"


def test_the_other_folder_is_another_user_s_too(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home folder is in the temporary folder, as in a container without one."""
    plant(temporary / "torchinductor_me", "file")
    plant(temporary / "cache", "folder")
    (temporary / "cache" / "safepoint").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    CompileCache(tmp_path).protect()
    assert os.environ[_VARIABLE] == str(tmp_path / "torchinductor")


def is_elsewhere(temporary: Path, tmp_path: Path) -> bool:
    """Whether the folder for compiled code and the temporary folder are private ones."""
    rest = {tmp_path / "cache" / "safepoint" / "temporary", tmp_path / "temporary"}
    is_private = os.environ[_VARIABLE] == str(tmp_path / "cache" / "safepoint" / "torchinductor")
    return is_private and Path(os.environ["TMPDIR"]) in rest


def test_no_room_for_it(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user has filled the temporary folder. They free it when the launcher has looked, and take the name."""
    make = Path.mkdir

    def full(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if path.parent == temporary:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", full)
    CompileCache(tmp_path).protect()
    assert is_elsewhere(temporary, tmp_path)
    assert "torchinductor_me cannot be created now (No space left on device), and another user could" in caplog.text


def test_another_user_hides_it(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a FUSE file system, which is unmounted when the launcher has looked."""
    look = os.lstat

    def hidden(path: os.PathLike[str] | str, *arguments: object, **named: object) -> os.stat_result:
        if os.fspath(path) == str(temporary / "torchinductor_me"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return look(path, *arguments, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]

    plant(temporary / "torchinductor_me", "folder")
    monkeypatch.setattr(os, "lstat", hidden)
    monkeypatch.setattr(os, "stat", lambda path, **named: hidden(path) if not named else look(path))
    monkeypatch.setattr(Path, "lstat", hidden)
    monkeypatch.setattr(Path, "stat", lambda path, **_: hidden(path))
    why = compile_cache._take(temporary / "torchinductor_me")
    assert "cannot be examined (Permission denied)" in why


@pytest.mark.parametrize("user", [0, _STRANGER])
def test_another_user_has_mounted_it(
    user: int, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A FUSE file system may state this user as the owner of its files."""
    point = temporary / "torchinductor_me"
    point.mkdir(mode=0o700)
    table = tmp_path / "mountinfo"
    table.write_text(f"40 22 0:50 / {point} rw - fuse evil rw,user_id={user},group_id=0,allow_other\n")
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    CompileCache(tmp_path).protect()
    assert is_elsewhere(temporary, tmp_path) is (user == _STRANGER)
    assert ("torchinductor_me is a file system that another user has mounted" in caplog.text) is (user == _STRANGER)


def test_an_access_control_list(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets another user write. The mode shows only that the group may, and the group is private."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("root", "x", 0, ["root"])))
    folder = temporary / "torchinductor_me"
    folder.mkdir()
    set_list(folder, user=7, group=5, mask=7, stranger=(_STRANGER, 7))
    assert folder.stat().st_mode & 0o777 == 0o775
    CompileCache(tmp_path).protect()
    assert is_elsewhere(temporary, tmp_path)


def test_a_link_to_a_folder_that_others_can_replace(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "is_seeing_all", lambda: True)
    target = tmp_path / "scratch" / "mine"
    target.mkdir(parents=True)
    target.chmod(0o700)
    target.parent.chmod(0o777)
    (temporary / "torchinductor_me").symlink_to(target)
    CompileCache(tmp_path).protect()
    assert is_elsewhere(temporary, tmp_path)


def test_the_temporary_folder_is_full_when_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would use /var/tmp then, where another user may have put a folder for compiled code."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(_VARIABLE, str(tmp_path / "missing" / "torchinductor_me"))
    monkeypatch.setenv("QUACK_CACHE_DIR", "/elsewhere/quack")
    keep_temporary_folder(tmp_path / "private", moving=(_VARIABLE, "QUACK_CACHE_DIR"))
    assert os.environ[_VARIABLE] == str(tmp_path / "private" / "torchinductor_me")
    assert os.environ["QUACK_CACHE_DIR"] == "/elsewhere/quack"
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "private")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


def test_the_temporary_folder_has_room_when_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    keep_temporary_folder(tmp_path / "private")
    assert tempfile.tempdir == os.environ["TMPDIR"] == str(tmp_path)


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_a_rank_uses_no_other_temporary_folder(temporary: Path, tmp_path: Path) -> None:
    """The launcher's temporary folder cannot be written when the ranks start, as if another user had filled it."""
    script = tmp_path / "train.py"
    script.write_text(
        "from torch._inductor.codecache import _HEADER_DIR\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print('CACHE', cache_dir(), 'HEADERS', _HEADER_DIR, flush=True)\n"
    )
    code = (
        "import os\n"
        "from safepoint.training.launcher import launch\n"
        "class Cache(launch.CompileCache):\n"
        "    def protect(self):\n"
        "        super().protect()\n"
        f"        os.environ['TMPDIR'] = {str(tmp_path / 'missing')!r}\n"
        "launch.CompileCache = Cache\n"
        "from safepoint.cli.main import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "--output-dir", str(tmp_path / "o"), str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"CACHE {temporary}/torchinductor_me" in done.stdout
    assert "HEADERS /var/tmp" not in done.stdout
    assert "HEADERS /tmp/torchinductor" not in done.stdout
    assert "safepoint-" in done.stdout.partition("HEADERS")[2], "the folder of the launcher"


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
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
