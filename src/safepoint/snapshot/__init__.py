"""A copy of the training state in host memory, and the keeper that makes it durable (docs/adr/0009).

image, torch_image, safetensors_image,
dcp_image, torch_archive, archive        what files will hold, before the tensors in them are copied
capture, replacing                       the calls of a framework's save routine, handed over as images
host_memory, block, arena                memory: how much there is, nameless and shared, used again and again
stepping, guard, staging,
device_copy, snapshotter                 copying beside the training, and who waits for it
messages, keeper, keeper_host            the keeper as a rank sees it
ledger, writing, committing,
starts, keeper_process                   the keeper itself, without torch
checkpointer                             all of it for a plain PyTorch loop
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
