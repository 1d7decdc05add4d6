"""What the S3 servers of the tests have in common."""

import contextlib
import http.client
import socket

from safepoint.storage.location import Location, parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.signing import signed_headers
from safepoint.storage.store import Store


class S3Server:
    """A server on loopback with one bucket, and how a job reaches it."""

    bucket = "checkpoints"
    keys = ("HFKEY7Q2ZK4M9", "hf-secret-7q2zk4m9")  # found nowhere else, so that tests can look for them
    port: int
    endpoint: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which a job reaches the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.keys[0],
            "AWS_SECRET_ACCESS_KEY": self.keys[1],
            "AWS_REGION": "us-east-1",
        }

    def location(self, prefix: str) -> Location:
        return parse_location(f"s3://{self.bucket}/{prefix}")

    def store(self, prefix: str, **changes: str) -> Store:
        return open_store(self.location(prefix), StorageOptions.from_environment({**self.variables, **changes}))

    def make_bucket(self, name: str = bucket) -> None:
        headers = signed_headers(
            method="PUT",
            path=f"/{name}",
            query={},
            headers={"host": f"127.0.0.1:{self.port}", "content-length": "0"},
            access_key_id=self.keys[0],
            secret_access_key=self.keys[1],
            session_token=None,
            region="us-east-1",
        )
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("PUT", f"/{name}", headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"no bucket: {answer.status} {answer.read()!r}")


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
