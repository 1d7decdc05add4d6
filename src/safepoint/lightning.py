"""The callback for Lightning: `Trainer(callbacks=[SafepointCallback(output_dir="out", save_steps=500)])`."""

from safepoint.training.integrations.lightning.callback import SafepointCallback

__all__ = ["SafepointCallback"]
