"""Copies tensors during the next training step, and waits for the copy before an optimizer changes them."""
