"""Tests of safepoint.jobs.cluster.helper.claim_users."""

from typing import Any

import pytest

from safepoint.errors import ConflictError, NotFoundError
from safepoint.jobs.cluster.helper.claim_users import find_basis
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest, PodBasis
from tests.support.cluster.workspace import runtime

REQUEST = HelperRequest(arguments=("x",), claims=("ckpt",), is_read_only=True)


class Namespace:
    """The objects of a namespace, in place of its API server."""

    namespace = "team"

    def __init__(self, **kinds: list[Any]) -> None:
        self.kinds = kinds
        self.connection = type("Connection", (), {"name": "test"})

    def objects(self, kind: str, **selectors: str) -> list[Any]:
        return self.kinds.get(kind, [])

    def find(self, kind: str, name: str) -> Any:
        return next((item for item in self.objects(kind) if item["metadata"]["name"] == name), None)


def claim(*modes: str, phase: str = "Bound", **metadata: str) -> Any:
    return {
        "metadata": {"name": "ckpt", **metadata},
        "spec": {"accessModes": list(modes)},
        "status": {"phase": phase},
    }


def pod(node: str, phase: str = "Running", claim: str = "ckpt") -> Any:
    volume = {"name": "a", "persistentVolumeClaim": {"claimName": claim}}
    taints = [{"key": node, "operator": "Exists"}]
    spec = {"nodeName": node, "volumes": [volume], "tolerations": taints}
    return {"metadata": {"name": f"on-{node}"}, "spec": spec, "status": {"phase": phase}}


def job(name: str, created: str, **spec: Any) -> Any:
    volume = {"name": "a", "persistentVolumeClaim": {"claimName": "ckpt"}}
    patch = {"trainingRuntimeSpec": {"template": {"spec": {"volumes": [volume]}}}}
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "runtimePatches": [patch], **spec},
    }


def basis(*, request: HelperRequest = REQUEST, **kinds: list[Any]) -> PodBasis:
    given: dict[str, Any] = {
        "persistentvolumeclaims": [claim("ReadWriteMany")],
        "clustertrainingruntimes": [runtime()],
        **kinds,
    }
    api: Any = Namespace(**given)
    return find_basis(api, request)


def test_a_claim_that_one_node_mounts_is_read_on_that_node() -> None:
    once = [claim("ReadWriteOnce")]
    found = basis(persistentvolumeclaims=once, pods=[pod("b", "Succeeded"), pod("c", claim="other"), pod("a")])
    assert found.node == "a"
    assert found.tolerations == [{"key": "a", "operator": "Exists"}]
    assert basis(persistentvolumeclaims=once).node is None
    assert basis(pods=[pod("a")]).node is None  # any node may mount it


def test_a_claim_that_is_only_read_is_read_on_any_node() -> None:
    """Two such claims may be in use on two nodes. With another mode, a pod may have mounted the claim for writing."""
    read = claim("ReadOnlyMany")
    assert basis(persistentvolumeclaims=[read], pods=[pod("a")]).node is None
    both = HelperRequest(arguments=("x",), claims=("ckpt", "data"), is_read_only=True)
    claims = [read, {**read, "metadata": {"name": "data"}}]
    pods = [pod("a"), pod("b", claim="data")]
    assert basis(persistentvolumeclaims=claims, pods=pods, request=both).node is None
    mixed = claim("ReadWriteOnce", "ReadOnlyMany")
    assert basis(persistentvolumeclaims=[mixed], pods=[pod("a")]).node == "a"


def test_a_claim_that_one_pod_mounts_is_in_use() -> None:
    with pytest.raises(ConflictError, match="pod on-a uses it"):
        basis(persistentvolumeclaims=[claim("ReadWriteOncePod")], pods=[pod("a")])
    assert basis(persistentvolumeclaims=[claim("ReadWriteOncePod")]).node is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (claim("ReadWriteOnce", phase="Pending"), "it has no volume yet"),
        (claim("ReadWriteOnce", phase="Lost"), "has lost its volume"),
        (claim("ReadWriteOnce", deletionTimestamp="2026"), "is being deleted"),
    ],
)
def test_a_claim_that_cannot_be_mounted(found: Any, words: str) -> None:
    with pytest.raises(ConflictError, match=words):
        basis(persistentvolumeclaims=[found])


def test_there_is_no_such_claim() -> None:
    with pytest.raises(NotFoundError, match="there is no claim ckpt in namespace team") as raised:
        basis(persistentvolumeclaims=[])
    assert raised.value.hint == "`kubectl get pvc -n team` lists the claims"


def test_the_hint_about_a_claim_without_a_volume_names_the_namespace() -> None:
    with pytest.raises(ConflictError) as raised:
        basis(persistentvolumeclaims=[claim("ReadWriteOnce", phase="Pending")])
    assert "`kubectl describe pvc ckpt -n team`" in str(raised.value.hint)


def test_claims_that_are_in_use_on_three_nodes() -> None:
    """The helper can run when the pods of two nodes have ended: not when one of the three pods has ended."""
    names = ("ckpt", "data", "model")
    claims = [{**claim("ReadWriteOnce"), "metadata": {"name": name}} for name in names]
    pods = [pod(f"node-{name}", claim=name) for name in names]
    request = HelperRequest(arguments=("x",), claims=names, is_read_only=True)
    for used in (pods, pods[1:]):
        with pytest.raises(ConflictError, match="in use on different nodes") as raised:
            basis(persistentvolumeclaims=claims, pods=used, request=request)
        assert "have ended on all of these nodes except one" in str(raised.value.hint)
    assert basis(persistentvolumeclaims=claims, pods=pods[2:], request=request).node == "node-model"


def test_the_image_is_that_of_the_newest_job_with_the_claim() -> None:
    jobs = [job("old", "2026-01-01T00:00:00Z", trainer={"image": "old:1"}), job("new", "2026-01-02T00:00:00Z")]
    jobs[1]["spec"]["trainer"] = {"image": "new:1"}
    found = basis(trainjobs=jobs)
    assert (found.image, found.origin) == ("new:1", "job new")
    pods = runtime()["spec"]["template"]["spec"]["replicatedJobs"]
    pods[0]["template"]["spec"]["template"]["spec"]["containers"][0]["image"] = "made:1"
    jobset = {"metadata": {"name": "new"}, "spec": {"replicatedJobs": pods}}
    assert basis(trainjobs=jobs, jobsets=[jobset]).image == "made:1"
    chosen = HelperRequest(arguments=("x",), claims=("ckpt",), is_read_only=True, image="mine:1")
    assert basis(trainjobs=jobs, request=chosen).image == "mine:1"


def test_without_a_job_the_image_is_that_of_a_runtime() -> None:
    assert basis().origin == "runtime torch-distributed"
    other = runtime("custom")
    assert basis(clustertrainingruntimes=[other]).origin == "runtime custom"
    with pytest.raises(NotFoundError, match="--image"):
        basis(clustertrainingruntimes=[])
    chosen = HelperRequest(arguments=("x",), claims=("ckpt",), is_read_only=True, image="mine:1")
    assert basis(clustertrainingruntimes=[], request=chosen).image == "mine:1"
