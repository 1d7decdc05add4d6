"""Posts the run's progress to the controller of Kubeflow Trainer (KEP-2779).

If the controller has set no address, nothing is posted. While the run continues, this module sends at most one
request in five seconds, and fewer after failures. At the end, the module sends a last request, and `finish` waits for
the response up to a time limit. No error is raised. The token is read for each request, because it expires. The token
is sent only to the address that the controller set, and only over https or to this machine.
"""

import logging
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import exchange
from safepoint.foundation.shared_folders.ownership import read_trusted
from safepoint.progress.trainer_status import ReadStatus, TrainerStatus
from safepoint.settings.run_settings import STATUS_URL

_log = logging.getLogger("safepoint")
_INTERVAL_S = 5.0
_MOST_PAUSE_S = 300.0
_REQUEST_S = 2.0
_AGAIN_S = 0.5
_MOST_BYTES = 1 << 20
"""The size limit of the files with the token and the certificate."""
_LOCAL = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusTarget:
    """Where status updates go.

    Args:
        url: the address that status updates are posted to.
        token: the file with the bearer token.
        ca: the file with the certificate of the authority that signed the controller's certificate; None to trust the
            authorities of the system.
    """

    url: str
    token: Path
    ca: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "StatusTarget | None":
        """The target that the controller set in the pod's environment; None if it set no target."""
        environ = os.environ if environ is None else environ
        url, token = environ.get(STATUS_URL), environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN")
        ca = environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        return cls(url=url, token=Path(token), ca=Path(ca) if ca else None) if url and token else None

    def send(self, body: bytes) -> None:
        """Post a status update.

        Raises:
            OSError: the update was not sent or not accepted; the message says why.
        """
        parts = urlsplit(self.url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOCAL):
            raise OSError("the address is not https, and the token must not be sent unencrypted")
        token = read_trusted(self.token, _MOST_BYTES).decode("utf-8", errors="replace").strip()
        if not token or not token.isprintable() or not token.isascii():
            raise OSError("the token file contains no valid token")
        # The file is read here and not by OpenSSL, which would wait for a writer if the file were a named pipe.
        # Comments in the file may have any encoding.
        authority = None if self.ca is None else read_trusted(self.ca, _MOST_BYTES).decode("ascii", errors="ignore")
        context = ssl.create_default_context(cadata=authority)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # a cluster's own authority may omit extensions
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        exchange(request, to="the controller", timeout_s=_REQUEST_S, max_bytes=None, context=context)


class StatusPost:
    """Posts the progress on a thread of its own.

    Args:
        look: returns the progress to post; called before each request.
        target: where to post the progress.
    """

    def __init__(self, look: ReadStatus, target: StatusTarget) -> None:
        self._look = look
        self._target = target
        self._finishing = threading.Event()
        self._ended = threading.Event()
        self._num_failures = 0
        self._is_sent = False
        threading.Thread(target=self._run, name="safepoint-status", daemon=True).start()

    def finish(self, limit_s: float) -> bool:
        """Make the thread send the last request, and wait for the response.

        Args:
            limit_s: seconds to wait at most.

        Returns:
            Whether the controller accepted the last request within `limit_s`.
        """
        self._finishing.set()
        self._ended.wait(limit_s)
        return self._is_sent and self._ended.is_set()

    def _run(self) -> None:
        sent: str | None = None
        while not self._finishing.is_set():
            known = self._look()
            if known is not None and known[0].time != sent and self._send():
                sent = known[0].time
            self._finishing.wait(min(_MOST_PAUSE_S, _INTERVAL_S * 2**self._num_failures))
        self._is_sent = self._send()
        if not self._is_sent and self._look() is not None:
            clock.sleep(_AGAIN_S)
            self._is_sent = self._send()
        self._ended.set()

    def _send(self) -> bool:
        known = self._look()
        if known is None:
            return False
        progress, has_ended = known
        try:
            self._target.send(TrainerStatus.of(progress, has_ended=has_ended).to_request())
        except (OSError, ValueError) as error:
            self._num_failures = min(self._num_failures + 1, 10)
            if self._num_failures == 1:
                _log.warning(
                    "Kubeflow Trainer did not accept the progress that the job posts to it: %s; the training "
                    "continues, and the progress is posted again later. Until then, the status of the TrainJob shows "
                    "older values",
                    printable(_reason(error)),
                )
            return False
        self._num_failures = 0
        return True


def _reason(error: Exception) -> str:
    """The text of an error, without addresses and tokens."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
