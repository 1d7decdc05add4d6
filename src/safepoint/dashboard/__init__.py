"""`safepoint dashboard`: jobs and their checkpoints in a browser, read with the functions that the commands use."""
