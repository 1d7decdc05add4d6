"""Checkpoints in a folder: the output folder, the ranks' working folders, retention and pruning."""
