"""The real server, in a process of its own: over TLS, started again, and ended."""

import http.client
import signal
import ssl
from pathlib import Path

from tests.support.browser import Served, served
from tests.support.certificates import make_certificates


def _get(
    server: Served, path: str, cookie: str = "", context: ssl.SSLContext | None = None
) -> http.client.HTTPResponse:
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def _path(link: str) -> str:
    return "/" + link.partition("://")[2].partition("/")[2]


def test_a_session_outlives_the_server(home: Path) -> None:
    """The key is in the state folder, and a new link is shown after each use."""
    with served(home) as server:
        first = _get(server, _path(server.link))
        cookie = first.headers["set-cookie"].split(";")[0]
        assert _get(server, "/jobs", cookie).status == 200
        used, new = server.link, server.next_link()
        assert _get(server, _path(used)).status == 401
        assert _get(server, _path(new)).status == 200
        server.kill()
        server.start()
        assert _get(server, "/jobs", cookie).status == 200
        assert server.stop() == -signal.SIGTERM
        server.start()
        (home / "XDG_STATE_HOME" / "safepoint" / "dashboard.key").unlink()
        server.kill()
        server.start()
        assert _get(server, "/jobs", cookie).status == 401


def test_other_machines_reach_it_over_tls_only(home: Path) -> None:
    """On all addresses with a certificate. The cookie is for TLS only, and no header names the server."""
    folder = make_certificates(home)
    pem = str(folder / "server.pem")
    with served(home, "--host", "0.0.0.0", "--tls-certificate", pem, "--tls-key", pem) as server:
        assert server.link.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        answer = _get(server, _path(server.link), context=context)
        assert answer.status == 200
        assert "; Secure" in answer.headers["set-cookie"]
        assert answer.headers["server"] is None
