"""Where checkpoints live, as people write it: a path, or `file://`, `pvc://`, `s3://`, `gs://`, `az://`.

Promises: `parse_location(str(location)) == location`; nothing is opened or created.
"""

import enum
import os
import re
from dataclasses import dataclass
from pathlib import Path

CLAIMS = "SAFEPOINT_PVC_MOUNTS"
"""The variable that says where claims are mounted: `claim=/mount/path` pairs, separated by commas."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(pvc|s3|gs|az):", re.IGNORECASE)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f]")
_FORMS = (
    "a path, file:///path, pvc://<claim>/<path>, s3://<bucket>/<prefix>, gs://<bucket>/<prefix> or "
    "az://<container>/<prefix>"
)


class Scheme(enum.StrEnum):
    """The kind of a place."""

    FILE = "file"
    PVC = "pvc"
    S3 = "s3"
    GS = "gs"
    AZ = "az"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place for checkpoints.

    Args:
        scheme: what kind of place.
        bucket: bucket, container or claim; empty for `file`.
        path: for `file` the path as given, relative or absolute; otherwise the prefix within the bucket or claim,
            with neither a leading nor a trailing slash.
    """

    scheme: Scheme
    bucket: str = ""
    path: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether an object store holds it."""
        return self.scheme in {Scheme.S3, Scheme.GS, Scheme.AZ}

    @property
    def folder(self) -> Path:
        """The folder of a `file` location.

        Raises:
            ValueError: it is not one.
        """
        if self.scheme is not Scheme.FILE:
            raise ValueError(f"{self} is not a folder of this machine")
        return Path(self.path)

    def child(self, name: str) -> "Location":
        """The place `name`, relative to this one."""
        path = f"{self.path.rstrip('/')}/{name}" if self.path else name
        return Location(scheme=self.scheme, bucket=self.bucket, path=path)

    def __str__(self) -> str:
        if self.scheme is Scheme.FILE:
            return self.path
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")


def parse_location(text: str) -> Location:
    """Read what a person wrote.

    The scheme's case does not matter, duplicate slashes are one, a trailing slash is dropped.

    Raises:
        ValueError: unknown scheme, no bucket or claim, `..` inside a bucket, a control character.
    """
    if not text.strip() or _UNPRINTABLE.search(text):
        raise ValueError(f"the location {text!r} is empty or has control characters; use {_FORMS}")
    match = _SCHEME.fullmatch(text)
    if match is None and _ONE_SLASH.match(text):
        raise ValueError(f"the location {text!r} needs two slashes behind its scheme; use {_FORMS}")
    if match is None:
        return Location(scheme=Scheme.FILE, path=_plain(text))
    try:
        scheme = Scheme(match[1].lower())
    except ValueError as error:
        raise ValueError(f"the location {text!r} has the unknown scheme {match[1]!r}; use {_FORMS}") from error
    rest = match[2]
    if scheme is Scheme.FILE:
        if not rest.startswith("/"):
            raise ValueError(f"the location {text!r} must name an absolute path: file:///path")
        return Location(scheme=scheme, path=_plain(rest))
    bucket, _, prefix = rest.partition("/")
    if not bucket or bucket in {".", ".."}:
        what = {Scheme.PVC: "claim", Scheme.AZ: "container"}.get(scheme, "bucket")
        raise ValueError(f"the location {text!r} names no {what}; use {_FORMS}")
    path = _plain(prefix).strip("/") if prefix else ""
    if any(part in {".", ".."} for part in path.split("/")):
        raise ValueError(f"the location {text!r} has `.` or `..` in its path; write the path in full")
    return Location(scheme=scheme, bucket=bucket, path=path)


def claim_folder(location: Location, mounts: "str | None" = None) -> Location:
    """Where the claim of a `pvc://` location is mounted in this pod.

    Args:
        location: `pvc://<claim>/<path>`.
        mounts: `claim=/mount/path` pairs, separated by commas; SAFEPOINT_PVC_MOUNTS when None, which Safepoint sets
            in the pods it makes.

    Raises:
        ValueError: not in a pod, or the pod does not mount the claim.
    """
    text = os.environ.get(CLAIMS, "") if mounts is None else mounts
    table = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    mount = table.get(location.bucket)
    if mount is None:
        where = f"this pod mounts {', '.join(sorted(table))}" if table else "this is not a pod that mounts a claim"
        raise ValueError(
            f"{location} can only be used in a pod that mounts the claim {location.bucket!r}; {where}; "
            f"on a machine of your own, give it a folder in safepoint.toml: below [pvc] {location.bucket} = '/path'"
        )
    return Location(scheme=Scheme.FILE, path=_plain(f"{mount}/{location.path}"))


def _plain(path: str) -> str:
    plain = re.sub("/{2,}", "/", path)
    return plain.rstrip("/") or "/"
