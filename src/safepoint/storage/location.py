"""Locations of checkpoints: a path, or a URI with `file://`, `pvc://`, `s3://`, `gs://` or `az://`.

`parse_location(str(location)) == location`. This module opens and creates nothing. Callers test the properties of a
location (`is_folder`, `is_remote`, `claim`). Only code for one service, such as S3, tests the scheme. A claim is a
Kubernetes PersistentVolumeClaim, which is mounted as a folder.
"""

import enum
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from safepoint.errors import without_credentials

CLAIMS = "SAFEPOINT_PVC_MOUNTS"
"""The variable that states where claims are mounted: `claim=/mount/path` pairs, separated by commas."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,253}")
_OWN_CONTAINERS = {"$root", "$web", "$logs", "$blobchangefeed"}
"""The containers of Azure that every account may have. No other name begins with `$`."""
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f]")


class Scheme(enum.StrEnum):
    """The kind of a location; `_FACTS` has the facts about each kind."""

    FILE = "file"
    PVC = "pvc"
    S3 = "s3"
    GS = "gs"
    AZ = "az"


class _Facts(NamedTuple):
    """The facts about a scheme.

    Args:
        form: the form in which its locations are written.
        is_remote: whether its locations are in an object store.
        bucket: the word for the first part of the URI: `bucket`, `container` or `claim`; empty if there is none.
        extra: the extra of Safepoint that installs what the scheme needs; empty if it needs no other package.
    """

    form: str
    is_remote: bool
    bucket: str
    extra: str = ""


_FACTS = {
    Scheme.FILE: _Facts("file:///path", is_remote=False, bucket=""),
    Scheme.PVC: _Facts("pvc://<claim>/<path>", is_remote=False, bucket="claim"),
    Scheme.S3: _Facts("s3://<bucket>/<prefix>", is_remote=True, bucket="bucket"),
    Scheme.GS: _Facts("gs://<bucket>/<prefix>", is_remote=True, bucket="bucket", extra="gcs"),
    Scheme.AZ: _Facts("az://<container>/<prefix>", is_remote=True, bucket="container", extra="azure"),
}
*_FIRST_FORMS, _LAST_FORM = (facts.form for facts in _FACTS.values())
_FORMS = f"a path, {', '.join(_FIRST_FORMS)} or {_LAST_FORM}"
_ONE_SLASH = re.compile(f"({'|'.join(scheme for scheme, facts in _FACTS.items() if facts.bucket)}):", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A location of checkpoints.

    Args:
        scheme: its kind.
        bucket: the name of the bucket, container or claim; empty for `file`.
        path: for `file`, the path as given, relative or absolute. For other schemes, the prefix within the bucket or
            claim, with neither a leading nor a trailing slash.
    """

    scheme: Scheme
    bucket: str = ""
    path: str = ""

    @classmethod
    def of_folder(cls, folder: Path) -> "Location":
        """The location of a folder of this machine."""
        return cls(scheme=Scheme.FILE, path=str(folder))

    @property
    def is_remote(self) -> bool:
        """Whether the location is in an object store."""
        return _FACTS[self.scheme].is_remote

    @property
    def extra(self) -> str:
        """The extra of Safepoint that installs what the location needs; empty if it needs no other package."""
        return _FACTS[self.scheme].extra

    @property
    def is_folder(self) -> bool:
        """Whether the location is a folder of this machine."""
        return self.scheme is Scheme.FILE

    @property
    def claim(self) -> str | None:
        """The name of the claim that contains the location; None for a folder and for an object store."""
        return self.bucket if self.scheme is Scheme.PVC else None

    @property
    def folder(self) -> Path:
        """The folder.

        Raises:
            ValueError: the location is not a folder of this machine.
        """
        if not self.is_folder:
            raise ValueError(f"{self} is not a folder of this machine")
        return Path(self.path)

    @property
    def name(self) -> str:
        """The last part of the path; empty for a whole bucket."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """The location that contains this location; `.` for a relative folder without `/`."""
        path = self.path.rpartition("/")[0]
        if self.is_folder and not path:
            path = "/" if self.path.startswith("/") else "."
        return replace(self, path=path)

    def child(self, name: str) -> "Location":
        """The location called `name` inside this location."""
        return replace(self, path=f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def resolved(self, base: str) -> "Location":
        """This folder with its real path; a relative path begins at `base`. Other locations are not changed."""
        return replace(self, path=os.path.realpath(os.path.join(base, self.path))) if self.is_folder else self

    def __str__(self) -> str:
        if self.scheme is Scheme.FILE:
            return self.path
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")


def parse_location(text: str) -> Location:
    """Parse a path or a URI.

    The scheme may be in upper or lower case. Repeated slashes become one slash, and a trailing slash is removed.

    Raises:
        ValueError: the scheme is unknown; the bucket or claim is missing, or its name is invalid; the path in the
            bucket or claim contains `.` or `..`; or the text is empty or has a control character.
    """
    shown = without_credentials(text)
    if not text.strip() or _UNPRINTABLE.search(text):
        raise ValueError(f"the location {shown!r} is empty or has control characters; use {_FORMS}")
    match = _SCHEME.fullmatch(text)
    if match is None and _ONE_SLASH.match(text):
        raise ValueError(f"the location {shown!r} needs two slashes after its scheme; use {_FORMS}")
    if match is None:
        return Location(scheme=Scheme.FILE, path=_plain(text))
    try:
        scheme = Scheme(match[1].lower())
    except ValueError as error:
        raise ValueError(f"the location {shown!r} has the unknown scheme {match[1]!r}; use {_FORMS}") from error
    rest = match[2]
    if scheme is Scheme.FILE:
        if not rest.startswith("/"):
            raise ValueError(f"the location {shown!r} must name an absolute path: file:///path")
        return Location(scheme=scheme, path=_plain(rest))
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise ValueError(f"the location {shown!r} must not have a user name or a password; use {_FORMS}")
    if not bucket or bucket in {".", ".."}:
        raise ValueError(f"the location {shown!r} names no {_FACTS[scheme].bucket}; use {_FORMS}")
    # The bucket's name becomes a part of a host name in a URL, so it must not contain a character that ends a host
    # name, such as `:`.
    is_own = scheme is Scheme.AZ and bucket in _OWN_CONTAINERS
    if not is_own and not _BUCKET.fullmatch(bucket):
        what = _FACTS[scheme].bucket
        raise ValueError(
            f"the location {shown!r} has an invalid {what} name: a {what} name begins with a letter or a digit, and "
            f"has at most 254 letters, digits, `-`, `_` and `.`{_also(scheme)}"
        )
    path = _plain(prefix).strip("/") if prefix else ""
    if any(part in {".", ".."} for part in path.split("/")):
        raise ValueError(f"the location {shown!r} has `.` or `..` in its path; write the path in full")
    return Location(scheme=scheme, bucket=bucket, path=path)


def _also(scheme: Scheme) -> str:
    """The end of the message about an invalid name: which further names are valid."""
    return f"; or it is {', '.join(sorted(_OWN_CONTAINERS))}" if scheme is Scheme.AZ else ""


def resolve_claim(location: Location, mounts: str | None = None) -> Location:
    """The folder of a `pvc://` location in the mounted claim; other locations are returned unchanged.

    Args:
        location: the location.
        mounts: `claim=/mount/path` pairs, separated by commas. If None, the pairs are in the variable
            SAFEPOINT_PVC_MOUNTS, which is set in a pod that mounts the claim.

    Raises:
        ValueError: no folder is known for the claim.
    """
    if location.claim is None:
        return location
    text = os.environ.get(CLAIMS, "") if mounts is None else mounts
    table = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    mount = table.get(location.claim)
    if mount is None:
        where = f"this pod mounts {', '.join(sorted(table))}" if table else "this is not a pod that mounts a claim"
        raise ValueError(
            f"{location} can only be used in a pod that mounts the claim {location.claim!r}; {where}; "
            f"elsewhere, map the claim to a folder: {location.claim} = '/path' below [pvc] in safepoint.toml"
        )
    return Location(scheme=Scheme.FILE, path=_plain(f"{mount}/{location.path}"))


def _plain(path: str) -> str:
    plain = re.sub("/{2,}", "/", path)
    return plain.rstrip("/") or "/"
