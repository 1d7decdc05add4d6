"""Another user moves a file away, or puts another one there, between the look at its owner and its use."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.local import output_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SafepointError, StorageError
from safepoint.foundation.configuration import Configuration
from safepoint.jobs.model.connections import keys_of
from safepoint.training.rendezvous import job_secret

_STRANGER = 65534
_KUBECONFIG = """
current-context: c
clusters: [{name: k, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: evil}}}]
contexts: [{name: c, context: {cluster: k, user: u}}]
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def planted(path: Path, text: str) -> Path:
    """A file of another user."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    os.chown(path, _STRANGER, _STRANGER)
    os.chown(path.parent, *((0, 0) if path.parent.name == "shared" else (_STRANGER, _STRANGER)))
    return path


def gone_at_the_look(patch: pytest.MonkeyPatch, *moved: Path) -> None:
    """The stranger moves these away when their owner is looked up."""
    lstat = os.lstat

    def look(path: Any, **options: Any) -> os.stat_result:
        if Path(path) in moved and Path(path).exists():
            Path(path).rename(f"{path}-moved")
        return lstat(path, **options)

    patch.setattr(os, "lstat", look)


def read_kubeconfig(folder: Path) -> object:
    pytest.importorskip("lightkube")
    from safepoint.jobs.cluster.connection import connect_to

    return connect_to("c", file=folder / "config")


@pytest.mark.parametrize(
    ("name", "text", "use"),
    [
        ("safepoint.toml", '[run]\noutput-dir = "/evil"\n', Configuration.load),
        ("pyproject.toml", '[tool.safepoint.run]\noutput-dir = "/evil"\n', Configuration.load),
        ("config", _KUBECONFIG, read_kubeconfig),
    ],
)
def test_a_file_that_is_gone_when_its_owner_is_looked_up(
    name: str, text: str, use: Callable[[Path], object], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is the file of the other user."""
    gone_at_the_look(monkeypatch, planted(shared / name, text))
    try:
        used = use(shared)
    except SafepointError:
        return
    assert isinstance(used, Configuration)
    assert not used.tables


def test_connections_in_a_folder_that_is_gone_when_its_owner_is_looked_up(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = '[a]\nAWS_ACCESS_KEY_ID = "evil"\nAWS_SECRET_ACCESS_KEY = "evil"\n'
    file = planted(shared / "safepoint" / "connections.toml", keys)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shared))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    gone_at_the_look(monkeypatch, file.parent)
    with pytest.raises(SafepointError):
        keys_of("a")


def test_an_output_folder_that_appears_after_the_look(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, make = shared / "out", output_folder.files.make_folder

    def too_late(path: Path) -> None:
        if path == root and not root.exists():
            root.mkdir(mode=0o777)
            os.chown(root, _STRANGER, _STRANGER)
        make(path)

    monkeypatch.setattr(output_folder.files, "make_folder", too_late)
    with pytest.raises(StorageError, match="belongs to another user"):
        OutputFolder(root).create()
    assert list(root.iterdir()) == []


def test_a_secret_that_is_replaced_after_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who may write to the folder may replace the file: the nodes must not use the secret of that person."""
    output = OutputFolder(tmp_path / "out")
    own = job_secret._in_folder(output)
    evil = tmp_path / "evil"
    evil.write_bytes(b"e" * len(own))
    os.chown(evil, _STRANGER, _STRANGER)
    check = job_secret._check_private

    def replaced(*arguments: Any) -> None:
        check(*arguments)
        os.replace(evil, output.control / "job-secret")

    monkeypatch.setattr(job_secret, "_check_private", replaced)
    assert job_secret._in_folder(output) == own
