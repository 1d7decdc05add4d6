"""Another user takes the name of a keeper's socket before the keeper does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.protocol.channel import check_same_user, connect, listen, new_keeper_name
from safepoint.snapshot.protocol.messages import KeeperPlan

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
    name = new_keeper_name()
    stranger = Stranger(request.param, name, f"{name}-{'0' * 32}", f"{name}-x")
    yield name
    stranger.leave()


@pytest.mark.timeout(60)
def test_ranks_reach_their_keeper_under_another_name(taken: str) -> None:
    """The keeper notices whose the name is and uses another one; ranks speak to no other user's process."""
    process = KeeperProcess(KeeperPlan(name=taken))
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
    """A stranger's socket is not used, and does not make a rank wait."""
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
    process = KeeperProcess(KeeperPlan(name=new_keeper_name()))
    client = KeeperClient.connect(process.name, wait_s=30, rank=0, num_ranks=1)
    assert client is not None
    code = (
        "import os, socket, sys; os.setgid(65533); os.setuid(65533);"
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.settimeout(20);"
        "print(s.recv(1))"
    )
    done = subprocess.run([sys.executable, "-c", code, process.name], capture_output=True, text=True, check=False)
    assert done.stdout == "b''\n" or "Reset" in done.stderr
    client.close()
    process.finish()


def test_many_strangers_do_not_hide_the_keeper() -> None:
    """They may take every name that begins like the keeper's."""
    name = new_keeper_name()
    stranger = Stranger("listens", name, *(f"{name}-{number:032x}" for number in range(300)))
    server = listen(name)
    channel = connect(name)
    accepted, _ = server.accept()
    check_same_user(accepted)
    accepted.close()
    channel.close()
    server.close()
    stranger.leave()
