"""A link to the dashboard names a host, and another user listens at another address of this name, at the same port.

The name of a machine is often 127.0.1.1 on the machine itself, and the dashboard listens at 127.0.0.1. The program of
the other user would get the token of the link, and with it all rights of the person.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.dashboard.settings import DashboardSettings
from tests.support.certificates import make_certificates
from tests.unit.dashboard.conftest import Dashboard, home, start

__all__ = ["home", "start"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_the_first_link(host: str) -> None:
    """It names the address at which the dashboard listens."""
    shown = {"localhost": "127.0.0.1", "::1": "[::1]"}.get(host, host)
    assert DashboardSettings(host=host, names=("machine.example",)).address(8765) == f"http://{shown}:8765"


@pytest.mark.parametrize("host", ["machine.example:8765", "machine.example", "machine.example:9", "[::1]:8765"])
def test_a_link_for_another_person(host: str, start: Callable[..., Dashboard]) -> None:
    """The name and the port in the operator's browser do not count: a program of another user may listen there."""
    served = start(names=("machine.example",))
    served.visitor()
    headers = {"host": host, "cookie": f"{served.cookie}={served.client.cookies[served.cookie]}"}
    assert "http://127.0.0.1:8765/enter?token=" in served.post("/links", {"role": "viewer"}, headers=headers).text


def test_with_tls(tmp_path: Path) -> None:
    """The links name the host: no other program has its certificate."""
    pem = make_certificates(tmp_path) / "server.pem"
    settings = DashboardSettings(host="0.0.0.0", names=("machine.example",), tls_certificate=pem, tls_key=pem)
    assert settings.address(8765) == "https://machine.example:8765"
    assert settings.address_by("machine.example:8443") == "https://machine.example:8443"
