"""One attempt of a job: its launchers, packages, logs, and what its ranks report."""
