"""Users without a home folder and HOME, as in many containers: no traceback, no file of the current folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.foundation import environment
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.environment import expand_home
from safepoint.foundation.temporary_folders.places import provide_home
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.credentials import find_keys


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that a path with an unreplaced `~`, or an empty HOME, would lead to."""
    for place in ("~", "."):
        for name, text in {".kube/config": "{}", ".aws/credentials": "[default]\n"}.items():
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("home", [None, "", ".", "~"])
def test_files_in_the_home_folder(home: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: home or path)
    for path in ("~", "~/.kube/config", "~/.aws/credentials"):
        found = expand_home(path, {"HOME": home or ""})
        assert found.is_absolute()
        assert not found.is_relative_to(folder)
        assert found.is_relative_to(environment.home_folder())
    source = find_keys(StorageOptions(), {"AWS_EC2_METADATA_DISABLED": "true"})
    assert "credentials" not in source.origin


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
@pytest.mark.parametrize("kind", ["folder", "link", "open"])
def test_another_user_has_made_the_home_folder(
    mode: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, a kubeconfig and keys of that user would count, whether the temporary folder is sticky or not."""
    tmp_path.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    home = tmp_path / f"safepoint-home-{os.geteuid()}"
    assert environment.home_folder() == str(home)
    settings = tmp_path / "of-another-user" / ".config" / "safepoint" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[local]\ncpu_slots = 3\n")
    if kind == "link":
        home.symlink_to("of-another-user")
        os.chown(home, 65534, 65534, follow_symlinks=False)
    else:
        (tmp_path / "of-another-user").rename(home)
        home.chmod(0o777 if kind == "open" else 0o755)
        os.chown(home, 0 if kind == "open" else 65534, 0)
    with pytest.raises(UsageError, match="set HOME"):
        Configuration.of_user({})


@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["sticky", "open"])
def test_the_home_folder_of_the_ranks(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries would run code that they find in a folder `~` of the current folder, where others may have put it."""
    (tmp_path / "shared" / "~").mkdir(parents=True)
    (tmp_path / "shared").chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", "~")
    monkeypatch.chdir(tmp_path / "shared")
    provide_home(tmp_path / "private")
    home = Path(os.path.expanduser("~"))
    is_sticky = bool(mode & 0o1000)
    assert home == (tmp_path / "shared" / f"safepoint-home-{os.geteuid()}" if is_sticky else tmp_path / "private")
    assert (home.stat().st_uid, home.stat().st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_has_made_the_home_folder_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "~")
    home = tmp_path / f"safepoint-home-{os.geteuid()}"
    home.mkdir()
    os.chown(home, 65534, 65534)
    with pytest.raises(UsageError, match="set HOME"):
        provide_home(tmp_path / "private")


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_a_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('HOME', os.path.expanduser('~'), flush=True)\n")
    code = "from safepoint.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "--output-dir", str(tmp_path / "o"), str(tmp_path / "train.py")],
        cwd=tmp_path,
        env={**os.environ, "HOME": "~", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"HOME {tmp_path}/safepoint-home-{os.geteuid()}" in done.stdout


def test_the_home_folder_of_an_unknown_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no user no-such-user"):
        expand_home("~no-such-user/config")
    (tmp_path / "safepoint.toml").write_text('[pvc]\ndata = "~no-such-user/data"\n')
    with pytest.raises(UsageError, match=r"line 2: .*there is no user no-such-user"):
        Configuration.load(tmp_path, {"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize("command", [("checkpoints", "list", "s3://bucket/run"), ("list", "--on", ".")])
def test_commands(command: tuple[str, ...], tmp_path: Path) -> None:
    """They say what is missing."""
    code = (
        "import pwd, sys, safepoint.cli.main\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown; sys.argv[0] = 'safepoint'; safepoint.cli.main.main()"
    )
    variables = {name: text for name, text in os.environ.items() if name in {"PATH", "PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=tmp_path,
        env={**variables, "AWS_EC2_METADATA_DISABLED": "true", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "safepoint: error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "bug in Safepoint" not in done.stderr
