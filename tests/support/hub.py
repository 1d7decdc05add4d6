"""The requests to the Hugging Face Hub that a push makes, answered on loopback, and a cache of its client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Commit:
    """One commit that was pushed.

    Args:
        message: its first line.
        files: content by path.
    """

    message: str
    files: dict[str, bytes]


@dataclass
class FakeHub:
    """A server on which every repository exists as soon as it is named."""

    endpoint: str = ""
    commits: list[Commit] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which a job pushes there."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def answer(self, path: str, body: bytes) -> object:
        """The JSON answer to one request; None for an unknown request."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            return {"url": f"{self.endpoint}/somebody/{json.loads(body)['name']}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/agent-harnesses":  # asked by the client for its own purposes
            return {}
        if "/preupload/" in path:
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return {"files": [{**one, "shouldIgnore": False, "oid": None} for one in files]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append(Commit(lines[0]["value"]["summary"], files))
            oid = f"{len(self.commits):040x}"
            return {"commitOid": oid, "commitUrl": f"{self.endpoint}/somebody/model/commit/{oid}", "hookOutput": ""}
        self.unknown.append(path)
        return None


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a server until the block ends."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = hub.answer(self.path, body)
            content = json.dumps(answer if answer is not None else {"error": "not found"}).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def cached_repository(home: Path, name: str, files: Mapping[str, bytes], *, kind: str) -> Path:
    """A repository in the cache of the Hub's client below HF_HOME, as a download leaves it. Returns its snapshot."""
    folder = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    commit = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    snapshot = folder / "snapshots" / commit
    (folder / "refs").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for path, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(blob)
    return snapshot


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes], *, kind: str, token: str) -> Iterator[tuple[str, list[str]]]:
    """A server with one private repository. Yields its address, and the list of the files that it has sent."""
    commit, sent = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(), list[str]()
    place = {"dataset": "datasets/", "model": ""}[kind]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            start = f"/{place}{name}/resolve/{commit}/"
            content = files.get(path.removeprefix(start)) if path.startswith(start) else None
            about = f"/api/{kind}s/{name}"
            if path in {about, f"{about}/revision/main", f"{about}/revision/{commit}"}:
                siblings = [{"rfilename": file} for file in files]
                content = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
            elif path == f"{about}/tree/{commit}":
                tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": commit} for file in files]
                content = json.dumps(tree).encode()
            is_allowed = self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(401 if not is_allowed else 404 if content is None else 200)
            content = content if is_allowed and content is not None else b""
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if with_body:
                self.wfile.write(content)
                if path.startswith(start):
                    sent.append(path.removeprefix(start))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
