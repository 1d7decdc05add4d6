"""HTTP requests that carry a secret. They follow no redirect, and pass a proxy only in an encrypted tunnel."""

import http.client
import ssl
import urllib.error
import urllib.request
from typing import Any


def exchange(
    request: urllib.request.Request,
    *,
    to: str,
    timeout_s: float,
    max_bytes: int,
    context: ssl.SSLContext | None = None,
) -> bytes:
    """Send a request, and return the body of the answer.

    Args:
        request: the request.
        to: the server's name in messages.
        timeout_s: how long to wait for the server.
        max_bytes: how much of the body to read.
        context: which certificates are trusted; None for the system's.

    Raises:
        PermissionError: the server refused the request, with a status from 400 to 499 but 408 and 429.
        OSError: there is no answer with a status from 200 to 299. The message shows nothing of the request.
    """
    # An https request passes through a proxy in an encrypted tunnel. An http request must not use a proxy, which
    # could read it.
    proxies = urllib.request.ProxyHandler(None if request.type == "https" else {})
    opener = urllib.request.build_opener(proxies, urllib.request.HTTPSHandler(context=context), _NoRedirects())
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.read(max_bytes)
    except urllib.error.HTTPError as error:
        with error:
            is_refusal = 400 <= error.code < 500 and error.code not in {408, 429}
            raise (PermissionError if is_refusal else OSError)(
                f"{to} answered with HTTP status {error.code}"
            ) from None
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"the request is invalid or the answer of {to} is not HTTP: {type(error).__name__}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the secret to another address."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None
