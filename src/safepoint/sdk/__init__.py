"""Jobs from Python: Kubeflow's client, extended to jobs on this machine, and with suspend, resume and scale.

`from safepoint import TrainerClient, TransformersTrainer, PeriodicCheckpointConfig, LocalConfig`. The guide is
docs/guides/python.md. The package needs Kubeflow's SDK, which takes seconds to import:
`pip install 'safepoint[sdk]'`.
"""

from safepoint.sdk.client import TrainerClient
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.trainers import PeriodicCheckpointConfig, TransformersTrainer
from safepoint.sdk.values import Checkpoint, TrainJob

__all__ = [
    "Checkpoint",
    "LocalConfig",
    "PeriodicCheckpointConfig",
    "TrainJob",
    "TrainerClient",
    "TransformersTrainer",
]
