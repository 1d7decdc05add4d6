"""Another user takes the names of a keeper's socket before the keeper does, or as soon as they can be seen."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation.environment import Place
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.protocol.channel import check_same_user, connect, listen, names_of, new_keeper_key
from safepoint.snapshot.protocol.messages import KeeperPlan
from safepoint.training.context.keeper_connection import KeeperConnection

STRANGER = """
import os, socket, sys
os.setgid(65533); os.setuid(65533)
taken = []
for name in sys.argv[2:]:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\\0" + name)
    if sys.argv[1] == "listens":
        server.listen(16)
    if sys.argv[1] == "is full":
        server.listen(0)
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            try:
                client.connect("\\0" + name)
            except OSError:
                pass
            taken.append(client)
    taken.append(server)
print("taken", flush=True)
sys.stdin.read()
"""
SPY = """
import hashlib, os, sys
os.setgid(65533); os.setuid(65533)
secrets = [b"", b"0"]
for pid in sys.argv[2:]:
    for name in ("auxv", "environ", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                secrets.append(file.read())
        except OSError:
            pass
    with open(f"/proc/{pid}/stat") as file:
        facts = f"{os.stat('/proc/self/ns/pid').st_ino}-" + file.read().rpartition(")")[2].split()[19]
    print(f"safepoint-{sys.argv[1]}-of-{pid}-{facts}")
    for secret in secrets:
        print(f"safepoint-{sys.argv[1]}-of-{pid}-" + hashlib.sha256(facts.encode() + secret).hexdigest())
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


class Stranger:
    def __init__(self, how: str, *names: str) -> None:
        command = [sys.executable, "-c", STRANGER, how, *names]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"taken\n"

    def leave(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(params=["listens", "only binds", "is full"])
def taken(request: pytest.FixtureRequest) -> Iterator[str]:
    """A key of which a stranger has taken two names."""
    key = new_keeper_key()
    stranger = Stranger(request.param, *names_of(key)[:2])
    yield key
    stranger.leave()


@pytest.mark.timeout(60)
def test_ranks_reach_their_keeper_under_another_name(taken: str) -> None:
    """The keeper notices whose the name is and uses another one; ranks speak to no other user's process."""
    process = KeeperProcess(KeeperPlan(key=taken))
    try:
        for _ in range(2):
            client = KeeperClient.connect(taken, wait_s=30, rank=0, num_ranks=1)
            assert client is not None
            try:
                deadline = time.monotonic() + 20
                while not client.pid and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert client.pid == process.pid
            finally:
                client.close()
    finally:
        process.finish()


@pytest.mark.timeout(60)
def test_without_a_keeper_nothing_is_reached(taken: str) -> None:
    """A stranger's socket is not used, and does not make a rank wait for long."""
    with pytest.raises(OSError, match=r"."):
        connect(taken)
    assert KeeperClient.connect(taken, wait_s=0, rank=0, num_ranks=1) is None


@pytest.mark.timeout(60)
def test_two_keepers_of_one_user_do_not_share_a_taken_name(taken: str) -> None:
    """The second one still finds the first."""
    server = listen(taken)
    with pytest.raises(OSError, match="in use"):
        listen(taken)
    server.close()


def test_a_stranger_does_not_reach_the_keeper() -> None:
    """The keeper closes the connection of another user's process before it reads anything."""
    process = KeeperProcess(KeeperPlan(key=new_keeper_key()))
    client = KeeperClient.connect(process.key, wait_s=30, rank=0, num_ranks=1)
    assert client is not None
    code = (
        "import os, socket, sys; os.setgid(65533); os.setuid(65533);"
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.settimeout(20);"
        "print(s.recv(1))"
    )
    command = [sys.executable, "-c", code, names_of(process.key)[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "b''\n" or "Reset" in done.stderr
    client.close()
    process.finish()


def test_names_like_the_keepers_do_not_hide_it() -> None:
    """What begins like the keeper's name is not looked at."""
    key = new_keeper_key()
    name = names_of(key)[0]
    stranger = Stranger("listens", name, *(f"{name}-{number:032x}" for number in range(900)))
    server = listen(key)
    begun_s = time.monotonic()
    channel = connect(key)
    assert time.monotonic() - begun_s < 1
    accepted, _ = server.accept()
    check_same_user(accepted)
    accepted.close()
    channel.close()
    server.close()
    stranger.leave()


def test_the_next_name_cannot_be_seen() -> None:
    """Everyone may read the keeper's command line and the names of sockets; the key is in neither."""
    process = KeeperProcess(KeeperPlan(key=new_keeper_key()))
    seen = Path(f"/proc/{process.pid}/cmdline").read_text() + Path("/proc/net/unix").read_text()
    first, *later = names_of(process.key)
    assert first in seen
    assert process.key.rpartition("-")[2] not in seen
    assert [name for name in later if name in seen] == []
    process.finish()


@pytest.mark.parametrize("is_launched", [False, True])
def test_names_under_torchrun_cannot_be_computed(is_launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on what only the user can read of the process that starts the ranks."""
    if is_launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    keys: list[str] = []
    monkeypatch.setattr(KeeperClient, "connect", lambda key, **_: keys.append(key))
    for _ in range(2):  # the second one stands for a rank after a restart, or for another rank of the node
        connection = KeeperConnection(RunSettings(), Place(local_rank=1, local_world_size=2), lambda _: None)
        connection.open(b"common")
    assert len(set(keys)) == 1
    owners = [str(os.getpid()), str(os.getppid())]
    command = [sys.executable, "-c", SPY, str(os.getuid()), *owners]
    guesses = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert guesses
    assert not set(names_of(keys[0])).intersection(name for guess in guesses for name in (guess, *names_of(guess)))


def test_ranks_of_a_launcher_of_another_user_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not look at the launcher, so the name depends on the secret of the ranks."""
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)  # no process, so nothing of it can be read
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    keys: list[str] = []
    monkeypatch.setattr(KeeperClient, "connect", lambda key, **_: keys.append(key))
    for secret in (b"one job", b"one job", b"another job", None, None):
        connection = KeeperConnection(RunSettings(), Place(local_rank=1, local_world_size=2), lambda _: None)
        connection.open(secret)
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4
