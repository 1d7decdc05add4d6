"""What a run will need, computed before it starts: storage, memory, time. Pure arithmetic; it needs no PyTorch."""
