"""A temporary folder in which other users can rename what this user creates: it has no sticky bit.

Another user who put a folder of their own in the place of the launcher's could name there the file to which the
launcher appends its events, and so change any file of this user.
"""

import logging
import os
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User

from safepoint.foundation.temporary_folders import places
from safepoint.foundation.temporary_folders.places import may_be_replaced, possible_parents, private_parent
from safepoint.jobs.cluster.login.login_files import add_certificate
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.training.engine.scratch import Scratch
from safepoint.training.outcome.launcher_folder import launcher_folder
from tests.support.certificates import make_certificates

_STRANGER = 65534
_REPLACE = f"""
import os, sys
os.setgid({_STRANGER}); os.setuid({_STRANGER})
[name] = [name for name in os.listdir(".") if name.startswith("safepoint-")]
os.rename(name, "old")
os.mkdir(name)
os.chmod(name, 0o777)
with open(f"{{name}}/stream", "w") as file:
    file.write(sys.argv[1])
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in memory. It is sticky, as on every machine."""
    folder = tmp_path / "memory"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(places, "_IN_MEMORY", folder)
    return folder


@pytest.fixture
def shared(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that TMPDIR names. Everyone may write to it, and rename there what others have made."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_launcher_s_folder_is_elsewhere(shared: Path, memory: Path) -> None:
    with launcher_folder() as folder:
        assert folder.parent == memory
        assert memory in possible_parents(), "where `suspend` looks for launchers"


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_above_it(mode: int, shared: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = shared / "own"
    own.mkdir(mode=0o700)
    shared.chmod(mode)
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    assert private_parent(prefers_memory=True) == memory


def test_a_folder_of_another_user(shared: Path, memory: Path) -> None:
    """Its owner can rename what others create there, even if it is sticky."""
    shared.chmod(0o1777)
    os.chown(shared, _STRANGER, _STRANGER)
    assert private_parent() == memory
    assert not may_be_replaced(shared, by_everyone=True), "the user may have chosen it"


def test_a_rank_without_a_launcher(shared: Path, memory: Path) -> None:
    scratch = Scratch(None)
    scratch.ensure(cast("KeeperClient", SimpleNamespace(send=lambda message: None)))
    assert not list(shared.iterdir())
    assert len(list(memory.iterdir())) == 1
    scratch.remove()


def test_no_other_folder(
    shared: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a pod, where nothing is sticky. Outside of containers there is a warning."""
    places._warn_of_others.cache_clear()
    memory.chmod(0o777)
    monkeypatch.setattr(places, "is_seeing_all", lambda: True)
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert private_parent(prefers_memory=True) == shared
    assert f"they may write to {shared} or a folder above it, and to /dev/shm; set TMPDIR to a folder" in caplog.text


@pytest.mark.parametrize("why", ["it is full", "it cannot be written", "it is missing"])
def test_the_folder_in_memory_cannot_be_used(
    why: str, shared: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning does not say that other users may write to it."""
    places._warn_of_others.cache_clear()
    monkeypatch.setattr(places, "is_seeing_all", lambda: True)
    match why:
        case "it is full":
            monkeypatch.setattr(places, "_ROOM_BYTES", 1 << 62)
            expected = "/dev/shm has less than 4611686 TB of free space"
        case "it cannot be written":
            monkeypatch.setattr(os, "access", lambda path, mode: False)
            expected = "/dev/shm cannot be written"
        case _:
            memory.rmdir()
            expected = "/dev/shm cannot be used: No such file or directory"
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert private_parent(prefers_memory=True) == shared
    assert f"they may write to {shared} or a folder above it, and {expected}; set TMPDIR" in caplog.text


def test_the_key_of_a_login_is_in_no_folder(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who renamed the folder in time would get the key: here, no folder can be created at all."""
    make_certificates(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "missing"))
    user = User(client_cert=str(tmp_path / "server.pem"), client_key=str(tmp_path / "server.pem"))
    config = SingleConfig("context", Cluster(), Context(cluster="cluster"), user)
    context = ssl.create_default_context()
    add_certificate(context, config)
    assert not list(shared.iterdir())


def test_folders_that_are_safe(tmp_path: Path, memory: Path) -> None:
    assert not may_be_replaced(tmp_path)
    assert not may_be_replaced(memory)
    assert may_be_replaced(tmp_path / "missing")


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
def test_a_run_writes_no_file_that_another_user_names(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the program runs, another user exchanges the launcher's folder. Then the program fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precious = tmp_path / "profile"
    precious.write_text("mine\n")
    script = tmp_path / "train.py"
    script.write_text("print('began', flush=True)\ninput()\nraise SystemExit('failed')\n")
    code = "from safepoint.cli.main import main; main()"
    arguments = ("run", "--max-restarts", "0", "--output-dir", str(tmp_path / "o"), str(script))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"began\n"
        subprocess.run(
            [sys.executable, "-c", _REPLACE, str(precious)], cwd=shared, check=False, stderr=subprocess.DEVNULL
        )
        assert not list(shared.iterdir()), "neither a folder of the launcher nor one of torch elastic"
        run.communicate(b"\n", timeout=120)
    assert precious.read_text() == "mine\n"
