"""The sessions of the dashboard. A session begins when a one-time link is exchanged for a signed cookie.

Promises: a link is accepted once. Links are kept as digests, and in memory only. A cookie states a role, a session
and the end of the session. It is signed with a key in the user's state folder, so it stays valid when the dashboard
is started again. If the key is deleted, all sessions end.

A browser sends the cookie to each program that listens at the same address, on any port. On loopback, such a program
may belong to another user, or may have taken the port after the dashboard has ended. So a cookie that was given to a
user of this machine is valid only in connections that this user has opened.
"""

import base64
import enum
import hashlib
import hmac
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.shared_folders.secret_keys import load_or_make_key
from safepoint.jobs.local.paths import make_private

_TOKEN_BYTES = 32
LASTS_S = 12 * 3600
"""How long a session lasts, in seconds."""
_VERSION = "v2"


class Role(enum.StrEnum):
    """What a visitor may do."""

    VIEWER = "viewer"
    """Read everything, change nothing."""
    OPERATOR = "operator"
    """Also make links, and change jobs and checkpoints: for example, suspend a job or delete a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """One session.

    Args:
        session: identifies the session; not secret by itself.
        role: what the visitor may do.
        name: the user that a proxy has named; empty for a session that began with a link.
    """

    session: str
    role: Role
    name: str = ""

    @property
    def is_operator(self) -> bool:
        """Whether the visitor may change something."""
        return self.role is Role.OPERATOR


class Sessions:
    """Makes and checks links, cookies, and the tokens of forms, which prevent forged requests.

    Args:
        key: signs the cookies; 32 bytes.
        is_read_only: whether every visitor is a viewer, even if the cookie states another role.
    """

    def __init__(self, key: bytes, *, is_read_only: bool) -> None:
        self._key = key
        self._is_read_only = is_read_only
        self._links: dict[bytes, Role] = {}
        self._lock = threading.Lock()

    def new_link(self, role: Role) -> str:
        """A token that `exchange` accepts once."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        with self._lock:
            self._links[_digest(token)] = role
        return token

    def exchange(self, token: str) -> Visitor | None:
        """A new session for the token of a link; None if the token is unknown or was used before."""
        with self._lock:
            role = self._links.pop(_digest(token), None)
        if role is None:
            return None
        return Visitor(session=secrets.token_urlsafe(16), role=self._allowed(role))

    def cookie_of(self, visitor: Visitor, user: str = "") -> str:
        """The value of the cookie of a session.

        Args:
            visitor: the session.
            user: who has opened the connection, see `connections`; empty if this is not known.
        """
        text = f"{_VERSION}.{visitor.role}.{visitor.session}.{int(clock.wall_s()) + LASTS_S}"
        return f"{text}.{self._sign('cookie', f'{text} {user}')}"

    def visitor_of(self, cookie: str, user: str = "") -> Visitor | None:
        """The session of a cookie; None if the cookie has expired, or is not from this dashboard.

        Args:
            cookie: the value of the cookie.
            user: who has opened the connection. A cookie that was given to another user is not valid.
        """
        text, _, signature = cookie.rpartition(".")
        expected = self._sign("cookie", f"{text} {user}")
        if not text.isascii() or not hmac.compare_digest(signature.encode(), expected.encode()):
            return None
        version, role, session, end = text.split(".")
        if version != _VERSION or int(end) < clock.wall_s():
            return None
        return Visitor(session=session, role=self._allowed(Role(role)))

    def form_token(self, visitor: Visitor) -> str:
        """The token in the forms of this session, which another site does not have."""
        return self._sign("form", f"{visitor.session} {visitor.name}")

    def is_form_token(self, visitor: Visitor, token: str) -> bool:
        """Whether a form has the token of this session."""
        return hmac.compare_digest(token.encode(), self.form_token(visitor).encode())

    def _allowed(self, role: Role) -> Role:
        return Role.VIEWER if self._is_read_only else role

    def _sign(self, purpose: str, text: str) -> str:
        data = f"{purpose}\0{text}".encode()
        return base64.urlsafe_b64encode(hmac.digest(self._key, data, "sha256")).decode().rstrip("=")


def load_key(path: Path) -> bytes:
    """The key in a file. If the file does not exist, it is written with a new key.

    Raises:
        StorageError: the file cannot be read or written, has other content, or other users can read it.
    """
    make_private(path.parent)
    hint = f"delete {path}; all sessions of dashboards then end"
    return load_or_make_key(path, what="key of the dashboard", hint=hint)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
