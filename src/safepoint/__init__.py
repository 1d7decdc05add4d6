"""Safepoint keeps model training alive.

A job that is preempted, drained or killed loses nothing that could have been saved, and comes back by
itself. `safepoint run SCRIPT` is the whole interface for an unchanged Hugging Face Trainer script,
`safepoint.session` for a loop written by hand, `safepoint.TrainerClient` for jobs from Python; the packages below are
described in docs/architecture.md.
"""

from typing import TYPE_CHECKING, Any

from safepoint._version import __version__

if TYPE_CHECKING:
    from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
    from safepoint.training.plain.session import Run, session

_SDK = {"LocalConfig", "PeriodicCheckpointConfig", "TrainerClient", "TransformersTrainer"}


def __getattr__(name: str) -> Any:
    # Commands and the keeper need no torch, whose import takes seconds.
    if name in {"Run", "session"}:
        from safepoint.training.plain import session as run

        return getattr(run, name)
    if name in _SDK:
        from safepoint import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LocalConfig",
    "PeriodicCheckpointConfig",
    "Run",
    "TrainerClient",
    "TransformersTrainer",
    "__version__",
    "session",
]
