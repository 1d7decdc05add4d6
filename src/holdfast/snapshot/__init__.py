"""A copy of the training state in host memory: capture, arena, keeper. Empty so far: saves are synchronous."""
