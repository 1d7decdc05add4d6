"""How an attempt begins: folders are claimed, a checkpoint is chosen, verified, and brought to every node."""
