"""A checkpoint in a folder: who may write there, how a save is committed, and which checkpoints may be deleted."""
