"""A namespace of the test cluster with what a team has there: a runtime, a claim, a queue, an object store's keys."""

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import criu
from tests.support.cluster.node import HOST_IMAGE
from tests.support.cluster.running import RunningCluster
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE

RUNTIME = "torch-distributed"
CLAIM, QUEUE = "checkpoints", "gpus"
_NOT_IN_PODS = ("obstore", "boto3", "botocore", "lightkube", "kubernetes", "kubeflow")
_RESTARTS = 100
"""How often the pods of a job may restart; Kubernetes' own limit is 6, and some tests kill a job ten times."""
PRIORITIES = {"low": 10, "high": 1000}
_IMAGE, _STORAGE_CLASS = "SAFEPOINT_TEST_IMAGE", "SAFEPOINT_TEST_STORAGE_CLASS"
_OF_NAMESPACE = re.compile(
    r"configmap/(blocked|kube-root-ca\.crt|openshift-service-ca\.crt)"
    rf"|trainingruntime\.trainer\.kubeflow\.org/{RUNTIME}"
    r"|secret/(builder|default|deployer|pipeline)-(dockercfg|token)-[a-z0-9]+"
)
"""What a namespace has before the first job: from this module, from Kubernetes, and from OpenShift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One namespace.

    Args:
        cluster: the cluster.
        namespace: its name; unique.
        claim_folder: the folder of this machine that pods see as the root of the claim; None on a cluster that this
            machine has not started.
    """

    cluster: RunningCluster
    namespace: str
    claim_folder: Path | None

    @property
    def folder(self) -> Path:
        """What pods see as the root of the claim."""
        self.cluster.local("it reads or writes the claim as a folder of this machine")
        assert self.claim_folder is not None
        return self.claim_folder

    def steps(self, path: str) -> list[int]:
        """The steps of the complete checkpoints in a folder of the claim, oldest first."""
        if self.claim_folder is not None:
            manifests = (self.claim_folder / path).glob("checkpoint-*/safepoint-manifest.json")
            return sorted(int(manifest.parent.name.rpartition("-")[2]) for manifest in manifests)
        place = ("--on", ".", "--namespace", self.namespace)
        done = safepoint("checkpoints", "list", *place, "--json", f"pvc://{CLAIM}/{path}")
        assert done.code == 0, done.stderr
        return sorted(int(one["name"].rpartition("-")[2]) for one in done.document)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin)

    def get(self, kind: str, name: str = "", *options: str) -> Any:
        """An object, or a list of objects, as JSON."""
        return json.loads(self.kubectl("get", kind, *([name] if name else []), *options, "-o", "json"))

    def left_at_last(self) -> list[str]:
        """The same, when all of it is gone or 60 seconds have passed: pods end after the job that they belong to."""
        deadline_s = time.monotonic() + 60 * PATIENCE
        while (found := self.left()) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return found

    def left(self) -> list[str]:
        """The names of all that a job has or leaves in the namespace."""
        kinds = "trainjobs,trainingruntimes,jobsets,jobs,pods,configmaps,secrets"
        if self.cluster.has_queues:
            kinds += ",workloads.kueue.x-k8s.io"
        found = self.kubectl("get", kinds, "-o", "name").split()
        return sorted(name for name in found if not _OF_NAMESPACE.fullmatch(name))


def runtime(name: str = RUNTIME, grace_s: int = 60) -> dict[str, Any]:
    """A ClusterTrainingRuntime whose pods have this machine's Python and its packages, without a copy."""
    places = {"usr": "/usr", "python": sys.base_prefix, "packages": str(Path(sys.prefix).resolve())}
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/tmp",
    }
    node = {
        "name": "node",
        "image": HOST_IMAGE,
        "imagePullPolicy": "Never",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "volumeMounts": [{"name": key, "mountPath": path, "readOnly": True} for key, path in places.items()],
    }
    pod = {
        "terminationGracePeriodSeconds": grace_s,
        "containers": [node],
        "volumes": [{"name": key, "hostPath": {"path": path}} for key, path in places.items()],
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = {"backoffLimit": _RESTARTS, "template": {"spec": pod}}
    job = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": spec}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [job]}}},
    }


def given_runtime(cluster: RunningCluster, namespace: str) -> dict[str, Any]:
    """A TrainingRuntime of the namespace whose pods run an image of a cluster that this machine has not started."""
    image = os.environ.get(_IMAGE)
    if not image:
        found = json.loads(cluster.kubectl("get", "clustertrainingruntime", RUNTIME, "-o", "json"))
        [job] = found["spec"]["template"]["spec"]["replicatedJobs"]
        image = job["template"]["spec"]["template"]["spec"]["containers"][0]["image"]
    document = runtime()
    document |= {"kind": "TrainingRuntime", "metadata": {**document["metadata"], "namespace": namespace}}
    pod = document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [node] = pod["containers"]
    node |= {"image": image, "env": [one for one in node["env"] if one["name"] != "PATH"]}
    for field in ("imagePullPolicy", "volumeMounts"):
        del node[field]
    del pod["volumes"]
    return document


def given_storage(namespace: str) -> dict[str, Any]:
    """A claim of a cluster that this machine has not started."""
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    if kind := os.environ.get(_STORAGE_CLASS):
        spec["storageClassName"] = kind
    metadata = {"name": CLAIM, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def storage(namespace: str, folder: Path, claim: str = CLAIM) -> list[dict[str, Any]]:
    """A claim with its volume, a folder of this machine."""
    access = {"accessModes": ["ReadWriteMany"], "storageClassName": "manual"}
    volume = namespace if claim == CLAIM else f"{namespace}-{claim}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": {"team": namespace}},
            "spec": {
                **access,
                "capacity": {"storage": "5Gi"},
                "hostPath": {"path": str(folder)},
                "claimRef": {"name": claim, "namespace": namespace},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**access, "volumeName": volume, "resources": {"requests": {"storage": "5Gi"}}},
        },
    ]


def restrict(team: Workspace, *, with_tmp: bool = True) -> None:
    """Let the namespace admit pods of the restricted Pod Security Standard only, and give it a runtime with those.

    Their user has no entry in passwd and no home, the root is read-only, and there is no token. Their Python cannot
    import obstore, and no package of the control side. A path of this machine is a claim, because such pods mount no
    host paths.

    Args:
        team: the namespace.
        with_tmp: whether pods may write to a folder for temporary files.
    """
    team.cluster.kubectl("label", "namespace", team.namespace, "pod-security.kubernetes.io/enforce=restricted")
    document = {**runtime(), "kind": "TrainingRuntime"}
    document["metadata"] = {**document["metadata"], "namespace": team.namespace}
    job = document["spec"]["template"]["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    pod["automountServiceAccountToken"] = False
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 1000660000,
        "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    node = pod["containers"][0]
    node["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    node["env"] = [item for item in node["env"] if item["name"] != "HOME"]
    node["env"] += [{"name": "HOME", "value": "/"}, {"name": "PYTHONPATH", "value": "/opt/blocked"}]
    claims: list[dict[str, Any]] = []
    for volume in pod["volumes"]:
        claims += storage(team.namespace, Path(volume.pop("hostPath")["path"]), volume["name"])
        volume["persistentVolumeClaim"] = {"claimName": volume["name"], "readOnly": True}
    text = f"import sys\n\nsys.modules.update(dict.fromkeys({_NOT_IN_PODS!r}))\n"
    blocked = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "blocked", "namespace": team.namespace},
        "data": {"sitecustomize.py": text},
    }
    pod["volumes"].append({"name": "blocked", "configMap": {"name": "blocked"}})
    node["volumeMounts"].append({"name": "blocked", "mountPath": "/opt/blocked", "readOnly": True})
    if not with_tmp:
        pod["volumes"].append({"name": "tmp", "emptyDir": {}})
        node["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp", "readOnly": True})
    apply(team.cluster, [*claims, blocked, document])


def with_criu(team: Workspace, **fields: Any) -> None:
    """Give the namespace a runtime whose pods have the CRIU of the tests, and these fields.

    The claim is writable for root only.
    """
    document = {**runtime(), "kind": "TrainingRuntime"}
    document["metadata"] = {**document["metadata"], "namespace": team.namespace}
    pod = document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod.update(fields)
    pod["volumes"].append({"name": "criu", "hostPath": {"path": str(criu.PROGRAM.parent)}})
    mount = {"name": "criu", "mountPath": str(criu.PROGRAM.parent), "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)
    pod["containers"][0]["env"].append({"name": criu.VARIABLE, "value": str(criu.PROGRAM)})
    team.folder.chmod(0o755)
    apply(team.cluster, [document])


def queue_objects(namespace: str, cpu: str) -> list[dict[str, Any]]:
    """A queue of the namespace with a quota of its own, and two priorities."""
    api = "kueue.x-k8s.io/v1beta1"
    resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "16Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "default", "resources": resources}]}
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    local = {"name": QUEUE, "namespace": namespace}
    return [
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": "default"}},
        {"apiVersion": api, "kind": "ClusterQueue", "metadata": {"name": namespace}, "spec": spec},
        {"apiVersion": api, "kind": "LocalQueue", "metadata": local, "spec": {"clusterQueue": namespace}},
        *(
            {"apiVersion": api, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
            for name, value in PRIORITIES.items()
        ),
    ]


@contextmanager
def workspace(cluster: RunningCluster, folder: Path) -> Generator[Workspace]:
    """A namespace of its own, removed afterwards."""
    name = f"team-{uuid.uuid4().hex[:6]}"
    is_local = cluster.parts is not None
    place = folder / "claim"
    place.mkdir(parents=True)
    place.chmod(0o777)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    _apply(cluster, [namespace])
    try:
        if is_local:
            _apply(cluster, [runtime(), *storage(name, place)])
        else:
            _apply(cluster, [given_runtime(cluster, name), given_storage(name)])
        yield Workspace(cluster=cluster, namespace=name, claim_folder=place if is_local else None)
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=true", "--timeout=60s")
        if is_local:
            cluster.kubectl("delete", "pv", "-l", f"team={name}", "--wait=false")


def apply(cluster: RunningCluster, objects: list[dict[str, Any]]) -> None:
    """Create or change objects. Those of the whole cluster are made only on a cluster of this machine."""
    kinds = sorted({str(one["kind"]) for one in objects if "namespace" not in one["metadata"]})
    if kinds:
        cluster.local(f"it makes objects of the whole cluster ({', '.join(kinds)})")
    _apply(cluster, objects)


def _apply(cluster: RunningCluster, objects: list[dict[str, Any]]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
