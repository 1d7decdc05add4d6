"""Files of this user, whose content is obeyed, where a stranger can write them or give them a name.

A folder of a stranger passes its group, or the rights in its access control list, on to the files that this user
makes there. And where a kernel allows it, a stranger gives a second name to a file of this user: its relative paths
then lead into the stranger's folder.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import SafepointError, StorageError, UsageError
from safepoint.foundation.configuration import TRUSTED_FOLDERS, Configuration
from safepoint.foundation.shared_folders.ownership import PlantedError, open_trusted
from safepoint.jobs.model.connections import keys_of
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.credentials import find_keys
from safepoint.training.launcher.status_post import StatusTarget
from safepoint.training.rendezvous.job_secret import SECRET_FILE, agree_on_secret
from tests.support.certificates import make_certificates

_STRANGER = 65534
_SETTINGS = '[submit]\nenv = ["PYTHONPATH=src"]\n'
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

Place = Callable[[Path, str], Path]


def folder_of(owner: int, path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


def give_acl(folder: Path) -> None:
    """New files in the folder may be written by the stranger, whatever the umask is."""
    entries = [
        (1, 7, 0xFFFFFFFF),
        (2, 6, _STRANGER),
        (4, 0, 0xFFFFFFFF),
        (0x10, 7, 0xFFFFFFFF),
        (0x20, 5, 0xFFFFFFFF),
    ]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("the file system has no access control lists")


def write(path: Path, text: str) -> Path:
    before = os.umask(0o022)
    try:
        path.write_text(text)
    finally:
        os.umask(before)
    return path


def by_acl(folder: Path, name: str) -> Path:
    made = folder_of(_STRANGER, folder / "shared", 0o777)
    give_acl(made)
    return made / name


def by_acl_above(folder: Path, name: str) -> Path:
    """A project that this user has made in the folder of the stranger."""
    made = by_acl(folder, "project") / "src"
    made.mkdir(parents=True)
    made.parent.chmod(0o755)
    return made / name


def by_group(folder: Path, name: str) -> Path:
    """The file gets the group of the folder, and a umask of 002 lets the group write."""
    return folder_of(_STRANGER, folder / "shared", 0o2777) / name


def by_group_above(folder: Path, name: str) -> Path:
    made = by_group(folder, "project")
    made.mkdir()
    return made / name


PLACES: list[Place] = [by_acl, by_acl_above, by_group, by_group_above]


def make(place: Place, folder: Path, name: str, text: str) -> Path:
    path = write(place(folder, name), text)
    if place in {by_group, by_group_above}:
        assert path.stat().st_gid == _STRANGER
        path.chmod(0o664)
    assert path.stat().st_uid == os.getuid()
    assert path.stat().st_mode & 0o020
    return path


def in_folder_of_stranger(folder: Path, name: str) -> Path:
    return folder_of(_STRANGER, folder / "shared") / name


def in_folder_for_all(folder: Path, name: str) -> Path:
    """Such as /tmp."""
    return folder_of(0, folder / "shared", 0o1777) / name


def in_folder_for_a_group(folder: Path, name: str) -> Path:
    return folder_of(0, folder / "shared", 0o1775) / name


def in_open_folder(folder: Path, name: str) -> Path:
    return folder_of(0, folder / "shared", 0o777) / name


NAMES: list[Place] = [in_folder_of_stranger, in_folder_for_all, in_folder_for_a_group, in_open_folder]


def link(place: Place, folder: Path, name: str, text: str, *, is_symbolic: bool = False) -> Path:
    """A second name of a file of this user, or of a symbolic link of this user to it."""
    original = write(folder_of(0, folder / "home") / name, text)
    if is_symbolic:
        (original.parent / "link").symlink_to(original)
        original = original.parent / "link"
    path = place(folder, name)
    os.link(original, path, follow_symlinks=False)
    return path


def load(folder: Path, **variables: str) -> Configuration:
    return Configuration.load(folder, {"XDG_CONFIG_HOME": str(folder / "config"), **variables})


class TestSettings:
    """`safepoint.toml` can run programs as the user."""

    @pytest.mark.parametrize("place", PLACES)
    def test_that_a_stranger_may_write(self, place: Place, tmp_path: Path) -> None:
        path = make(place, tmp_path, "safepoint.toml", _SETTINGS)
        found = load(path.parent)
        assert not found.tables
        assert "others may write to it, and it is in a folder of user" in found.ignored[0]
        assert load(path.parent, **{TRUSTED_FOLDERS: str(path.parent)}).tables
        path.chmod(0o644)  # what the message says
        assert load(path.parent).tables

    @pytest.mark.parametrize("is_symbolic", [False, True])
    @pytest.mark.parametrize("place", NAMES)
    def test_with_a_name_of_a_stranger(self, place: Place, is_symbolic: bool, tmp_path: Path) -> None:
        path = link(place, tmp_path, "safepoint.toml", _SETTINGS, is_symbolic=is_symbolic)
        found = load(path.parent)
        assert not found.tables
        assert "a second name" in found.ignored[0]
        if not is_symbolic:
            assert load(tmp_path / "home").tables  # the user's own name, in the user's own folder

    @pytest.mark.parametrize("mode", [0o755, 0o775])
    def test_of_a_team(self, mode: int, tmp_path: Path) -> None:
        """A group that this user or root has chosen is trusted; so is a backup by `cp -al`."""
        made = folder_of(0, tmp_path / "team", mode | 0o2000)
        os.chown(made, 0, _STRANGER)
        made.chmod(mode | 0o2000)
        path = write(made / "safepoint.toml", _SETTINGS)
        path.chmod(0o664)
        os.link(path, tmp_path / "backup")
        assert load(made).tables


class TestFilesThatTheUserNames:
    """A kubeconfig, keys, a secret, certificates."""

    @pytest.mark.parametrize("place", PLACES)
    def test_that_a_stranger_may_write(self, place: Place, tmp_path: Path) -> None:
        path = make(place, tmp_path, "file", "x")
        with pytest.raises(PlantedError, match="others may write to it"):
            open_trusted(path)

    @pytest.mark.parametrize("place", NAMES)
    def test_with_a_name_of_a_stranger(self, place: Place, tmp_path: Path) -> None:
        with pytest.raises(PlantedError, match="a second name"):
            open_trusted(link(place, tmp_path, "file", "x"))

    def test_that_everyone_may_write(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", "x")
        path.chmod(0o666)
        with pytest.raises(PlantedError, match="everyone may write to it"):
            open_trusted(path)

    @pytest.mark.parametrize("owner", [0, _STRANGER])
    def test_of_another_user(self, owner: int, tmp_path: Path) -> None:
        """Root of a container reads the files of a user, whose home folder is mounted there."""
        path = write(folder_of(_STRANGER, tmp_path / "home") / "file", "x")
        os.chown(path, owner, owner)
        with open_trusted(path) as file:
            assert file.read() == b"x"

    def test_every_reader_of_such_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """None of them opens it."""
        kubernetes = pytest.importorskip("safepoint.jobs.cluster.connection")
        make_certificates(tmp_path)

        def named(name: str, text: str = "x" * 40) -> str:
            return str(link(in_folder_of_stranger, tmp_path, name, text))

        aws = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
        authority = named("ca", (tmp_path / "ca.pem").read_text())
        token = write(tmp_path / "token", "TOKEN")
        named("connections.toml", '[a]\nAWS_ACCESS_KEY_ID = "a"\nAWS_SECRET_ACCESS_KEY = "b"\n')
        (tmp_path / "home" / "connections.toml").chmod(0o600)
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "safepoint").symlink_to(tmp_path / "shared")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", named("google"))
        monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", named("azure"))
        keys = {"AWS_SHARED_CREDENTIALS_FILE": named("aws", aws)}
        uses: list[Callable[[], object]] = [
            lambda: kubernetes.connect_to("c", file=Path(named("kubeconfig", "{}"))),
            lambda: keys_of("a", {}),
            lambda: agree_on_secret(RunSettings(), environ={SECRET_FILE: named("secret")}),
            lambda: find_keys(StorageOptions(), keys).current(),
            lambda: StorageOptions(ca_bundle=authority).tls_context(),
            lambda: StatusTarget(url="http://127.0.0.1:9", token=token, ca=Path(authority)).send(b"{}"),
            lambda: ObjectStore(parse_location("gs://bucket/run"), StorageOptions()),
            lambda: ObjectStore(parse_location("az://bucket/run"), StorageOptions()),
        ]
        for use in uses:
            with pytest.raises((SafepointError, OSError), match="a second name"):
                use()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    """They are refused; those of the system do not take their place."""
    for content in (b"", b"no certificate", b"\xff"):
        (tmp_path / "ca").write_bytes(content)
        with pytest.raises(StorageError, match="no certificate"):
            StorageOptions(ca_bundle=str(tmp_path / "ca")).tls_context()


def test_the_user_s_own_settings(tmp_path: Path) -> None:
    """config.toml, in a folder that the user has named."""
    path = make(by_acl, tmp_path, "x", "")
    (path.parent / "safepoint").mkdir()
    write(path.parent / "safepoint" / "config.toml", _SETTINGS)
    with pytest.raises(UsageError, match="others may write to it"):
        Configuration.of_user({"XDG_CONFIG_HOME": str(path.parent)})
