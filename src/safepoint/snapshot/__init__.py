"""Copies of the training state in host memory, and the keeper: the process that writes them to disk (docs/adr/0009).

images         the bytes that each file will have, before its tensors are copied; captures a framework's save routine
memory         blocks of shared memory, and how much host memory there is
staging        copies tensors during the next training step
keeper_client  a rank's side of the connection to the keeper
protocol       the messages between a rank and the keeper
keeper         the keeper's process, without torch
checkpointer   `save` and `load` for a plain PyTorch loop
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safepoint.snapshot.checkpointer import Checkpointer, Saving


def __getattr__(name: str) -> Any:
    # The keeper imports this package, and must not import torch.
    if name in __all__:
        from safepoint.snapshot import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Checkpointer", "Saving"]
