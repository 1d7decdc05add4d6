"""Everything of a checkpoint that the Trainer itself does not save or load."""
