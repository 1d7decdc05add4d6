"""Who uses the dashboard without a browser: it gets pages and documents, and sends forms."""

import http.client
import json
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from tests.support.browser import Served
from tests.support.patience import PATIENCE


class Visitor:
    """An operator without a browser.

    Args:
        server: the dashboard.
    """

    def __init__(self, server: Served) -> None:
        self._port = server.port
        self.base = server.base
        answer, _ = self._send("GET", "/" + server.link.partition("://")[2].partition("/")[2])
        self.cookie = answer.headers["set-cookie"].split(";")[0]

    def get(self, path: str) -> str:
        """A page."""
        answer, text = self._send("GET", path)
        assert answer.status == 200, (path, answer.status, text)
        return text

    def document(self, path: str, query: str = "") -> Any:
        """The JSON document of a page."""
        return json.loads(self.get(f"{path}.json?{query}"))

    def act(self, page: str, path: str, seconds: float = 180, **form: str) -> Any:
        """Send a form of a page, and wait until the action has ended; returns what has become of it."""
        token = re.search(r'name="form_token" value="([^"]+)"', self.get(page))
        assert token is not None
        answer, text = self._send("POST", path, urlencode({"form_token": token[1], **form}))
        assert answer.status == 303, text
        where, deadline_s = answer.headers["location"], time.monotonic() + seconds * PATIENCE
        while (found := self.document(where))["state"] == "running":
            assert time.monotonic() < deadline_s, found
            time.sleep(0.5)
        assert found["state"] == "done", found
        return found

    def wait(self, path: str, is_so: Callable[[Any], bool], seconds: float = 180) -> Any:
        """Wait until the document of a page is as expected."""
        deadline_s = time.monotonic() + seconds * PATIENCE
        while not is_so(found := self.document(path)):
            assert time.monotonic() < deadline_s, json.dumps(found, indent=1)
            time.sleep(1)
        return found

    def wait_for_text(self, path: str, text: str, seconds: float = 180) -> None:
        """Wait until a page has this text."""
        deadline_s = time.monotonic() + seconds * PATIENCE
        while text not in (found := self.get(path)):
            assert time.monotonic() < deadline_s, found
            time.sleep(1)

    def _send(self, method: str, path: str, body: str = "") -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60 * PATIENCE)
        headers = {"Cookie": self.cookie} if hasattr(self, "cookie") else {}
        if body:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text
