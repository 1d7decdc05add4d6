"""Tests of safepoint.jobs.cluster.api without a server; tests/cluster and tests/attacks have the others."""

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from tests.unit.jobs.cluster.test_connection import kubeconfig


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"tail": 0}, {"tailLines": "0"}),
        ({"tail": 5, "follow": True}, {"tailLines": "5", "follow": "true"}),
        ({"previous": True, "since": ""}, {"previous": "true", "timestamps": "true"}),
        ({}, {}),
    ],
)
def test_the_options_of_a_log(
    options: dict[str, Any], sent: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lines are requested with `tail=0`, and not all lines."""
    queries: list[dict[str, str]] = []

    @contextlib.contextmanager
    def lines(path: str, query: dict[str, str], **_: Any) -> Generator[Iterator[bytes]]:
        queries.append(query)
        yield iter([b"a"])

    with ClusterApi(connect_to("x", file=kubeconfig(tmp_path, "x"))) as api:
        monkeypatch.setattr(api._client, "lines", lines)
        assert list(api.log("p", "node", **options)) == ["a"]
    assert queries == [{"container": "node", **sent}]
