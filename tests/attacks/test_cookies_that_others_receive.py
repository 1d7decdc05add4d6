"""A browser sends the cookie of the dashboard to every program at the same address, whatever its port.

Another user of the machine may listen at another port, or at the port of a dashboard that has ended: an open page
asks for changes again and again, and brings the cookie.
"""

import contextlib
import http.client
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.dashboard.access.connections import _surplus
from safepoint.dashboard.settings import DashboardSettings
from tests.attacks.test_idle_visitors import enter, status
from tests.support.browser import Served, served

_STRANGER = 65534
_ASK = """
import os, http.client, sys
import encodings.idna
os.setgroups([]); os.setgid({user}); os.setuid({user})
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
connection.request("GET", sys.argv[3], headers={{"Cookie": sys.argv[4]}})
answer = connection.getresponse()
print(answer.status, answer.headers["set-cookie"] or "-")
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def stranger(server: Served, path: str, cookie: str = "", host: str = "127.0.0.1") -> tuple[int, str]:
    """Send a request as another user; returns the status and the cookie of the answer."""
    arguments = [host, str(server.port), path, cookie or "none=none"]
    code = _ASK.format(user=_STRANGER)
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    number, _, given = result.stdout.strip().partition(" ")
    return int(number), given.partition(";")[0]


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_cookie_of_another_user(host: str, home: Path) -> None:
    """It is refused, also after a restart at another port, and the session of the user goes on."""
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    with served(home, "--host", host) as server:
        with contextlib.closing(http.client.HTTPConnection(host, server.port, timeout=60)) as connection:
            connection.request("GET", "/" + server.link.partition("://")[2].partition("/")[2])
            cookie = connection.getresponse().headers["set-cookie"].split(";")[0]
        assert stranger(server, "/jobs", cookie, host)[0] == 401
    with served(home) as server:
        value = cookie.partition("=")[2]
        again = f"safepoint_{server.port}={value}"
        assert stranger(server, "/jobs", again)[0] == 401
        assert status(server, "/jobs", again) == 200


@needs_root
def test_a_link_for_another_user(home: Path) -> None:
    """The session of a person who was given a link is bound to this person's user, too."""
    with served(home) as server:
        number, cookie = stranger(server, "/" + server.link.partition("://")[2].partition("/")[2])
        assert number == 200
        assert stranger(server, "/jobs", cookie)[0] == 200
        assert status(server, "/jobs", cookie) == 401


def test_connections_of_another_user() -> None:
    """A stranger opens many, and ends only their own. A visitor's connection has no session before its request."""
    stranger, visitor = (
        [SimpleNamespace(user=user) for _ in range(count)] for user, count in (("65534", 80), ("0", 3))
    )
    others = [SimpleNamespace(user="") for _ in range(5)]
    opened: Any = [*visitor, *others, *stranger]
    assert _surplus(opened, 64) == stranger[:24]
    assert _surplus(opened[:64], 64) == []
    assert _surplus(opened[8:], 64) == stranger[:16]


def test_a_further_cookie_of_another_program(home: Path) -> None:
    """It could only hide the session, so all cookies of the name are tried."""
    with served(home) as server:
        cookie = enter(server)
        name = cookie.partition("=")[0]
        assert status(server, "/jobs", f"{name}=planted; {cookie}") == 200
        assert status(server, "/jobs", f"{name}=planted; {name}=") == 401


def test_all_cookies_that_a_browser_keeps(home: Path) -> None:
    """A page of another program at the address sets them. The person can still use the dashboard."""
    with served(home) as server:
        cookie = enter(server)
        others = "; ".join(f"c{number}={'x' * 4000}" for number in range(180))
        assert status(server, "/jobs", f"{others}; {cookie}") == 200


def test_connections_that_end_at_once(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their user cannot be found out; the dashboard writes nothing about them, and goes on."""
    with served(home) as server:
        cookie = enter(server)
        for _ in range(300):
            one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
            one.close()
        assert status(server, "/jobs", cookie) == 200
    assert capfd.readouterr().err == ""


def test_the_link_does_not_lead_to_another_family_of_addresses() -> None:
    """A browser tries ::1 first for `localhost`, and the dashboard listens at 127.0.0.1 only."""
    assert DashboardSettings(host="localhost").address(8765) == "http://127.0.0.1:8765"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
