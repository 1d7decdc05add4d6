"""A kubeconfig of another person names files: pipes, devices, files without end, encrypted keys."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from safepoint.errors import SafepointError, UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import Connection, connect_to, connect_with
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig, lists
from tests.support.certificates import make_certificates

_STRANGER = 65533


@pytest.fixture
def server() -> Any:
    running = Server()
    running.answers(lists())
    yield running
    running.close()


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def pipe_with_a_writer(folder: Path) -> Path:
    os.open(pipe(folder), os.O_RDWR)  # it gives no end of the file; it is left open
    return folder / "pipe"


def local_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    return folder / "socket"


def device(folder: Path) -> Path:
    return Path("/dev/zero")


def link_to_device(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/urandom")
    return folder / "link"


def sparse(folder: Path) -> Path:
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    return folder / "sparse"


def folder_itself(folder: Path) -> Path:
    return folder


KINDS = (pipe, pipe_with_a_writer, local_socket, device, link_to_device, sparse, folder_itself)


def refused(connection: Connection) -> str:
    """How the connection fails, within seconds."""
    found: list[BaseException] = []

    def use() -> None:
        try:
            with ClusterApi(connection, within_s=0) as api:
                api.objects("trainjobs")
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits"
    assert found, "it was used"
    assert isinstance(found[0], SafepointError), found
    return str(found[0])


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("key", ["tokenFile", "client-certificate", "client-key"])
def test_of_a_user(key: str, make: Callable[[Path], Path], server: Server, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    valid = str(tmp_path / "server.pem")
    others = {"client-certificate": valid, "client-key": valid} if key.startswith("client") else {}
    user = {**others, key: str(make(tmp_path))}
    refused(connect_to("c", file=kubeconfig(tmp_path, server.url, user)))
    assert server.handler.seen == []


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("is_notebook", [False, True])
def test_authorities(is_notebook: bool, make: Callable[[Path], Path], server: Server, tmp_path: Path) -> None:
    """Also those of a configuration of the SDK."""
    path = make(tmp_path)
    if is_notebook:

        class Configuration:
            host, ssl_ca_cert, verify_ssl, cert_file, key_file = server.url, str(path), True, None, None

            def get_api_key_with_prefix(self, name: str) -> str | None:
                return None

        connection = connect_with(Configuration(), namespace="ns")
    else:
        file = kubeconfig(tmp_path, server.url)
        file.write_text(file.read_text().replace('{"server"', f'{{"certificate-authority": "{path}", "server"'))
        connection = connect_to("c", file=file)
    refused(connection)
    assert server.handler.seen == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("key", ["tokenFile", "client-certificate"])
def test_a_file_that_another_user_put_there(key: str, server: Server, tmp_path: Path) -> None:
    """In a shared folder: the other user would choose the user of the cluster that the command acts as."""
    make_certificates(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / "login"
    planted.write_bytes((tmp_path / "server.pem").read_bytes() if key != "tokenFile" else b"TOKEN")
    os.chown(planted, _STRANGER, _STRANGER)
    user = {key: str(planted)} if key == "tokenFile" else {key: str(planted), "client-key": str(planted)}
    assert "another user" in refused(connect_to("c", file=kubeconfig(tmp_path, server.url, user)))


def test_a_key_with_a_password(server: Server, tmp_path: Path) -> None:
    """OpenSSL would ask the terminal, or wait for the standard input."""
    make_certificates(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    (tmp_path / "key").write_bytes(key)
    user = {"client-certificate": str(tmp_path / "server.pem"), "client-key": str(tmp_path / "key")}
    assert "encrypted" in refused(connect_to("c", file=kubeconfig(tmp_path, server.url, user)))


def test_a_token_that_is_renewed(server: Server, tmp_path: Path) -> None:
    """The file is read again when the cluster refuses the token."""
    (tmp_path / "token").write_text("old\n")

    def answer(request: Handler) -> None:
        is_new = request.headers["authorization"] == "Bearer new"
        lists()(request) if is_new or len(server.handler.seen) < 2 else request.send({}, 401)

    server.answers(answer)
    path = kubeconfig(tmp_path, server.url, {"tokenFile": "token"})
    with ClusterApi(connect_to("c", file=path), within_s=0) as api:
        assert api.objects("trainjobs") == []
        (tmp_path / "token").write_text("new\n")
        assert api.objects("trainjobs") == []
    assert [headers["Authorization"] for _, _, headers in server.handler.seen] == [
        "Bearer old",
        "Bearer old",
        "Bearer new",
    ]


def test_entries_that_multiply(tmp_path: Path) -> None:
    """Each line doubles those of the line before."""
    lines = ["a0: &a0 {x: y}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 21)]
    (tmp_path / "config").write_text("\n".join(lines))
    found: list[BaseException] = []

    def read() -> None:
        try:
            connect_to("c", file=tmp_path / "config")
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(found[0], UsageError)
    assert "line 2" in str(found[0])


@pytest.mark.parametrize(
    "user", [{"token": "é"}, {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/"}}]
)
def test_a_login_that_fails_in_a_stream(user: dict[str, Any], server: Server, tmp_path: Path) -> None:
    """The error is one that callers know, in a thread too."""
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url, user)), within_s=0) as api:
        for use in (lambda: list(api.watch("pods")), lambda: list(api.log("a", "b"))):
            with pytest.raises(SafepointError, match="your token"):
                use()
        with JobWatch(api) as watch, pytest.raises(SafepointError, match="your token"):
            watch.jobs()
