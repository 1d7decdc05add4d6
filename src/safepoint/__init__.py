"""Safepoint saves and resumes PyTorch training.

When a training is preempted, it saves a checkpoint, and its next start continues from there. `safepoint run SCRIPT`
runs an unchanged Hugging Face Trainer script, `safepoint.session` is for a training loop written by hand,
`safepoint.epochs` for a loop of Accelerate, and `safepoint.TrainerClient` submits jobs from Python.
docs/architecture.md describes the packages below this one.
"""

from typing import TYPE_CHECKING, Any

from safepoint._version import __version__
from safepoint.errors import require_torch

if TYPE_CHECKING:
    from kubeflow.trainer import (
        DATASET_PATH,
        MODEL_PATH,
        BuiltinTrainer,
        ContainerBackendConfig,
        CustomTrainer,
        CustomTrainerContainer,
        DataCacheInitializer,
        DataFormat,
        DataType,
        Event,
        HuggingFaceDatasetInitializer,
        HuggingFaceModelInitializer,
        Initializer,
        KubernetesBackendConfig,
        LocalProcessBackendConfig,
        LoraConfig,
        Loss,
        Runtime,
        RuntimeKind,
        RuntimeTrainer,
        S3DatasetInitializer,
        S3ModelInitializer,
        TorchTuneConfig,
        TorchTuneInstructDataset,
        TrainerType,
        TrainingRuntimeSource,
        TrainJobTemplate,
        get_tpu_num_nodes,
        update_trainjob_status,
    )

    from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
    from safepoint.training.plain.epochs import epochs
    from safepoint.training.plain.session import Run, session


def __getattr__(name: str) -> Any:
    # Commands and the keeper need no torch, whose import takes seconds.
    if name in {"Run", "epochs", "session"}:
        require_torch(f"safepoint.{name}")
        from safepoint.training.plain import epochs as loops
        from safepoint.training.plain import session as run

        return getattr(loops if name == "epochs" else run, name)
    if name in __all__:
        # `__all__` includes names of the Kubeflow SDK, so a program that was written for the Kubeflow SDK only has to
        # import them from `safepoint`.
        from safepoint import sdk
        from safepoint.sdk.upstream import trainer

        return getattr(sdk if hasattr(sdk, name) else trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DATASET_PATH",
    "MODEL_PATH",
    "BuiltinTrainer",
    "ContainerBackendConfig",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "KubernetesBackendConfig",
    "LocalConfig",
    "LocalProcessBackendConfig",
    "LoraConfig",
    "Loss",
    "PeriodicCheckpointConfig",
    "Run",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJobTemplate",
    "TrainerClient",
    "TrainerType",
    "TrainingRuntimeSource",
    "TransformersTrainer",
    "__version__",
    "epochs",
    "get_tpu_num_nodes",
    "session",
    "update_trainjob_status",
]
