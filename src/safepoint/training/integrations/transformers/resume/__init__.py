"""The state that an exact resume needs, and that the Trainer itself does not save or load."""
