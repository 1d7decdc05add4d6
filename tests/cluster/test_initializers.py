"""Kubeflow's initializers together with a `TransformersTrainer`.

The images of Kubeflow's initializers are not here, and neither is the internet. So the part of the runtime runs a
program of this test in their place: it is started as Trainer starts them, with their variables and their Secret.
"""

from typing import Any

import pytest

from safepoint import TrainerClient, TransformersTrainer
from safepoint.sdk.upstream import KubernetesBackendConfig, types
from tests.support.cluster.workspace import CLAIM, RUNTIME, Workspace, apply, runtime

_FETCH = """
import os
names = ("STORAGE_URI", "REGION", "SECRET_ACCESS_KEY")
os.makedirs("/workspace/dataset", exist_ok=True)
open("/workspace/dataset/found", "w").write(" ".join(os.environ.get(name, "none") for name in names))
"""


def train() -> None:
    from pathlib import Path

    Path("/workspace/read").write_text(Path("/workspace/dataset/found").read_text())


def runtime_with_dataset(team: Workspace) -> dict[str, Any]:
    """A runtime of the namespace whose pods share a claim with the part that brings the dataset."""
    document = {**runtime("with-dataset"), "kind": "TrainingRuntime"}
    document["metadata"] = {**document["metadata"], "namespace": team.namespace}
    parts = document["spec"]["template"]["spec"]["replicatedJobs"]
    node = parts[0]["template"]["spec"]["template"]["spec"]
    node["volumes"].append({"name": "initializer", "persistentVolumeClaim": {"claimName": CLAIM}})
    mount = {"name": "initializer", "mountPath": "/workspace"}
    container = {
        **node["containers"][0],
        "name": "dataset-initializer",
        "command": ["python3", "-c", _FETCH],
        "volumeMounts": [*node["containers"][0]["volumeMounts"], mount],
    }
    node["containers"][0]["volumeMounts"].append(mount)
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "dataset-initializer"}
    pod = {"restartPolicy": "OnFailure", "containers": [container], "volumes": node["volumes"]}
    job = {"metadata": {"labels": labels}, "spec": {"template": {"spec": pod}}}
    parts[0]["dependsOn"] = [{"name": "dataset-initializer", "status": "Complete"}]
    parts.insert(0, {"name": "dataset-initializer", "template": job})
    return document


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Kubeflow's client is never closed
def test_the_dataset_is_there_before_the_training(team: Workspace) -> None:
    apply(team.cluster, [runtime_with_dataset(team)])
    client = TrainerClient(
        KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))
    )
    dataset = types.S3DatasetInitializer(storage_uri="s3://bucket/data", region="here", secret_access_key="sesame")
    trainer = TransformersTrainer(func=train, num_nodes=1, resources_per_node={"cpu": 1})
    with pytest.raises(ValueError, match=f"runtime {RUNTIME} has no dataset-initializer"):
        client.train(trainer=trainer, runtime=RUNTIME, initializer=types.Initializer(dataset=dataset))
    assert team.left() == ["trainingruntime.trainer.kubeflow.org/with-dataset"]
    name = client.train(trainer=trainer, runtime="with-dataset", initializer=types.Initializer(dataset=dataset))
    job = team.get("trainjob", name)
    assert job["spec"]["initializer"]["dataset"]["secretRef"] == {"name": f"{name}-dataset"}
    assert "sesame" not in str(job)
    client.wait_for_job_status(name, timeout=400)
    assert (team.folder / "read").read_text() == "s3://bucket/data here sesame"
    client.delete_job(name)
    assert team.left_at_last() == ["trainingruntime.trainer.kubeflow.org/with-dataset"]
