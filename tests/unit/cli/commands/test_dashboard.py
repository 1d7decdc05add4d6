"""`safepoint dashboard`: what it refuses before it listens. `tests/unit/dashboard` has its pages."""

import importlib.util
import socket
from pathlib import Path

import pytest

from tests.support.commands import safepoint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is started."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    outcome = safepoint("dashboard")
    assert outcome.code == 16
    assert "the dashboard needs uvicorn; nothing was started" in outcome.stderr
    assert "pip install 'safepoint[dashboard]'" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--host", "0.0.0.0"), "without TLS"),
        (("--tls-key", "key.pem"), "TLS needs both"),
        (("--tls-key", "key.pem", "--tls-certificate", "none.pem"), "is not a file"),
        (("--proxy-address", "somewhere"), "--proxy-address 'somewhere' is invalid"),
        (("--operator", "ada"), "no proxy is trusted"),
        (("--user-header", "a:b"), "is not the name of a header"),
        (("--name", "https://x"), "is not a host name"),
    ],
)
def test_an_invalid_option_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    """With exit code 2, before it listens."""
    outcome = safepoint("dashboard", "--port", "0", *arguments)
    assert (outcome.code, reason in outcome.stderr) == (2, True), outcome.stderr


def test_a_port_in_use_is_reported() -> None:
    """With what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = safepoint("dashboard", "--port", str(taken.getsockname()[1]))
    assert outcome.code == 11
    assert "cannot listen on 127.0.0.1" in outcome.stderr
    assert "leave out --port to use any free port" in outcome.stderr
