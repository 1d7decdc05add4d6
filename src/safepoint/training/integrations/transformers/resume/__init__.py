"""What an exact resume needs and the Trainer itself does not save or load."""
