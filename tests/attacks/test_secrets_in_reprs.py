"""The `repr` of an object with a secret. It comes into logs, tracebacks and the reports of test runners."""

from collections.abc import Callable

import pytest

from safepoint.jobs.model.spec import JobSpec
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.protocol.messages import KeeperPlan
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.credentials import Keys
from safepoint.storage.s3.requests import Request
from safepoint.training.rendezvous.job_secret import JobSecret
from tests.support.job_values import job_spec

_SECRET = "SESAME"


def connection() -> object:
    pytest.importorskip("lightkube")
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import Cluster, User

    from safepoint.jobs.cluster.connection import Connection

    config = KubeConfig.from_one(cluster=Cluster(server="https://k"), user=User(token=_SECRET)).get()
    assert config is not None
    return Connection(name="c", config=config, namespace="ns")


def cluster_job() -> object:
    pytest.importorskip("lightkube")
    from safepoint.jobs.cluster.spec import ClusterSpec

    return ClusterSpec(
        name="a", program=("a.py",), env={"HF_TOKEN": _SECRET}, initializer_secrets={"model": {"token": _SECRET}}
    )


def manifests() -> object:
    pytest.importorskip("lightkube")
    from safepoint.jobs.cluster.manifests import Manifests

    return Manifests(trainjob={}, before=(("secrets", {"stringData": {"a": _SECRET}}),))


def local_job() -> JobSpec:
    return job_spec(env={"HF_TOKEN": _SECRET})


_OBJECTS: list[Callable[[], object]] = [
    connection,
    cluster_job,
    manifests,
    local_job,
    lambda: JobSecret(value=_SECRET.encode(), is_common=True),
    lambda: KeeperPlan(key=_SECRET),
    lambda: RunSettings(keeper=_SECRET),
    lambda: Request(method="GET", key="a", query={}, headers={"authorization": _SECRET}),
    lambda: Keys(access_key_id="a", secret_access_key=_SECRET, session_token=_SECRET),
    lambda: StorageOptions(access_key_id="a", secret_access_key=_SECRET, session_token=_SECRET),
]


@pytest.mark.parametrize("make", _OBJECTS)
def test_a_repr(make: Callable[[], object]) -> None:
    assert _SECRET not in repr(make())
