"""Jobs from Python: the client that Kubeflow's users know, for this machine too, with suspend, resume and scale.

`from safepoint import TrainerClient, TransformersTrainer, PeriodicCheckpointConfig, LocalConfig`; the guide to it is
docs/guides/python.md. It stands on Kubeflow's SDK, which takes seconds to import: `pip install 'safepoint[sdk]'`.
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
