"""A cluster's answers with many small values: they take many times as much memory as their text, so they are refused.

An answer of 64 MiB with 22,000,000 empty objects took 1.5 GB.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.objects import name_of
from safepoint.jobs.cluster.transport.client import document
from safepoint.jobs.cluster.transport.failures import TooMuchError
from safepoint.jobs.cluster.watches.job_watch import Kept
from tests.attacks.test_hostile_clusters import Server, kubeconfig

_NUM_VALUES = 1_100_000
MANY = {
    "objects": b"{},",
    "lists": b"[],",
    "objects in objects": b'{"a":{}},',
    "numbers": b"1e9,",
    "texts": '"ā",'.encode(),
    "empty names": b'{"":0},',
}


@pytest.fixture(params=MANY)
def many(request: pytest.FixtureRequest) -> bytes:
    return b"[" + MANY[request.param] * _NUM_VALUES + b"0]"


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def api(server: Server, tmp_path: Path) -> Iterator[ClusterApi]:
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as found:
        yield found


def pod(number: int) -> dict[str, Any]:
    """A pod with 1,000 values, more than most pods have."""
    fields = {f"f:field-{place}": {} for place in range(460)}
    return {"metadata": {"name": f"pod-{number}", "managedFields": [{"fieldsV1": fields}]}, "spec": {}}


def test_a_list(many: bytes, api: ClusterApi, server: Server) -> None:
    server.answers(lambda request: request.send(b'{"items":' + many + b"}"))
    with pytest.raises(TooMuchError, match="more than 1,048,576 values"):
        api.objects("trainjobs")


def test_an_error(many: bytes, api: ClusterApi, server: Server) -> None:
    """The answer to a request that the server refuses is limited, too."""
    server.answers(lambda request: request.send(b'{"details":' + many + b"}", 403))
    with pytest.raises(TooMuchError, match="values"):
        api.get("trainjobs", "a")


def test_a_change_of_an_object(many: bytes, api: ClusterApi, server: Server) -> None:
    """A watch reads no such event."""
    event = b'{"type":"ADDED","object":{"metadata":{"name":"a"},"spec":' + many + b"}}\n"
    server.answers(lambda request: request.send(event))
    with pytest.raises(TooMuchError, match="values"):
        list(api.watch("trainjobs"))


def test_many_pages(api: ClusterApi, server: Server) -> None:
    """Each page has few enough values, and all pages together have too many."""
    content = b"[" + b"{}," * 500_000 + b"0]"
    page = b'{"items":[{"metadata":{"name":"a"},"spec":' + content + b'}],"metadata":{"continue":"more"}}'
    server.answers(lambda request: request.send(page))
    with pytest.raises(TooMuchError, match="more than 268,435,456 bytes"):
        api.objects("trainjobs")
    assert len(server.handler.seen) < 20


def test_many_changes() -> None:
    """What a watch keeps is limited, although each object has few enough values."""
    kept = Kept("trainjobs")
    for number in range(20):
        kept.add({"metadata": {"name": f"job-{number}"}, "spec": [{}] * 200_000})
    with pytest.raises(TooMuchError, match="they are not watched"):
        kept.add({"metadata": {"name": "job-20"}, "spec": [{}] * 200_000})


def test_5000_large_pods_are_accepted(api: ClusterApi, server: Server) -> None:
    """Ten pages of 500 pods, each of them with 1,000 values."""

    def page(request: Any) -> None:
        first = int(request.path.partition("continue=")[2].partition("&")[0] or 0)
        marker = {"continue": str(first + 500)} if first < 4500 else {}
        request.send({"items": [pod(number) for number in range(first, first + 500)], "metadata": marker})

    server.answers(page)
    assert len({name_of(found) for found in api.objects("pods")}) == 5000


def test_what_is_no_object() -> None:
    """The page of a proxy and invalid JSON are empty objects, as before."""
    assert document(b"<html>") == document(b"[]") == document(b"[" * 100_000) == document(b"\xff") == {}
