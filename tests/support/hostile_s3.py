"""An S3 server that answers what an attack tells it to, and everything else like a store of a few objects."""

import hashlib
import http.server
import re
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from safepoint.storage.location import Location, Scheme
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions

Answer = Callable[["Request"], bool]
"""Answers a request and returns True, or leaves it to the server."""
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Request(http.server.BaseHTTPRequestHandler):
    """One request to the server."""

    protocol_version = "HTTP/1.1"
    server: Any
    body = b""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    @property
    def key(self) -> str:
        """Of the object; empty for the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def is_listing(self) -> bool:
        """Whether it asks for the objects of the bucket."""
        return self.command == "GET" and not self.key and "uploads" not in urlsplit(self.path).query

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """Answer with a body of a known length."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def _do(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.num_requests += 1
        try:
            _ = self.server.answer(self) or self._answer()
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

    def _answer(self) -> bool:
        objects: dict[str, bytes] = self.server.objects
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if self.command == "GET" and not self.key:
            prefix = query.get("prefix", [""])[0]
            found = (key for key in sorted(objects) if key.startswith(prefix))
            return self.send(200, page(*(item(quote(key), len(objects[key])) for key in found)))
        if self.command not in {"GET", "HEAD"} or self.key not in objects:
            return self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data = objects[self.key]
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Last-Modified": _DATE}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
        if match is None or self.command == "HEAD":
            return self.send(200, data, headers)
        first, end = int(match[1]), min(len(data), int(match[2]) + 1)
        return self.send(206, data[first:end], {**headers, "Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})


def item(key: str, size: object, modified: str = "2026-01-01T00:00:00.000Z") -> str:
    """An object in a listing."""
    return f"<Contents><Key>{key}</Key><LastModified>{modified}</LastModified><Size>{size}</Size></Contents>"


def page(*items: str, token: str | None = None) -> bytes:
    """A page of a listing; with a token, another one follows."""
    more = "false" if token is None else "true"
    end = f"<IsTruncated>{more}</IsTruncated><NextContinuationToken>{token or ''}</NextContinuationToken>"
    encoding = "<EncodingType>url</EncodingType>"
    return f"<ListBucketResult>{encoding}{''.join(items)}{end}</ListBucketResult>".encode()


def objects_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as objects of a store at `s3://bucket/run`."""
    return {f"run/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def hostile_store(
    answer: Answer = lambda request: False, objects: Mapping[str, bytes] | None = None, *, timeout_s: float = 60.0
) -> Iterator[tuple[ObjectStore, Any]]:
    """A store at `s3://bucket/run` of a server that answers so, and the server, which counts `num_requests`."""
    server: Any = _Server(("127.0.0.1", 0), Request)
    server.answer, server.objects, server.num_requests = answer, dict(objects or {}), 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = StorageOptions(
        endpoint=f"http://127.0.0.1:{server.server_port}",
        access_key_id="key",
        secret_access_key="secret",
        request_timeout_s=timeout_s,
    )
    try:
        yield ObjectStore(Location(scheme=Scheme.S3, bucket="bucket", path="run"), options), server
    finally:
        server.shutdown()
        server.server_close()
