"""Tests of safepoint.jobs.cluster.checks.requirements that need no cluster."""

from typing import Any, cast

import pytest

from safepoint.errors import ConflictError, NotFoundError
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


@pytest.mark.parametrize(
    ("num_nodes", "fitting"), [(1, "ReadWriteMany or ReadWriteOnce, or an"), (2, "ReadWriteMany, or an")]
)
def test_the_hint_about_a_claim_that_is_only_read_fits_the_number_of_pods(num_nodes: int, fitting: str) -> None:
    """Pods on several nodes cannot use a claim that is ReadWriteOnce."""
    with pytest.raises(ConflictError, match="ReadOnlyMany") as raised:
        check_claim(namespace("ReadOnlyMany"), "pvc://ckpt/x", num_nodes)
    assert raised.value.hint == f"use a claim that is {fitting} object store"


def test_commands_in_hints_about_claims_name_the_namespace() -> None:
    """The namespace of the user's kubectl may be another one."""
    with pytest.raises(NotFoundError) as missing:
        check_claim(namespace("ReadWriteMany"), "pvc://other/x", 1)
    assert missing.value.hint == "`kubectl get pvc -n team` lists the claims"
    pending = namespace("ReadWriteMany", phase="Pending", events=(event("FailedBinding", 1),))
    with pytest.raises(ConflictError) as unbound:
        check_claim(pending, "pvc://ckpt/x", 1)
    assert "`kubectl describe pvc ckpt -n team`" in str(unbound.value.hint)
