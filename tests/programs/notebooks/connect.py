"""The first cells of every notebook here: the cluster, its user, and the runtime."""

# %%
import os
from pathlib import Path

from kubeflow.common.types import KubernetesBackendConfig
from kubernetes import client as k8s

from safepoint import PeriodicCheckpointConfig, TrainerClient, TransformersTrainer

# %%
# A workbench has these variables.
configuration = k8s.Configuration()
configuration.host = os.environ["OPENSHIFT_API_URL"]
configuration.verify_ssl = False
configuration.api_key = {"authorization": f"Bearer {os.environ['NOTEBOOK_USER_TOKEN']}"}

CLAIM = "checkpoints"
SHARED = Path(os.environ["WORKBENCH_MOUNT"])  # where the workbench sees the claim

# %%
client = TrainerClient(
    KubernetesBackendConfig(client_configuration=k8s.ApiClient(configuration).configuration),
)
runtime = client.backend.get_runtime("torch-distributed")
print("runtime", runtime.name)
