"""The proxy that names the users of the dashboard runs on the same machine, where others can send from its address.

Without a look at who has opened the connection, each user of the machine could name an operator.
"""

import http.client
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from safepoint.dashboard.access import proxies
from safepoint.dashboard.access.proxies import proxied_visitor
from safepoint.dashboard.settings import DashboardSettings, networks, user_numbers
from safepoint.errors import UsageError
from safepoint.foundation.processes import is_seeing_all
from tests.support.browser import served

_STRANGER, _PROXY = 65534, 65533
_HEADERS = [(b"x-forwarded-user", b"ada")]
_ASK = """
import os, http.client, sys
import encodings.idna
os.setgroups([]); os.setgid({user}); os.setuid({user})
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
connection.request("GET", "/jobs", headers={{"X-Forwarded-User": "ada"}})
print(connection.getresponse().status)
"""


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], bool]:
    """Whether a connection of a user of this machine may name an operator."""
    settings = DashboardSettings(proxies=networks(["127.0.0.1"]), proxy_users=(_PROXY,), operators=("ada",))

    def ask(user: str, is_machine: bool) -> bool:
        monkeypatch.setattr(proxies, "is_seeing_all", lambda: is_machine)
        visitor = proxied_visitor(settings, ("127.0.0.1", 1), _HEADERS, user)
        assert visitor is None or visitor.is_operator
        return visitor is not None

    return ask


@pytest.mark.parametrize("user", [str(os.geteuid()), "0", str(_PROXY), ""])
def test_the_proxy(user: str, named: Callable[[str, bool], bool]) -> None:
    """It runs as this user, as root, as the user that an option names, or on another machine."""
    assert named(user, True)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"ada", "ada"),
        (b" \tada \t", "ada"),
        ("ada\u00a0".encode(), None),
        ("\u3000ada".encode(), None),
        ("ada\u200b".encode(), None),
        (b"ada\x0b", None),
        (b"ada\x85", None),
        (b"\xff", None),
        ("\u0430da".encode(), "\u0430da"),
        (b"ADA", "ADA"),
        (b"ada, eve", "ada, eve"),
    ],
)
def test_a_name_that_looks_like_that_of_an_operator(value: bytes, name: str | None) -> None:
    """Where people choose their names, one may choose `ada` with a no-break space, which must not become `ada`."""
    settings = DashboardSettings(proxies=networks(["10.0.0.7"]), operators=("ada",))
    visitor = proxied_visitor(settings, ("10.0.0.7", 1), [(b"x-forwarded-user", value)])
    assert (None if visitor is None else visitor.name) == name
    assert (visitor is not None and visitor.is_operator) == (name == "ada")


@pytest.mark.parametrize("user", [str(_STRANGER), "unknown"])
def test_another_user(user: str, named: Callable[[str, bool], bool], caplog: pytest.LogCaptureFixture) -> None:
    """The kernel reports no user for a connection that is half closed. In a container, all trust each other."""
    proxies._warn.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        assert not named(user, True)
    assert caplog.text.count("--proxy-user") == 1
    assert named(user, False)


@pytest.mark.skipif(os.getuid() != 0 or not is_seeing_all(), reason="only root of a machine can become another user")
@pytest.mark.parametrize("options", [[], ["--proxy-user", str(_STRANGER)]])
def test_requests(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another user are refused, unless an option names this user."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with served(tmp_path, "--proxy-address", "127.0.0.1", "--operator", "ada", *options) as server:
        command = [sys.executable, "-c", _ASK.format(user=_STRANGER), str(server.port)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == ("200" if options else "401")
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as own:
            own.request("GET", "/jobs", headers={"X-Forwarded-User": "ada"})
            assert own.getresponse().status == 200


def test_the_option() -> None:
    """It takes names and numbers, and is refused without a proxy."""
    assert user_numbers(["root", "65533"]) == (0, 65533)
    for text in ("no such user", "", "-1"):
        with pytest.raises(UsageError, match="no such user"):
            user_numbers([text])
    with pytest.raises(UsageError, match="--proxy-address"):
        DashboardSettings(proxy_users=(0,))
