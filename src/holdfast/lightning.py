"""For scripts on Lightning: `Trainer(callbacks=[HoldfastCallback(output_dir="out", save_steps=500)])`."""

from holdfast.training.integrations.lightning.callback import HoldfastCallback

__all__ = ["HoldfastCallback"]
