"""Results of the client that notebooks show as tables: lists of jobs and checkpoints, and plans."""
