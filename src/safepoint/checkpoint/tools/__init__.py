"""What the commands do with checkpoints: list, copy, export, compare and repair."""
