"""Safepoint keeps model training alive.

A job that is preempted, drained or killed loses nothing that could have been saved, and comes back by
itself. `safepoint run SCRIPT` is the whole interface for an unchanged Hugging Face Trainer script,
`safepoint.session` for a loop written by hand, `safepoint.TrainerClient` for jobs from Python; the packages below are
described in docs/architecture.md.
"""

from typing import TYPE_CHECKING, Any

from safepoint._version import __version__

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
    from safepoint.training.plain.session import Run, session


def __getattr__(name: str) -> Any:
    # Commands and the keeper need no torch, whose import takes seconds.
    if name in {"Run", "session"}:
        from safepoint.training.plain import session as run

        return getattr(run, name)
    if name in __all__:
        # Kubeflow's own names too, so that a program changes only the package that it imports from.
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
    "get_tpu_num_nodes",
    "session",
    "update_trainjob_status",
]
