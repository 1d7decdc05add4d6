"""Keys that expire while they are used: in an upload, a listing, a read and the write of the manifest."""

import http.server
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.errors import AccessDeniedError
from safepoint.storage.location import parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import ABSENT
from safepoint.testing.fault_proxy import FaultProxy
from tests.support.checkpoints import commit, prepared
from tests.support.moto_server import MotoServer


class Issuer:
    """Issues a new session token for each request: a token service, the endpoint of a container, and an instance."""

    def __init__(self) -> None:
        self.num_issued = 0
        self.lives_s = 3600.0
        self.status = 200
        self.asked: list[str] = []
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                word = self.headers.get("Authorization") or self.headers.get("X-aws-ec2-metadata-token")
                if self.path.startswith("/latest/") and not self.path.endswith("/train"):
                    assert word == (None if self.command == "PUT" else "let-me-in")
                    self.answer("let-me-in" if self.command == "PUT" else "train\n")
                    return
                issuer.asked.append(f"{body} {word}")
                issuer.num_issued += 1
                number = issuer.num_issued
                until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + issuer.lives_s))
                if self.command == "POST":
                    text = (
                        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
                        f"<AccessKeyId>key{number}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
                        f"<SessionToken>token-{number}-</SessionToken><Expiration>{until}</Expiration>"
                        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
                    )
                else:
                    text = (
                        f'{{"AccessKeyId": "key{number}", "SecretAccessKey": "secret", '
                        f'"Token": "token-{number}-", "Expiration": "{until}"}}'
                    )
                self.answer(text)

            def answer(self, text: str) -> None:
                self.send_response(issuer.status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Write no log of requests."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.server.shutdown()
    issuer.server.server_close()


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(f"127.0.0.1:{moto.port}") as proxy:
        yield proxy


class Place:
    """A store whose keys come from `kind`, and how they expire."""

    def __init__(self, kind: str, proxy: FaultProxy, issuer: Issuer, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.kind, self.proxy, self.issuer = kind, proxy, issuer
        self.path = folder / "keys"
        self.num_written = 0
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        if kind == "role":
            (folder / "identity").write_text("who-i-am")
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "identity"))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/train")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
        elif kind == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/keys")
            (folder / "word").write_text("let-me-in")
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(folder / "word"))
        elif kind == "instance":
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", issuer.url)
        elif kind == "file":
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.path))
            self.write_keys()
        self.location = parse_location(f"s3://{MotoServer.bucket}/{uuid.uuid4().hex}")

    def write_keys(self) -> None:
        self.num_written += 1
        key = f"key{self.num_written}"
        self.path.write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n"
            f"aws_session_token = token-{self.num_written}-\n[other]\nregion = x\n"
        )

    def open(self, token: str | None = None) -> ObjectStore:
        given = {"access_key_id": "a", "secret_access_key": "b", "session_token": token} if token else {}
        return ObjectStore(self.location, StorageOptions(endpoint=self.proxy.endpoint, **given))

    def expire(self) -> None:
        """From now on the server refuses the keys that are used now; a file has others already."""
        number = self.num_written or self.issuer.num_issued
        self.proxy.expired.add(f"token-{number}-")
        if self.kind == "file":
            self.write_keys()


@pytest.fixture
def place(
    request: pytest.FixtureRequest, proxy: FaultProxy, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    return Place(getattr(request, "param", "static"), proxy, issuer, tmp_path, monkeypatch)


WORK: dict[str, Callable[[ObjectStore], object]] = {
    "write": lambda store: store.write("new", b"content", condition=ABSENT),
    "read": lambda store: store.read("key"),
    "stat": lambda store: store.stat("key"),
    "stat of an empty one": lambda store: store.stat("empty"),
    "list": lambda store: list(store.list()),
    "stream": lambda store: store.stream("key", lambda block: None, start=0, length=4),
    "delete": lambda store: store.delete("key"),
    "sweep": lambda store: store.sweep(),
}


@pytest.mark.parametrize("place", ["role", "container", "instance", "file"], indirect=True)
def test_each_request_goes_on_with_new_keys(place: Place) -> None:
    store = place.open()
    store.write("key", b"content")
    store.write("empty", b"")
    for work in WORK.values():
        place.expire()
        work(store)
    if place.kind == "role":
        assert all("who-i-am" in asked for asked in place.issuer.asked)
    if place.kind in {"container", "instance"}:
        assert all("let-me-in" in asked for asked in place.issuer.asked)


@pytest.mark.parametrize("place", ["role", "container", "instance", "file"], indirect=True)
def test_an_upload_goes_on_with_new_keys(place: Place, tmp_path: Path) -> None:
    """Its parts that have arrived are not sent again."""
    source, moved = tmp_path / "model", list[int]()
    source.write_bytes(os.urandom(64 << 20))

    def progress(num_bytes: int) -> None:
        moved.append(num_bytes)
        if len(moved) == 1:
            place.expire()

    store = place.open()
    store.upload("big", source, fence=place.expire, progress=progress)
    assert bytes(store.read("big")) == source.read_bytes()
    assert sum(moved) == 64 << 20
    assert store.sweep() == 0


@pytest.mark.parametrize("place", ["role", "container", "instance"], indirect=True)
def test_keys_are_fetched_before_they_expire(place: Place) -> None:
    place.issuer.lives_s = 200.0  # less than the 300 seconds before which they are renewed
    store = place.open()
    store.write("key", b"content")
    store.write("key", b"content")
    assert place.issuer.num_issued >= 2
    place.issuer.status = 503  # the issuer fails, and the keys are valid for another while
    store.write("key", b"content")


@pytest.mark.parametrize("place", ["role", "container", "instance", "file"], indirect=True)
def test_keys_that_cannot_be_renewed(place: Place) -> None:
    """One sentence says why, without a key or a token."""
    store = place.open()
    store.write("key", b"content")
    place.issuer.status = 403
    place.proxy.expired.add("token-")
    for work in WORK.values():
        with pytest.raises(AccessDeniedError, match=r"expired|no keys") as error:
            work(store)
        for secret in ("token-", "who-i-am", "let-me-in", "secret"):
            assert secret not in str(error.value)


def test_an_instance_of_moto(place: Place, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", moto.endpoint)
    place.open().write("key", b"content")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://metadata.example", ""])
def test_a_machine_without_keys(place: Place, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at once, and no address but an instance's own is asked without encryption."""
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "" if endpoint else "true")
    begun_s = time.monotonic()
    with pytest.raises(AccessDeniedError, match="no keys for the object store were obtained") as error:
        place.open().write("key", b"content")
    assert "AWS_ACCESS_KEY_ID" in str(error.value)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("name", WORK)
def test_keys_of_the_environment_that_have_expired(name: str, place: Place) -> None:
    place.proxy.expired.add("token-0-")
    with pytest.raises(AccessDeniedError, match="the credentials are wrong or have expired") as error:
        WORK[name](place.open("token-0-"))
    assert "AWS_SESSION_TOKEN" in str(error.value)
    assert "token-0-" not in str(error.value)
    assert error.value.exit_code == 13


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[default", b"[default]\n", b"x" * 100, b"[other]\na=b\n"])
@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_file_without_keys(place: Place, content: bytes) -> None:
    place.path.write_bytes(content)
    with pytest.raises(AccessDeniedError, match=str(place.path)):
        place.open().read("key")


def test_a_checkpoint_is_uploaded_by_the_next_attempt(place: Place, tmp_path: Path) -> None:
    """The keys expire in the middle of it: the local one stays, the next attempt uploads it, and nothing is left."""
    output = prepared(tmp_path / "out")
    commit(output, 3)
    commit(output, 4, {0: {"model.safetensors": os.urandom(40 << 20)}, 1: {"rng": b"1"}})
    first = RemoteFolder(place.open("token-1-"))
    first.claim(Claim(run_id="run", attempt=1, attempt_id="1", since="", host="h"))
    seen: list[object] = []
    uploader = Uploader(output, first, policies=(), report=seen.append)
    real = first.fence

    def expire(*, deadline_s: float | None = None) -> None:
        real(deadline_s=deadline_s)
        if any("model" in item.key for item in first.store.list("checkpoint-4")) or len(seen) == 0:
            place.proxy.expired.add("token-1-")

    first.fence = expire
    with pytest.raises(AccessDeniedError, match="expired"):
        uploader.upload_next()
    assert (output.root / "checkpoint-4").is_dir()
    second = RemoteFolder(place.open("token-2-"))
    second.claim(Claim(run_id="run", attempt=2, attempt_id="2", since="", host="h"))
    assert second.steps() == []
    again = Uploader(output, second, policies=(), report=seen.append)
    while again.upload_next():
        pass
    assert second.steps() == [4]
    assert not list(second.store.list(".safepoint/unfinished"))
    assert second.store.sweep() == 0
