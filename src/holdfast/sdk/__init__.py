"""Jobs from Python: the client that Kubeflow's users know, for this machine too, with suspend, resume and scale.

`from holdfast import TrainerClient, TransformersTrainer, PeriodicCheckpointConfig, LocalConfig`; the guide to it is
docs/guides/python.md. It stands on Kubeflow's SDK, which takes seconds to import: `pip install 'holdfast[sdk]'`.
"""

from holdfast.sdk.client import TrainerClient
from holdfast.sdk.config import LocalConfig
from holdfast.sdk.trainers import PeriodicCheckpointConfig, TransformersTrainer
from holdfast.sdk.values import Checkpoint, TrainJob

__all__ = [
    "Checkpoint",
    "LocalConfig",
    "PeriodicCheckpointConfig",
    "TrainJob",
    "TrainerClient",
    "TransformersTrainer",
]
