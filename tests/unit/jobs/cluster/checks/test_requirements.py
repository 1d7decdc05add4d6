"""Tests of safepoint.jobs.cluster.checks.requirements that need no cluster."""

from typing import Any, cast

import pytest

from safepoint.errors import ConflictError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.checks.requirements import check_claim
from tests.support.cluster.kept import Kept


def namespace(*modes: str, phase: str = "Bound", events: tuple[Any, ...] = (), **metadata: str) -> ClusterApi:
    claim = {
        "metadata": {"name": "ckpt", **metadata},
        "spec": {"accessModes": list(modes)},
        "status": {"phase": phase},
    }
    return cast("ClusterApi", Kept(persistentvolumeclaims=[claim], events=list(events)))


def event(reason: str, minute: int) -> Any:
    return {
        "metadata": {"name": f"e{minute}"},
        "reason": reason,
        "message": f"because of {reason}",
        "lastTimestamp": f"2026-11-23T10:{minute:02}:00Z",
    }


@pytest.mark.parametrize(
    ("api", "said"),
    [
        (namespace("ReadOnlyMany"), "claim ckpt is ReadOnlyMany, so the job cannot save to it"),
        (namespace("ReadWriteMany", deletionTimestamp="2026-11-26T10:00:00Z"), "claim ckpt is being deleted"),
        (namespace("ReadWriteMany", phase="Lost"), "claim ckpt has lost its volume"),
        (
            namespace("ReadWriteMany", phase="Pending", events=(event("Normal", 1), event("ProvisioningFailed", 2))),
            "claim ckpt is Pending, and gets no volume: because of ProvisioningFailed",
        ),
        (namespace("ReadWriteMany", phase="Pending", events=(event("FailedBinding", 1),)), "of FailedBinding"),
    ],
)
def test_a_claim_that_a_job_cannot_use(api: ClusterApi, said: str) -> None:
    """Otherwise the job would wait for ever, or its saves would fail."""
    with pytest.raises(ConflictError, match=said) as raised:
        check_claim(api, "pvc://ckpt/x", 1)
    assert "nothing was done" in str(raised.value)


@pytest.mark.parametrize(
    "api",
    [
        namespace("ReadWriteOnce"),
        namespace("ReadOnlyMany", "ReadWriteMany"),
        namespace("ReadWriteOncePod", phase="Pending"),
        namespace("ReadWriteMany", phase="Pending", events=(event("WaitForFirstConsumer", 1),)),
        namespace(
            "ReadWriteMany", phase="Pending", events=(event("ProvisioningFailed", 1), event("Provisioning", 2))
        ),
    ],
)
def test_a_claim_that_may_be_used(api: ClusterApi) -> None:
    """Many claims get their volume with their first pod."""
    check_claim(api, "pvc://ckpt/x", 1)
