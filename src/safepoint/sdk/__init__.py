"""Jobs from Python: Kubeflow's client, with jobs on this machine, and with suspend, resume and scale.

`from safepoint import TrainerClient, TransformersTrainer, PeriodicCheckpointConfig, LocalConfig`. The guide is
docs/guides/python.md. `pip install 'safepoint[sdk]'` installs what this package needs. Importing the package takes
seconds, because it imports Kubeflow's SDK.
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
