"""The settings files in another user's folder: they could run programs as the user who works there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.configuration import TRUSTED_FOLDERS, Configuration
from safepoint.foundation.shared_folders.ownership import user_name
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.local.spec import _claims

_STRANGER = 65534
_NAMES = {"safepoint.toml": "", "pyproject.toml": "tool.safepoint."}
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of another user, in which everyone else may only read."""
    made = tmp_path / "project"
    made.mkdir(mode=0o755)
    os.chown(made, _STRANGER, _STRANGER)
    return made


def write(folder: Path, name: str = "safepoint.toml", *, owner: int = _STRANGER, mode: int = 0o644) -> Path:
    """A settings file with harmful settings."""
    prefix = _NAMES[name]
    text = (
        f'[{prefix}submit]\nenv = ["PYTHONPATH=/evil"]\n[{prefix}run]\noutput-dir = "/evil"\n'
        f'[{prefix}checkpoints.list]\nimage = "evil/image"\n[{prefix}pvc]\ndata = "/evil"\n'
    )
    (folder / name).write_text(text)
    os.chown(folder / name, owner, owner)
    (folder / name).chmod(mode)
    return folder / name


def load(folder: Path, **variables: str) -> Configuration:
    return Configuration.load(folder, {"XDG_CONFIG_HOME": str(folder / "config"), **variables})


@pytest.mark.parametrize("name", _NAMES)
def test_a_file_of_another_user(name: str, folder: Path) -> None:
    write(folder, name)
    found = load(folder)
    assert not found.tables
    assert not found.pvc
    assert f"it belongs to user {user_name(_STRANGER)}" in found.ignored[0]
    assert f"{TRUSTED_FOLDERS}={folder}" in found.ignored[0]


@pytest.mark.parametrize("name", _NAMES)
def test_a_file_of_this_user_in_a_folder_of_another(name: str, folder: Path) -> None:
    write(folder, name, owner=0)
    assert load(folder).settings("run")["output-dir"].value == "/evil"


def test_a_file_that_everyone_may_write_to(folder: Path) -> None:
    write(folder, owner=0, mode=0o666)
    found = load(folder)
    assert not found.tables
    assert "everyone may write to it" in found.ignored[0]


def test_a_link_of_another_user_to_a_file_of_this_user(folder: Path, tmp_path: Path) -> None:
    """Its relative paths would start in the folder of the other user."""
    own = tmp_path / "own"
    own.mkdir()
    write(own, owner=0)
    link = folder / "safepoint.toml"
    link.symlink_to(own / "safepoint.toml")
    os.chown(link, _STRANGER, _STRANGER, follow_symlinks=False)
    assert not load(folder).tables
    os.chown(link, 0, 0, follow_symlinks=False)
    assert load(folder).tables


@pytest.mark.parametrize("kind", ["pipe", "not TOML", "not UTF-8", "too large"])
def test_a_file_that_cannot_be_used(kind: str, folder: Path) -> None:
    """It cannot stop the commands of other users."""
    path = folder / "safepoint.toml"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"not TOML": b"[[[", "not UTF-8": b"\xff\xfe"}.get(kind, b"x" * (2 << 20)))
    os.chown(path, _STRANGER, _STRANGER)
    assert len(load(folder).ignored) == 1


def test_another_program_s_file(folder: Path) -> None:
    """A pyproject.toml without a table of Safepoint is no reason for a warning."""
    path = folder / "pyproject.toml"
    path.write_text('[project]\nname = "x"\ndependencies = ["safepoint"]\n')
    os.chown(path, _STRANGER, _STRANGER)
    assert load(folder) == Configuration()


def test_a_folder_that_the_user_trusts(folder: Path) -> None:
    write(folder)
    (folder / "below").mkdir()
    write(folder / "below")
    assert load(folder, **{TRUSTED_FOLDERS: f"/elsewhere:{folder}"}).tables
    assert not load(folder / "below", **{TRUSTED_FOLDERS: str(folder)}).tables
    for named in ("", ".", "project", "/"):
        assert not load(folder, **{TRUSTED_FOLDERS: named}).tables


def test_a_trusted_folder_in_a_shared_one(tmp_path: Path) -> None:
    """Such as a project in /scratch."""
    shared = tmp_path / "scratch"
    (shared / "project").mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(shared / "project", _STRANGER, _STRANGER)
    write(shared / "project")
    assert not load(shared / "project").tables
    assert load(shared / "project", **{TRUSTED_FOLDERS: str(shared / "project")}).tables


def test_the_claims_of_the_sdk(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`TrainerClient` reads [pvc] in the folder that its jobs run in."""
    write(folder)
    with pytest.raises(SafepointError, match="no folder on this machine"):
        _claims("pvc://data/run", LocalConfig(working_dir=str(folder)), {})
    assert "belongs to user" in caplog.text


def test_a_command_in_the_folder(folder: Path, tmp_path: Path) -> None:
    """It says what it has ignored, and goes on."""
    write(folder)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "safepoint.cli.main", "config", "show", "--origin"],
        cwd=folder,
        env={**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "evil" not in done.stdout
    assert done.stderr.count("safepoint: warning: the settings in safepoint.toml were ignored") == 1
